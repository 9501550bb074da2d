"""Rules for views: sections of the sequence, dims in another order, other shapes."""

from __future__ import annotations

import math
from typing import Any

import torch

from autolaunch_strategies.sharded_sequence.parts import (
    NeedsWhole,
    Rule,
    as_shards,
    first_of,
    from_right,
    map_leaves,
    named,
    on_own_part,
    only_shard,
    shards_in,
)
from autolaunch_strategies.sharded_sequence.shard import SequenceShard
from autolaunch_strategies.torch_private.modes import without_torch_functions


def getitem(func: Any, args: Any, kwargs: Any) -> Any:
    """Slices, which may be of the sequence if they leave nothing out between, a list; or rows of a table, looked up."""
    shard, index = args
    if not isinstance(shard, SequenceShard):
        if isinstance(index, SequenceShard) and index.local.dtype not in (torch.bool, torch.uint8):
            return as_shards(shard[index.local], index, from_right(index) + shard.dim() - 1)
        raise NeedsWhole
    index = index if isinstance(index, tuple) else (index,)
    if not all(item is None or item is Ellipsis or type(item) in (int, slice) or _is_list(item) for item in index):
        raise NeedsWhole
    # One list keeps its dim where it is; a number beside it, or another list, would move it.
    if any(_is_list(item) for item in index) and sum(type(item) in (int, list) for item in index) > 1:
        raise NeedsWhole
    ndim = len(shard.sizes)
    used = sum(item is not None and item is not Ellipsis for item in index)
    if used > ndim:
        raise NeedsWhole
    place = next((i for i, item in enumerate(index) if item is Ellipsis), len(index))
    full = (*index[:place], *[slice(None)] * (ndim - used), *index[place + 1 :])
    dim, right, local_index, part = 0, 0, [], shard
    for item in full:
        after = dim > shard.sequence_dim
        if item is not None and dim == shard.sequence_dim:
            if not isinstance(item, slice):
                raise NeedsWhole
            start, stop, step = item.indices(shard.positions.size)
            if step != 1:
                raise NeedsWhole
            part, item, right = _section(shard, start, max(start, stop)), slice(None), 1
        elif after:
            right += not isinstance(item, int)
        dim += item is not None
        local_index.append(item)
    return as_shards(part.local[tuple(local_index)], part, right)


def _is_list(item: Any) -> bool:
    return isinstance(item, list) and all(type(number) is int for number in item)


def sections(names: tuple[str, ...], default: int = 0) -> Rule:
    """Contiguous parts along a dim: one, or a tuple of several.

    Args:
        names: of the arguments.
        default: the dim if none is given.
    """

    def rule(func: Any, args: Any, kwargs: Any) -> Any:
        shard = only_shard(args, kwargs)
        dim = int(named(names, args, kwargs).get("dim", default)) % len(shard.sizes)
        if dim != shard.sequence_dim:
            return on_own_part(func, args, kwargs)
        pieces = _on_probe(shard, func, args, kwargs)
        if isinstance(pieces, torch.Tensor):
            return _piece(shard, pieces)
        return tuple(_piece(shard, piece) for piece in pieces)

    return rule


def _piece(shard: SequenceShard, probe: torch.Tensor) -> SequenceShard:
    start = probe.storage_offset() // _STEP
    return _section(shard, start, start + probe.shape[shard.sequence_dim])


def _section(shard: SequenceShard, start: int, stop: int) -> SequenceShard:
    """The entries [start, stop) along the sequence dim."""
    if (start, stop) == (0, shard.positions.size):
        return shard
    rank, dim = shard.group.rank(), shard.sequence_dim
    before = shard.positions.held_before(start, rank)
    count = shard.positions.held_before(stop, rank) - before
    return SequenceShard.of(
        shard.local.narrow(dim, before, count), dim, shard.positions.narrowed(start, stop), shard.group
    )


