"""What is profiled: the part of a module that runs, its blocks, and which of its parameters mp shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from autolaunch_strategies.config import ConfigError, ModelParallel, PipelineParallel
from autolaunch_strategies.model.blocks import find_blocks
from autolaunch_strategies.model.lightning_module import is_lightning_module
from autolaunch_strategies.pipeline.cut import pipelined_part
from autolaunch_strategies.plan.choose import plan_for, planned_part
from autolaunch_strategies.plan.layers import is_linear
from autolaunch_strategies.plan.rules import Match, Rule
from autolaunch_strategies.plan.sequence import BEGIN, places_not_told
from autolaunch_strategies.plan.transformers_plans import own_plan_of
from autolaunch_strategies.tensor.model_parallel import matched
from autolaunch_strategies.tracing.inputs import Steps
from autolaunch_strategies.tracing.step import Step

_NO_PLACE = "its modules leave no place for sequence parallelism (a run says why)"
_RANKS = (2, 3, 5, 7)
"""Numbers of ranks for which a plan is asked, until one works."""


class Holder(nn.Module):
    """Stands for the LightningModule around a model: importing lightning takes longer than profiling."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


@dataclass
class Subject:
    """The module, the part of it that runs, and its blocks."""

    root: nn.Module
    model: nn.Module
    prefix: str
    """Of the model's names in the root."""
    blocks: dict[str, nn.Module]
    """Name in the model -> block, in the order of definition."""
    example: Any
    """Inputs that the user names, or that the module brings; None if there are none."""

    @classmethod
    def of(cls, root: nn.Module, example: Any, whole: bool = False) -> Subject:
        """The subject of a module, or of a LightningModule around one.

        Args:
            whole: all of a LightningModule, and not one model in it.
        """
        blocks = find_blocks(root)
        part = ""
        if not whole and (isinstance(root, Holder) or is_lightning_module(root)):
            part = planned_part(root)[1].rstrip(".")
            if len(blocks):
                part = pipelined_part(root, blocks, PipelineParallel())
        prefix = f"{part}." if part else ""
        within = {
            block.name.removeprefix(prefix): block.module
            for block in blocks
            if not prefix or block.name.startswith(prefix)
        }
        if example is None:
            example = getattr(root, "example_input_array", None)
        return cls(root, root.get_submodule(part), prefix, within, example)


@dataclass
class ParameterSharding:
    """Which parameters mp shards."""

    dims: dict[str, int] = field(default_factory=dict)
    """Parameter of the model -> sharded dim."""
    refused: str = ""
    """Why there are none."""
    sequences_refused: str = ""
    """Why none shards sequences between the layers that it shards."""


def parameter_sharding(
    subject: Subject, own_plan: Mapping[str, Any] | None, step: Step | None = None
) -> ParameterSharding:
    """By the plan that the engine would apply: for two ranks, or the least number that it works for.

    Args:
        step: the training step of a module around the model.
    """
    model, prefix = planned_part(subject.root)
    refused = ""
    for ranks in _RANKS:
        try:
            rules = _rules(model, own_plan, ranks, subject.example, Steps(training=step))
        except ConfigError as error:
            refused = refused or str(error)
            continue
        matches, _ = matched(model, rules, prefix)
        dims = {
            f"{prefix}{name}".removeprefix(subject.prefix): dim
            for name, dim in _sharded_dims(model, matches).items()
            if f"{prefix}{name}".startswith(subject.prefix)
        }
        if dims:
            begins = own_plan or any(BEGIN in rule.styles for rule in rules)
            return ParameterSharding(dims, sequences_refused="" if begins else _NO_PLACE)
    return ParameterSharding({}, refused or "the plan shards none of its parameters")


def _rules(model: nn.Module, own_plan: Mapping[str, Any] | None, ranks: int, example: Any, steps: Steps) -> list[Rule]:
    """Those of `plan_for`, with sequence parallelism where there is a place for it and no plan of the model's own."""
    if own_plan:
        return plan_for(model, ModelParallel(), own_plan, ranks, example, steps)
    try:
        with places_not_told():
            return plan_for(model, ModelParallel(sequence_parallel=True), None, ranks, example, steps)
    except ConfigError:
        if not own_plan_of(model):
            raise
    return plan_for(model, ModelParallel(), None, ranks, example, steps)  # which needs no forward that can be followed


def _sharded_dims(model: nn.Module, matches: Sequence[Match]) -> dict[str, int]:
    """Parameter -> the dim along which styles shard it."""
    dims: dict[str, int] = {}
    for match in matches:
        module = model.get_submodule(match.module)
        for spec in match.rule.styles:
            column = spec.name == "ColWiseParallel"
            alone = spec.arguments.get("gather_output") or spec.arguments.get("is_input_parallel") is False
            if (not column and spec.name != "RowWiseParallel") or alone:
                continue  # what is sharded by itself saves memory, and is no reason to choose mp
            turned = not isinstance(module, nn.Linear) and is_linear(module)  # [inputs, outputs]
            for own, parameter in module._parameters.items():
                if parameter is None or (match.only is not None and own != match.only):
                    continue
                name = f"{match.module}.{own}" if match.module else own
                if isinstance(module, nn.Embedding):
                    dim = 1 if column else 0
                elif parameter.dim() < 2:
                    if not column:
                        continue
                    dim = 0
                else:
                    dim = int(column == turned)
                dims.setdefault(name, int(spec.arguments.get("shard_dim") or dim) if column else dim)
    return dims
