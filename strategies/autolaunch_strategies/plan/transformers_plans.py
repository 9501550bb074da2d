"""The plans that `transformers` models come with, as rules of ours."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from autolaunch_strategies.config import ConfigError
from autolaunch_strategies.plan.decisions import COLUMN, ROW, Decisions
from autolaunch_strategies.plan.derive import as_rules, decide_vocabulary, plan_blocks
from autolaunch_strategies.plan.layers import features, is_linear
from autolaunch_strategies.plan.patterns import matching
from autolaunch_strategies.plan.rest import divide_the_rest
from autolaunch_strategies.plan.rules import Rule
from autolaunch_strategies.plan.sequence import sequence_styles
from autolaunch_strategies.plan.trace import Trace, trace
from autolaunch_strategies.tracing.inputs import Steps

SOURCE = "the model's tp_plan"

_COLUMN = {"colwise", "colwise_rep", "colwise_gather_output", "packed_colwise"}
_ROW = {"rowwise", "rowwise_rep", "rowwise_split_input", "packed_rowwise"}
"""Whether outputs are gathered and fused layers cut specially does not matter here: activations keep global shapes."""

_WHOLE = {"replicate", "replicated_with_grad_allreduce", "sequence_parallel", "all_reduce"}
"""What these styles are for is done for every plain parameter: gradients of whole ones are added up over ranks."""


def transformers_plan(
    model: nn.Module, sequence_parallel: bool, ranks: int, example: Any = None, steps: Steps | None = None
) -> list[Rule] | None:
    """The plan that a `transformers` model comes with, as rules; None if it has none, or one that does not serve.

    It serves if every layer that it shards can be sharded among `ranks`, and column-wise and row-wise layers come
    together; a plan derived from the model's dataflow is the better choice otherwise.

    Args:
        sequence_parallel, ranks, example, steps: as in `derive_plan`.
    """
    plan = own_plan_of(model)
    if not plan:
        return None
    decisions = Decisions()
    modules = dict(model.named_modules())
    for pattern, style in plan.items():
        for name in matching(pattern, modules):
            _decide(name, modules[name], style, decisions)
    blocks = plan_blocks(model)
    within = [name for name in decisions.planned() if any(name.startswith(f"{block.name}.") for block in blocks)]
    if not within or not _divides(model, modules, within, decisions, ranks):
        return None
    for name in decisions.planned() - set(within):
        del decisions.styles[name], decisions.reasons[name]  # embedding and head: both or none, see decide_vocabulary
    flow = _flow(model, example, steps)
    if flow is None and sequence_parallel:
        return None
    if flow is not None and any(
        flow.operators.get(name) for name, styles in decisions.styles.items() if COLUMN in styles
    ):
        return None
    decide_vocabulary(model, flow, ranks, decisions)
    if flow is not None:
        divide_the_rest(model, flow, ranks, decisions)
    if sequence_parallel and flow is not None:
        sequence_styles(model, flow, blocks, decisions)
    return as_rules(model, blocks, decisions, SOURCE)


def _flow(model: nn.Module, example: Any, steps: Steps | None) -> Trace | None:
    try:
        return trace(model, example, steps)
    except ConfigError:  # the plan stands without it
        return None


def own_plan_of(model: nn.Module) -> Mapping[str, str]:
    """`transformers` gathers the plans of all parts in the outermost model, with full names."""
    plan = getattr(model, "_tp_plan", None)
    if not isinstance(plan, Mapping) or not hasattr(model, "config"):
        return {}
    return {str(pattern): str(style) for pattern, style in plan.items()}


def _decide(name: str, module: nn.Module, style: str, decisions: Decisions) -> None:
    if style in _COLUMN and is_linear(module):
        decisions.decide(name, [COLUMN], f"column-wise: {style} in the plan of transformers")
    elif style in _ROW and is_linear(module):
        decisions.decide(name, [ROW], f"row-wise: {style} in the plan of transformers")
    elif style not in _WHOLE:
        decisions.decide(name, (), f"whole: {style} in the plan of transformers has no counterpart")


def _divides(
    model: Any, modules: Mapping[str, nn.Module], names: Iterable[str], decisions: Decisions, ranks: int
) -> bool:
    """Whether all planned sizes and the heads divide, and each part with column-wise layers has a row-wise one."""
    parts: dict[str, set[str]] = {}
    for name in names:
        (style,) = decisions.styles[name]
        size = features(modules[name])[1 if style == COLUMN else 0]
        if size % ranks:
            return False
        parts.setdefault(name.rpartition(".")[0], set()).add(style.name)
    text_config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
    heads = [getattr(text_config, key, None) for key in ("num_attention_heads", "num_key_value_heads")]
    if any(isinstance(count, int) and count % ranks for count in heads):
        return False
    return all(styles == {COLUMN.name, ROW.name} for styles in parts.values())