def moved(func: Any, args: Any, kwargs: Any) -> Any:
    """Functions that give a view with dims added, taken away, or in another order, which keep all of the sequence."""
    shard = first_of(args)
    expands = getattr(func, "__name__", "") in ("expand", "expand_as", "broadcast_to")
    if shard.positions.size == 1 or (not expands and shards_in((args[1:], kwargs))):
        raise NeedsWhole
    seen = _on_probe(shard, func, args, kwargs)
    probes = [seen] if isinstance(seen, torch.Tensor) else seen
    rights = {_place_of_sequence(probe, shard.positions.size) for probe in probes}
    right = rights.pop() if len(rights) == 1 else None
    if right is None:
        raise NeedsWhole
    count = shard.local.shape[shard.sequence_dim]

    def local_shape(probe: torch.Tensor) -> list[int]:
        shape = list(probe.shape)
        shape[len(shape) - right] = count
        return shape

    def shaped(view: torch.Tensor, shape: list[int]) -> torch.Tensor:
        return view if list(view.shape) == shape else view.reshape(shape)  # squeeze() where one position is here

    shapes = [local_shape(probe) for probe in probes]
    if expands:
        return as_shards(shard.local.expand(shapes[0]), shard, right)
    views = func(shard.local, *args[1:], **kwargs)
    if isinstance(views, torch.Tensor):
        return as_shards(shaped(views, shapes[0]), shard, right)
    return as_shards(tuple(shaped(view, shape) for view, shape in zip(views, shapes, strict=True)), shard, right)


_STEP = 2
"""The stride of the sequence dim of a probe: one that no other dim has, nor one that torch makes up (1)."""


def _on_probe(shard: SequenceShard, func: Any, args: Any, kwargs: Any) -> Any:
    """`func` of tensors without memory of the shape of the whole, where the stride tells the dim of the sequence."""
    strides, step = [0] * len(shard.sizes), 2 * _STEP * (shard.positions.size + 1)
    for dim in reversed(range(len(strides))):
        strides[dim] = _STEP
        if dim != shard.sequence_dim:
            strides[dim], step = step, step * max(shard.sizes[dim], 2)
    rest, options = map_leaves(_without_memory, (args[1:], kwargs))
    with without_torch_functions():
        return func(torch.empty_strided(shard.sizes, strides, device="meta"), *rest, **options)


def _place_of_sequence(probe: torch.Tensor, size: int) -> int | None:
    """From the right; None: it is gone."""
    for dim, stride in enumerate(probe.stride()):
        if stride == _STEP and probe.shape[dim] == size:
            return probe.dim() - dim
    return None


def _without_memory(leaf: Any) -> Any:
    return torch.empty(leaf.shape, device="meta") if isinstance(leaf, torch.Tensor) else leaf


def iterated(func: Any, args: Any, kwargs: Any) -> Any:
    """The entries of the first dim one by one."""
    return iter(torch.Tensor.unbind(args[0], 0))


def reshape(func: Any, args: Any, kwargs: Any) -> Any:
    """Another shape in which the sequence is still a dim, or one with the rows before it (a batch of sequences)."""
    shard = first_of(args)
    if shard.positions.size == 1 or any(isinstance(value, torch.dtype) for value in (*args[1:], *kwargs.values())):
        raise NeedsWhole
    probes, options = map_leaves(_without_memory, (args, kwargs))
    with without_torch_functions():
        shape = list(func(*probes, **options).shape)
    dim, positions = shard.sequence_dim, shard.positions
    row = positions if positions.rows is None else positions.one_row()
    behind = math.prod(shard.sizes[dim + 1 :])
    for place, length in enumerate(shape):
        if length > 1 and length % row.size == 0 and math.prod(shape[place + 1 :]) == behind:
            break
    else:
        raise NeedsWhole
    count = length // row.size
    if count > 1:
        if row.rows is None:
            raise NeedsWhole
        row = row.flattened(count)
    shape[place] = row.counts[shard.group.rank()]
    return as_shards(shard.local.reshape(shape), shard, len(shape) - place, row)


def like_shape(method: str) -> Rule:
    """`plain.expand_as(shard)` needs no more of the shard than its shape.

    Args:
        method: what does it with the shape.
    """

    def rule(func: Any, args: Any, kwargs: Any) -> Any:
        if isinstance(args[0], SequenceShard):
            return moved(func, args, kwargs) if method == "expand" else reshape(func, args, kwargs)
        return getattr(args[0], method)(shards_in((args, kwargs))[0].sizes)

    return rule
