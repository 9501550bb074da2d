"""Where sequence parallelism begins, pauses and ends in a model, read from a recorded forward pass."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from autolaunch_strategies.model.blocks import Block
from autolaunch_strategies.plan.decisions import Decisions
from autolaunch_strategies.plan.layers import is_linear
from autolaunch_strategies.plan.rules import StyleSpec
from autolaunch_strategies.plan.trace import Trace

log = logging.getLogger(__name__)

_KEEP = {"need_transpose": False}
BEGIN = StyleSpec("SequenceParallelBegin", _KEEP)
PAUSE = StyleSpec("SequenceParallelDisable", _KEEP)
END = StyleSpec("SequenceParallelEnd", _KEEP)


@contextmanager
def places_not_told() -> Iterator[None]:
    """Within it nothing is said of models that have no place for sequence parallelism."""
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


class _NotPossible(Exception):
    """Why sequence parallelism has no place in a model."""


def sequence_styles(model: nn.Module, flow: Trace, blocks: list[Block], decisions: Decisions) -> None:
    """Add the styles of sequence parallelism to a plan, or say in the log why the model's structure has no place."""
    try:
        begin, end, pauses, rows = _find_places(model, flow, blocks, decisions)
    except _NotPossible as why:
        log.warning("no sequence parallelism in %s: %s; the rest of the plan stands", type(model).__name__, why)
        return
    decisions.add(begin, [BEGIN], "from here on each rank holds some of the positions")
    for name in pauses:
        decisions.add(name, [PAUSE], "all positions within, some of them outside", first=True)
    for name in rows:
        decisions.add(name, [BEGIN], "its results are added up into the positions of each rank", first=True)
    decisions.add(end, [END], "from here on every rank holds all positions", first=True)


def _find_places(
    model: nn.Module, flow: Trace, blocks: list[Block], decisions: Decisions
) -> tuple[str, str, list[str], list[str]]:
    """(where it begins, where it ends, modules that need all positions, row-wise layers that return to the region)."""
    containers = {block.name.rpartition(".")[0] for block in blocks}
    if len(containers) != 1:
        raise _NotPossible(f"its blocks are in {len(containers)} lists")
    first, last = flow.calls.get(blocks[0].name), flow.calls.get(blocks[-1].name)
    if first is None or last is None or first.input is None or last.output is None:
        raise _NotPossible("its blocks are not called one after the other")
    shape = tuple(first.input.shape)
    if len(shape) != 3:
        raise _NotPossible(f"what goes into a block has {len(shape)} dims, not [b, s, h]")
    if shape[0] != flow.batch:
        raise _NotPossible("what goes into a block is not laid out as [b, s, h]")
    outside = [name for name in flow.calls if not any(_is_within(name, block.name) for block in blocks)]
    begin = _maker_of(first.input, flow, outside)
    if begin is None:
        raise _NotPossible("what goes into its first block is not the output of a module")
    pauses, rows = [], []
    for block in blocks:
        if flow.calls.get(block.name) is None or tuple(flow.calls[block.name].shapes) != (shape, shape):
            raise _NotPossible(f"{block.name} does not return what it is given in shape")
        inner_pauses, inner_rows = _within_block(flow, block, shape, decisions)
        pauses += inner_pauses
        rows += inner_rows
    return begin, _end(flow, outside, last.output, decisions), pauses, rows


def _within_block(
    flow: Trace, block: Block, shape: tuple[int, ...], decisions: Decisions
) -> tuple[list[str], list[str]]:
    pauses, rows = [], []
    planned = decisions.planned()
    for key, child in block.module.named_children():
        name = f"{block.name}.{key}"
        if is_linear(child):
            if name in planned and name in flow.reaching.get(block.name, ()):
                if flow.calls[name].shapes[1] != shape:
                    raise _NotPossible(f"{name} does not return [b, s, h]")
                rows.append(name)
        elif any(parameter.dim() > 1 for parameter in child.parameters()):
            if name not in flow.calls or flow.calls[name].shapes != (shape, shape):
                raise _NotPossible(f"{name} does not take and return [b, s, h]")
            pauses.append(name)
    return pauses, rows


def _end(flow: Trace, outside: Iterable[str], last: torch.Tensor, decisions: Decisions) -> str:
    """The head if it is planned and gets the last block's output through modules without matrices, else the first
    module that takes the last block's output."""
    after = [name for name in outside if flow.calls[name].input is last]
    if not after:
        raise _NotPossible("no module takes the output of its last block")
    return after[-1]


def _maker_of(tensor: torch.Tensor, flow: Trace, names: Iterable[str]) -> str | None:
    """The module that returned `tensor`: the innermost, and the last if it was handed through several."""
    makers = [name for name in names if flow.calls[name].output is tensor and flow.calls[name].times == 1]
    return makers[-1] if makers else None


def _is_within(name: str, outer: str) -> bool:
    return name == outer or name.startswith(f"{outer}.")
