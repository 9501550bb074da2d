"""What is left over beside pairs of column-wise and row-wise layers, sharded by itself: right anywhere, for a price.

A layer whose outputs are gathered does 1/n of its work, and its output travels once more. Parameters that are gathered
when used save their memory alone. Both leave everything around them as on one device.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from autolaunch_strategies.plan.decisions import COLUMN_GATHERED, Decisions
from autolaunch_strategies.plan.layers import features, is_convolution, is_layer, outputs_of_convolution
from autolaunch_strategies.plan.rules import StyleSpec
from autolaunch_strategies.plan.trace import Trace

ROW_ALONE = StyleSpec("RowWiseParallel", {"is_input_parallel": False})

WORTH = 0.01
"""The least part of a model's numbers for which a kind of layer is sharded by itself: each costs an exchange."""


@dataclass(frozen=True)
class _Left:
    """A matrix that is whole so far: the module that a rule would name, its name in there, what would be done."""

    module: str
    parameter: str
    numel: int
    style: StyleSpec | None
    """None: it is gathered when used."""

    @property
    def kind(self) -> str:
        """The same for all blocks."""
        return re.sub(r"\d+", "*", f"{self.module}.{self.parameter}")


def divide_the_rest(model: nn.Module, flow: Trace, ranks: int, decisions: Decisions) -> None:
    """Shard what no decision shards, kind by kind, where it holds enough of the model's numbers."""
    left = list(_left_over(model, flow, ranks, decisions))
    total = sum(parameter.numel() for parameter in model.parameters())
    sizes: Counter[str] = Counter()
    for item in left:
        sizes[item.kind] += item.numel
    gathered: dict[str, list[str]] = {}
    for item in left:
        if sizes[item.kind] < WORTH * total:
            continue
        if item.style is None:
            gathered.setdefault(item.module, []).append(item.parameter)
            continue
        why = decisions.reasons.get(item.module, "").removeprefix("whole: ")
        exchange = "row-wise by itself" if item.style == ROW_ALONE else "column-wise by itself, outputs gathered"
        decisions.decide(item.module, [item.style], f"{exchange}: {why}" if why else exchange)
    for name, parameters in gathered.items():
        for parameter in parameters:
            decisions.forget(f"{name}.{parameter}".rpartition(".")[0])
        decisions.decide(
            name,
            [StyleSpec("GatherWhenUsed", {"parameters": parameters})],
            "sharded, and whole while it runs: no rule is known for how it uses them",
        )


def can_be_shared(size: int, ranks: int) -> bool:
    """Whether every rank gets something of a dim, in parts of which all but the last are equal."""
    return (ranks - 1) * -(-size // ranks) < size


def _left_over(model: nn.Module, flow: Trace, ranks: int, decisions: Decisions) -> Iterator[_Left]:
    modules = dict(model.named_modules())
    planned = decisions.planned()
    taken = {id(parameter) for name in planned for parameter in modules[name].parameters(recurse=False)}
    owners = Counter(id(item) for module in modules.values() for item in set(module.parameters(recurse=False)))
    for name, module in modules.items():
        matrices = {
            key: parameter
            for key, parameter in module.named_parameters(recurse=False)
            if parameter.dim() > 1 and id(parameter) not in taken and owners[id(parameter)] == 1
        }
        if not matrices or _keeps_parameters_elsewhere(module):
            continue
        if name in flow.calls and name not in flow.untraceable and "weight" in matrices and is_layer(module):
            style = _style(module, ranks)
            if style is not None:
                yield _Left(name, "weight", matrices["weight"].numel(), style)
            continue
        holder = _nearest_called(name, flow)
        if holder is None:
            continue
        inner = name.removeprefix(holder).lstrip(".")
        for key, parameter in matrices.items():
            if any(can_be_shared(size, ranks) for size in parameter.shape):
                yield _Left(holder, f"{inner}.{key}" if inner else key, parameter.numel(), None)


def _style(module: nn.Module, ranks: int) -> StyleSpec | None:
    """How a layer is sharded by itself: evenly by its outputs, evenly by its inputs, or by its outputs; None: not."""
    if is_convolution(module):
        outputs = outputs_of_convolution(module)
        groups: int = module.groups  # type: ignore[assignment]  # torch: a tensor or a module
        return COLUMN_GATHERED if can_be_shared(outputs, ranks) and (groups == 1 or groups % ranks == 0) else None
    if isinstance(module, nn.Embedding):
        special = module.max_norm is not None or module.scale_grad_by_freq or module.sparse
        return COLUMN_GATHERED if can_be_shared(module.embedding_dim, ranks) and not special else None
    inputs, outputs = features(module)
    if outputs % ranks == 0:
        return COLUMN_GATHERED
    if inputs % ranks == 0:
        return ROW_ALONE
    return COLUMN_GATHERED if can_be_shared(outputs, ranks) else None


def _nearest_called(name: str, flow: Trace) -> str | None:
    while name:
        if name in flow.calls:
            return name
        name = name.rpartition(".")[0]
    return None


def _keeps_parameters_elsewhere(module: nn.Module) -> bool:
    """Whether it holds its parameters in a list of its own, too, as LSTMs do: others can't take their places."""
    own = {id(parameter) for parameter in module.parameters(recurse=False)}
    lists = (value for value in vars(module).values() if isinstance(value, list | tuple))
    return any(isinstance(item, torch.Tensor) and id(item) in own for value in lists for item in value)
