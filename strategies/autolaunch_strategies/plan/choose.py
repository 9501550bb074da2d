"""Which plan a model gets: the user's rules over those of the model itself, or over derived ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from autolaunch_strategies.config import ModelParallel
from autolaunch_strategies.plan.adapters import carried_over, without_adapters
from autolaunch_strategies.plan.derive import derive_plan
from autolaunch_strategies.plan.rules import Rule, merge_plans, read_plan
from autolaunch_strategies.plan.transformers_plans import transformers_plan
from autolaunch_strategies.tracing.inputs import Steps


def plan_for(
    model: nn.Module,
    mp: ModelParallel,
    own_plan: Mapping[str, Any] | None,
    ranks: int,
    example: Any = None,
    steps: Steps | None = None,
) -> list[Rule]:
    """The rules for `model` (may be on meta): `mp.plan` over its base.

    Args:
        own_plan: the plan that comes with the model for the chosen way (with or without sequence parallelism), if any.
        ranks: along the mp axis.
        example: inputs for one call of the model, if the user names some (lightning's `example_input_array`).
        steps: what a module around the model does with it.

    Raises:
        ConfigError: a wrong rule, or no base can be found for this model.
    """
    base: list[Rule] = []
    with without_adapters(model):
        if mp.base == "model":
            if own_plan:
                base = read_plan(own_plan, "the model's plan")
            else:
                shipped = transformers_plan(model, mp.sequence_parallel, ranks, example, steps)
                base = (
                    shipped if shipped is not None else derive_plan(model, mp.sequence_parallel, ranks, example, steps)
                )
        elif mp.base == "derive":
            base = derive_plan(model, mp.sequence_parallel, ranks, example, steps)
    return carried_over(merge_plans(base, mp.plan), model)


def planned_part(root: nn.Module) -> tuple[nn.Module, str]:
    """(the module that plans speak of, what stands in front of its names in `root`).

    That is the one child with parameters of a module that has no parameters of its own, such as the model of a
    LightningModule; a second name of one of its parts is no child. Else `root` itself.
    """
    children = [(name, child) for name, child in root.named_children() if next(child.parameters(), None) is not None]
    inside = {part for _, child in children for part in child.modules() if part is not child}
    children = [(name, child) for name, child in children if child not in inside]  # another name of a part of another
    if len(children) == 1 and next(root.parameters(recurse=False), None) is None:
        return children[0][1], f"{children[0][0]}."
    return root, ""
