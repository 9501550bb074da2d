"""What torch functions do with sequence shards: a table of functions, each with the rule that it follows.

A rule computes the function on what this rank holds and says where the sequence is in what comes out; or it answers
`NotImplemented`: then the function runs on whole tensors. What a rule decides by is the same on every rank (shapes of
the whole, positions), since all ranks gather together or not at all.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map

from autolaunch_strategies.model.random_streams import RANDOM_FUNCTIONS
from autolaunch_strategies.sharded_sequence.collectives import sum_over
from autolaunch_strategies.sharded_sequence.shard import Positions, SequenceShard, cut, on_parts
from autolaunch_strategies.torch_private.modes import without_torch_functions
from autolaunch_strategies.torch_private.random_state import saved_random_state, seed_torch

log = logging.getLogger(__name__)

Rule = Callable[[Any, Any, Any], Any]


def run(func: Any, args: Any, kwargs: Any) -> Any:
    """`func` of arguments of which some are sequence shards: shards, plain tensors, or whatever it returns."""
    if not args and "input" in kwargs:
        args, kwargs = (kwargs["input"],), {name: value for name, value in kwargs.items() if name != "input"}
    rule = RULES.get(func)
    result = NotImplemented if rule is None else rule(func, args, kwargs)
    return on_whole(func, args, kwargs) if result is NotImplemented else result


def on_whole(func: Any, args: Any, kwargs: Any) -> Any:
    """`func` on gathered tensors, on every rank; what it changes in place is cut again.

    Raises:
        RuntimeError: it changes the shape of a shard in place.
    """
    name = getattr(func, "__name__", str(func))
    _tell_once(name)
    if isinstance(kwargs.get("out"), SequenceShard):
        raise RuntimeError(f"{name}(out=...) can't write into a tensor of which each rank holds a part (cp)")
    whole_args, whole_kwargs = tree_map(_whole, (args, kwargs))
    first = args[0] if args else None
    if not isinstance(first, SequenceShard) or not _changes_first(name):
        return func(*whole_args, **whole_kwargs)
    changed = whole_args[0].clone()
    func(changed, *whole_args[1:], **whole_kwargs)
    if changed.shape != first.sizes:
        raise RuntimeError(f"{name} can't change the shape of a tensor of which each rank holds a part (cp) in place")
    first.local.copy_(cut(changed, first.sequence_dim, first.positions, first.group))
    return None if name == "__setitem__" else first


def _changes_first(name: str) -> bool:
    return name in _AUGMENTED or (name.endswith("_") and not name.endswith("__"))


_AUGMENTED = frozenset(
    ["__setitem__", "__set__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__idiv__", "__ifloordiv__",
     "__imod__", "__ipow__", "__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__"]
)  # fmt: skip


@lru_cache(maxsize=256)
def _tell_once(name: str) -> None:
    log.info("cp: %s runs on sequences gathered from all ranks", name)


def _whole(leaf: Any) -> Any:
    return leaf.whole() if isinstance(leaf, SequenceShard) else leaf


# --- where the sequence is --------------------------------------------------------------------------------------------


def _shards(tree: Any) -> list[SequenceShard]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, SequenceShard)]


def _from_right(shard: SequenceShard) -> int:
    """1 for the last dim."""
    return len(shard.sizes) - shard.sequence_dim


class _Mismatch(Exception):
    """A tensor that is neither the same for all positions nor has one entry for each."""


def _parts(tree: Any, lead: SequenceShard, right: int, exact: bool = False) -> Any:
    """What this rank holds of tensors that broadcast with `lead` (aligned at the last dim, as torch does).

    Args:
        right: the place of the sequence dim from the right, 1 for the last.
        exact: tensors don't broadcast: each has an entry for each position.

    Raises:
        _Mismatch: on every rank.
    """

    def part(leaf: Any) -> Any:
        if isinstance(leaf, SequenceShard):
            if _from_right(leaf) == right and leaf.positions == lead.positions:
                return leaf.local
            leaf = leaf.whole()
        if not isinstance(leaf, torch.Tensor):
            return leaf
        dim = leaf.dim() - right
        if dim >= 0 and leaf.shape[dim] == lead.positions.size:
            return cut(leaf, dim, lead.positions, lead.group)
        if exact or (dim >= 0 and leaf.shape[dim] != 1):
            raise _Mismatch
        return leaf

    return tree_map(part, tree)


def _wrap(result: Any, lead: SequenceShard, right: int, positions: Positions | None = None) -> Any:
    """Tensors in `result` as shards with the sequence at the place `right`; what is its own part, as `lead`."""

    def wrap(leaf: Any) -> Any:
        if leaf is lead._local:  # changed in place, or left as it was
            lead.watch()
            return lead
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return SequenceShard.of(leaf, leaf.dim() - right, positions or lead.positions, lead.group)

    if isinstance(result, list | tuple):
        items = [_wrap(item, lead, right, positions) for item in result]
        if type(result) in (list, tuple):
            return type(result)(items)
        return type(result)(*items) if hasattr(result, "_fields") else type(result)(items)
    return wrap(result)


def _first(args: Any) -> SequenceShard | None:
    return args[0] if args and isinstance(args[0], SequenceShard) else None


def _bound(names: tuple[str, ...], args: Any, kwargs: Any) -> dict[str, Any]:
    given = dict(zip(names, args, strict=False)) | kwargs
    return given | {"dim": given["axis"]} if "axis" in given else given


@lru_cache(maxsize=64)
def _names_of(func: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(func).parameters)


def _dims(value: Any, count: int) -> list[int]:
    """One dim, several, or None for all, as numbers >= 0."""
    if value is None or isinstance(value, bool):
        return list(range(count))
    values = [value] if isinstance(value, int) else list(value)
    return [int(dim) % count for dim in values] or list(range(count))


# --- rules: each position by itself -----------------------------------------------------------------------------------


def _elementwise(func: Any, args: Any, kwargs: Any) -> Any:
    """Functions that compute each element from those at the same place, with broadcasting."""
    shards = _shards((args, kwargs))
    first = _first(args)
    if first is None and (_changes_first(getattr(func, "__name__", "")) or kwargs.get("out") is not None):
        return NotImplemented  # a plain tensor stays plain
    lead = (
        first
        if first is not None and _changes_first(getattr(func, "__name__", ""))
        else max(shards, key=lambda shard: shard.positions.size)
    )
    right = _from_right(lead)
    try:
        args, kwargs = _parts((args, kwargs), lead, right)
    except _Mismatch:
        return NotImplemented
    return _wrap(func(*args, **kwargs), lead, right)


def _where(func: Any, args: Any, kwargs: Any) -> Any:
    return NotImplemented if len(args) + len(kwargs) == 1 else _elementwise(func, args, kwargs)


def _conversion(func: Any, args: Any, kwargs: Any) -> Any:
    """To another type or device; to that of another tensor, of which nothing else counts."""

    def as_empty(leaf: Any) -> Any:
        return leaf.new_empty(0) if isinstance(leaf, torch.Tensor) else leaf

    rest, named = tree_map(as_empty, (args[1:], kwargs))
    first = _first(args)
    if first is None:
        return func(args[0], *rest, **named)
    converted = func(first.local, *rest, **named)
    if not isinstance(converted, torch.Tensor):  # the name of a type
        return converted
    if converted.device != first.local.device:
        return NotImplemented
    return _wrap(converted, first, _from_right(first))


def _rows(consumed: Callable[[dict[str, Any]], int | None], added: int = 0) -> Rule:
    """Functions of rows of the first argument, whose last dims they consume and put others in their place."""

    def rule(func: Any, args: Any, kwargs: Any) -> Any:
        first = _first(args)
        names = ("input", "second", "third", "fourth", "fifth", "sixth", "seventh")
        given = _bound(names, args, kwargs)
        count = consumed(given)
        if first is None or count is None or _shards((args[1:], kwargs)) or _from_right(first) <= count:
            return NotImplemented
        return _wrap(func(first.local, *args[1:], **kwargs), first, _from_right(first) + added)

    return rule


def _normalized_dims(given: dict[str, Any]) -> int:
    shape: Any = given.get("normalized_shape", given.get("second"))
    return 1 if isinstance(shape, int) else len(shape)


def _looked_up(given: dict[str, Any]) -> int | None:
    """No dims of the indices are consumed. Rows that are rescaled, or counted, have to be the same on every rank."""
    scaled = given.get("max_norm", given.get("fourth")) is not None
    return None if scaled or given.get("scale_grad_by_freq", given.get("sixth")) else 0


def _one_hot_dims(given: dict[str, Any]) -> int | None:
    return None if given.get("num_classes", given.get("second", -1)) == -1 else 0


def _matmul(func: Any, args: Any, kwargs: Any) -> Any:
    """Products of rows, or of matrices of which the sequence only counts how many there are."""
    if kwargs or len(args) != 2:
        return NotImplemented
    left, right = args
    shards = _shards(args)
    lead = max(shards, key=lambda shard: shard.positions.size)
    place = _from_right(lead)
    if place > 2:
        if left.dim() == 1 or right.dim() == 1:
            out = place - 1
            parts = left.local if left is lead else left, right.local if right is lead else right
            return NotImplemented if len(shards) > 1 else _wrap(func(*parts), lead, out)
        try:
            return _wrap(func(*_parts(args, lead, place)), lead, place)
        except _Mismatch:
            return NotImplemented
    if place != 2 or left is not lead or len(shards) > 1:
        return NotImplemented
    return _wrap(func(left.local, right), lead, 1 if right.dim() == 1 else 2)


def _addmm(func: Any, args: Any, kwargs: Any) -> Any:
    """added + left @ right of matrices, the sequence being the rows of `left`."""
    if len(args) != 3 or not isinstance(args[1], SequenceShard) or isinstance(args[2], SequenceShard):
        return NotImplemented
    lead = args[1]
    if _from_right(lead) != 2:
        return NotImplemented
    try:
        return _wrap(func(_parts(args[0], lead, 2), lead.local, args[2], **kwargs), lead, 2)
    except _Mismatch:
        return NotImplemented


def _einsum(func: Any, args: Any, kwargs: Any) -> Any:
    """Sums of products in which the sequence has one letter, and keeps it."""
    equation, *operands = args
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = list(operands[0])
    if not isinstance(equation, str) or "->" not in equation or "." in equation or kwargs:
        return NotImplemented
    left, out = equation.replace(" ", "").split("->")
    terms = left.split(",")
    if len(terms) != len(operands):
        return NotImplemented
    lead, term = next(
        (item, term) for item, term in zip(operands, terms, strict=True) if isinstance(item, SequenceShard)
    )
    letter = term[lead.sequence_dim]
    if letter not in out or any(term.count(letter) > 1 for term in terms):
        return NotImplemented
    parts = []
    for item, term in zip(operands, terms, strict=True):
        if letter in term:
            try:
                parts.append(_parts(item, lead, len(term) - term.index(letter), exact=True))
            except _Mismatch:
                return NotImplemented
        else:
            parts.append(_whole(item))
    return _wrap(func(equation, *parts), lead, len(out) - out.index(letter))


# --- rules: along other dims ------------------------------------------------------------------------------------------


def _along(names: tuple[str, ...], default: Any = None, aligned: bool = False) -> Rule:
    """Functions along some dims that keep the number of dims.

    Args:
        names: of the arguments.
        default: the dim if none is given.
        aligned: other tensors have the shape of the first one, except along the dim.
    """

    def rule(func: Any, args: Any, kwargs: Any) -> Any:
        first = _first(args)
        if first is None:
            return NotImplemented
        given = _bound(names, args, kwargs)
        value = given.get("dim", given.get("dims", default))
        if names[1:] == ("dims",) and len(args) > 2:
            value = args[1:]
        if first.sequence_dim in _dims(value, len(first.sizes)):
            return NotImplemented
        right, rest = _from_right(first), (args[1:], kwargs)
        if aligned:
            try:
                rest = _parts(rest, first, right, exact=True)
            except _Mismatch:
                return NotImplemented
        elif _shards(rest):
            return NotImplemented
        return _wrap(func(first.local, *rest[0], **rest[1]), first, right)

    return rule


def _reduction(names: tuple[str, ...], default: Any = None, summed: bool = False) -> Rule:
    """Functions that reduce some dims; sums over the sequence are summed on every rank, and then over ranks."""

    def rule(func: Any, args: Any, kwargs: Any) -> Any:
        if (len(args) > 1 and isinstance(args[1], torch.Tensor)) or "other" in kwargs:
            return _elementwise(func, args, kwargs)  # the larger of two
        first = _first(args)
        if first is None or kwargs.get("out") is not None:
            return NotImplemented
        given = _bound(names, args, kwargs)
        value = given.get("dim", default)
        if summed and len(args) > 2 and isinstance(args[2], int) and not isinstance(args[2], bool):
            return NotImplemented
        dims = _dims(value, len(first.sizes))
        if first.sequence_dim in dims:
            return _total(func, first, dims, given) if summed else NotImplemented
        result = func(first.local, *args[1:], **kwargs)
        leaf = result if isinstance(result, torch.Tensor) else result[0]
        kept = leaf.dim() == len(first.sizes)
        right = _from_right(first) - (0 if kept else sum(dim > first.sequence_dim for dim in dims))
        return _wrap(result, first, right)

    return rule


def _total(func: Any, shard: SequenceShard, dims: list[int], given: dict[str, Any]) -> Any:
    local, dtype = shard.local, given.get("dtype")
    mean = func.__name__ == "mean"
    if mean and not (dtype or local.dtype).is_floating_point and not (dtype or local.dtype).is_complex:
        return NotImplemented
    narrow = dtype is None and local.dtype in _NARROW
    made = func(torch.ones((1,), dtype=local.dtype, device=local.device)).dtype if narrow else dtype
    total = torch.sum(local, dims, keepdim=bool(given.get("keepdim", False)), dtype=torch.float32 if narrow else dtype)
    total = on_parts(total, lambda part: sum_over(part, shard.group))
    if mean:
        total = total / math.prod(shard.sizes[dim] for dim in dims)
    return total.to(made) if narrow else total


_NARROW = (torch.float16, torch.bfloat16)


def _joined(func: Any, args: Any, kwargs: Any) -> Any:
    """cat and stack along another dim."""
    given = _bound(("tensors", "dim"), args, kwargs)
    tensors, stacks = list(given["tensors"]), func.__name__ == "stack"
    lead = _shards(tensors)[0] if _shards(tensors) else None
    if lead is None or given.get("out") is not None or any(tensor.dim() != len(lead.sizes) for tensor in tensors):
        return NotImplemented
    dim = int(given.get("dim", 0)) % (len(lead.sizes) + stacks)
    if dim == lead.sequence_dim and not stacks:
        return NotImplemented
    right = _from_right(lead)
    try:
        parts = _parts(tensors, lead, right, exact=True)
    except _Mismatch:
        return NotImplemented
    return _wrap(func(parts, dim), lead, right + (stacks and dim > lead.sequence_dim))


def _pad(func: Any, args: Any, kwargs: Any) -> Any:
    first = _first(args)
    pad = _bound(("input", "pad"), args, kwargs)["pad"]
    if first is None:
        return NotImplemented
    right = _from_right(first)
    if any(pad[2 * right - 2 : 2 * right]):
        return NotImplemented
    return _wrap(func(first.local, *args[1:], **kwargs), first, right)


# --- rules: shapes ----------------------------------------------------------------------------------------------------


def _part_of(shard: SequenceShard, start: int, stop: int) -> SequenceShard:
    """The entries [start, stop) along the sequence dim."""
    if (start, stop) == (0, shard.positions.size):
        return shard
    rank, dim = shard.group.rank(), shard.sequence_dim
    before = shard.positions.held_before(start, rank)
    count = shard.positions.held_before(stop, rank) - before
    return SequenceShard.of(
        shard.local.narrow(dim, before, count), dim, shard.positions.narrowed(start, stop), shard.group
    )


def _getitem(func: Any, args: Any, kwargs: Any) -> Any:
    shard, index = args
    if not isinstance(shard, SequenceShard):
        # rows of a table, looked up by indices
        if isinstance(index, SequenceShard) and index.local.dtype not in (torch.bool, torch.uint8):
            return _wrap(shard[index.local], index, _from_right(index) + shard.dim() - 1)
        return NotImplemented
    index = index if isinstance(index, tuple) else (index,)
    if not all(item is None or item is Ellipsis or type(item) in (int, slice) for item in index):
        return NotImplemented
    ndim = len(shard.sizes)
    used = sum(item is not None and item is not Ellipsis for item in index)
    place = next((i for i, item in enumerate(index) if item is Ellipsis), len(index))
    full = (*index[:place], *[slice(None)] * (ndim - used), *index[place + 1 :])
    if used > ndim:
        return NotImplemented
    dim, right, local_index, part = 0, 0, [], shard
    for item in full:
        after = dim > shard.sequence_dim
        if item is not None and dim == shard.sequence_dim:
            if not isinstance(item, slice):
                return NotImplemented
            start, stop, step = item.indices(shard.positions.size)
            if step != 1:
                return NotImplemented
            part, item, right = _part_of(shard, start, max(start, stop)), slice(None), 1
        elif after:
            right += not isinstance(item, int)
        dim += item is not None
        local_index.append(item)
    return _wrap(part.local[tuple(local_index)], part, right)


def _sections(names: tuple[str, ...], default: int = 0) -> Rule:
    """Contiguous parts along a dim: one, or a tuple of several."""

    def rule(func: Any, args: Any, kwargs: Any) -> Any:
        first = _first(args)
        if first is None or _shards((args[1:], kwargs)):
            return NotImplemented
        dim = int(_bound(names, args, kwargs).get("dim", default)) % len(first.sizes)
        if dim != first.sequence_dim:
            return _wrap(func(first.local, *args[1:], **kwargs), first, _from_right(first))
        found = _on_probe(first, func, args, kwargs)
        pieces = [found] if isinstance(found, torch.Tensor) else found
        starts = [piece.storage_offset() // _STEP for piece in pieces]
        parts = [_part_of(first, start, start + piece.shape[dim]) for start, piece in zip(starts, pieces, strict=True)]
        return parts[0] if isinstance(found, torch.Tensor) else tuple(parts)

    return rule


_STEP = 2
"""The stride of the sequence dim of a probe: one that no other dim has, nor one that torch makes up (1)."""


def _on_probe(shard: SequenceShard, func: Any, args: Any, kwargs: Any) -> Any:
    """`func` of tensors without memory of the shape of the whole, where the stride tells the dim of the sequence."""

    def probe(leaf: Any) -> Any:
        return torch.empty(leaf.shape, device="meta") if isinstance(leaf, torch.Tensor) else leaf

    strides, step = [0] * len(shard.sizes), 2 * _STEP * (shard.positions.size + 1)
    for dim in reversed(range(len(strides))):
        strides[dim] = _STEP
        if dim != shard.sequence_dim:
            strides[dim], step = step, step * max(shard.sizes[dim], 2)
    rest, named = tree_map(probe, (args[1:], kwargs))
    with without_torch_functions():
        return func(torch.empty_strided(shard.sizes, strides, device="meta"), *rest, **named)


def _moved(func: Any, args: Any, kwargs: Any) -> Any:
    """Functions that give a view with dims added, taken away, or in another order, which keep all of the sequence."""
    first = _first(args)
    if first is None or first.positions.size == 1:
        return NotImplemented
    expands = getattr(func, "__name__", "") in ("expand", "expand_as", "broadcast_to")
    if not expands and _shards((args[1:], kwargs)):
        return NotImplemented
    seen = _on_probe(first, func, args, kwargs)
    views = [seen] if isinstance(seen, torch.Tensor) else seen
    rights = {_place_of_sequence(view, first.positions.size) for view in views}
    right = rights.pop() if len(rights) == 1 else None
    if right is None:
        return NotImplemented
    count = first.local.shape[first.sequence_dim]

    def shaped(view: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        shape = list(view.shape)
        shape[len(shape) - right] = count
        return given if list(given.shape) == shape else given.reshape(shape)  # squeeze() where one position is here

    if expands:
        shape = list(views[0].shape)
        shape[len(shape) - right] = count
        return _wrap(first.local.expand(shape), first, right)
    result = func(first.local, *args[1:], **kwargs)
    if isinstance(result, torch.Tensor):
        return _wrap(shaped(views[0], result), first, right)
    return _wrap(tuple(shaped(view, item) for view, item in zip(views, result, strict=True)), first, right)


def _place_of_sequence(view: torch.Tensor, size: int) -> int | None:
    for dim, stride in enumerate(view.stride()):
        if stride == _STEP and view.shape[dim] == size:
            return view.dim() - dim
    return None


def _iterated(func: Any, args: Any, kwargs: Any) -> Any:
    return iter(torch.Tensor.unbind(args[0], 0))


def _reshape(func: Any, args: Any, kwargs: Any) -> Any:
    """Another shape in which the sequence is still a dim, or one with the rows before it (a batch of sequences)."""
    shard = _first(args)
    if shard is None or shard.positions.size == 1:
        return NotImplemented
    if any(isinstance(value, torch.dtype) for value in (*args[1:], *kwargs.values())):
        return NotImplemented

    def probe(leaf: Any) -> Any:
        return torch.empty(leaf.shape, device="meta") if isinstance(leaf, torch.Tensor) else leaf

    with without_torch_functions():
        shape = func(*tree_map(probe, args), **tree_map(probe, kwargs)).shape
    dim, positions = shard.sequence_dim, shard.positions
    one = positions if positions.rows is None else positions.one_row()
    behind = math.prod(shard.sizes[dim + 1 :])
    for place, length in enumerate(shape):
        if length > 1 and length % one.size == 0 and math.prod(shape[place + 1 :]) == behind:
            break
    else:
        return NotImplemented
    rows = length // one.size
    if one.rows is None and rows > 1:
        return NotImplemented
    found = one if rows == 1 else one.flattened(rows)
    local_shape = list(shape)
    local_shape[place] = found.counts[shard.group.rank()]
    return _wrap(shard.local.reshape(local_shape), shard, len(shape) - place, found)


def _like_shape(method: str) -> Rule:
    """`plain.expand_as(shard)` needs no more of the shard than its shape."""

    def rule(func: Any, args: Any, kwargs: Any) -> Any:
        if isinstance(args[0], SequenceShard):
            return _moved(func, args, kwargs) if method == "expand" else _reshape(func, args, kwargs)
        return getattr(args[0], method)(_shards((args, kwargs))[0].sizes)

    return rule


# --- rules: losses ----------------------------------------------------------------------------------------------------


def _reduced(losses: torch.Tensor, lead: SequenceShard, right: int, reduction: str, count: Any) -> Any:
    """Losses of this rank's entries: as a shard, or summed over ranks, and divided by `count()`."""
    if reduction == "none":
        return _wrap(losses, lead, right)
    total = torch.sum(losses, dtype=torch.float32 if losses.dtype in _NARROW else None)
    total = on_parts(total, lambda part: sum_over(part, lead.group))
    if reduction != "sum":
        total = total / count()
    return total.to(losses.dtype)


def _class_loss(func: Any, args: Any, kwargs: Any) -> Any:
    """Losses of scores [n, classes, ...] and targets: indices [n, ...], or probabilities of the shape of scores."""
    given = _bound(_names_of(func), args, kwargs)
    scores, target, weight = given["input"], given["target"], given.get("weight")
    reduction, ignored = given.get("reduction", "mean"), given.get("ignore_index", -100)
    if (
        not isinstance(scores, SequenceShard)
        or given.get("size_average") is not None
        or given.get("reduce") is not None
        or isinstance(weight, SequenceShard)
        or len(scores.sizes) < 2
        or scores.sequence_dim == 1
        or reduction not in ("none", "sum", "mean")
    ):
        return NotImplemented
    probabilities = target.is_floating_point() and tuple(target.shape) == scores.sizes
    if not probabilities and tuple(target.shape) != scores.sizes[:1] + scores.sizes[2:]:
        return NotImplemented
    right = len(scores.sizes) - max(scores.sequence_dim, 1)
    parts = _parts(target, scores, _from_right(scores) if probabilities else right, exact=True)
    losses = func(**given | {"input": scores.local, "target": parts, "reduction": "none"})

    def count() -> Any:
        if probabilities:
            return math.prod(scores.sizes) // scores.sizes[1]
        divided = isinstance(target, SequenceShard)
        classes = parts if divided else target
        kept = classes != ignored
        counted = kept.sum() if weight is None else weight[classes.where(kept, 0)].where(kept, 0).sum()
        return sum_over(counted, scores.group) if divided else counted

    return _reduced(losses, scores, right, reduction, count)


def _elementwise_loss(func: Any, args: Any, kwargs: Any) -> Any:
    given = _bound(_names_of(func), args, kwargs)
    reduction = given.get("reduction", "mean")
    weighted = given.get("weight") is not None and "binary" not in func.__name__  # those divide by the sum of weights
    if given.get("size_average") is not None or given.get("reduce") is not None or weighted:
        return NotImplemented
    lead = max(_shards(given), key=lambda shard: shard.positions.size)
    right, batch = _from_right(lead), given["input"].shape[0]
    try:
        parts = _parts(given, lead, right)
    except _Mismatch:
        return NotImplemented
    losses = func(**parts | {"reduction": "none"})
    if reduction not in ("none", "sum", "mean", "batchmean"):
        return NotImplemented

    def count() -> int:
        if reduction == "batchmean":
            return int(batch)
        shape = list(losses.shape)
        shape[len(shape) - right] = lead.positions.size
        return math.prod(shape)

    return _reduced(losses, lead, right, reduction, count)


# --- rules: random numbers --------------------------------------------------------------------------------------------


def _random(func: Any, args: Any, kwargs: Any) -> Any:
    """Numbers for each element, of this rank's elements only; others are drawn for the whole tensor."""
    if func not in _PER_ELEMENT or kwargs.get("generator") is not None:
        return NotImplemented
    if func in _DROPOUTS:
        given = _bound(("input", "p", "training"), args, kwargs)
        training = given.get("training", given.get("train", func is not F.alpha_dropout))
        if not training or given.get("p", 0.5) == 0:
            return _elementwise(func, args, kwargs)
    with _own_stream(_shards((args, kwargs))[0]):
        return _elementwise(func, args, kwargs)


@contextmanager
def _own_stream(shard: SequenceShard) -> Iterator[None]:
    """Within it this rank draws numbers of its own; every rank's default generator then stands where the others' do.

    As `random_streams.own_stream` does it for the mp axis.
    """
    number = int(torch.randint(2**62, (), device="cpu"))
    digest = hashlib.blake2b(f"{number}:cp{shard.group.rank()}".encode(), digest_size=8).digest()
    with saved_random_state(shard.local.device):
        seed_torch(int.from_bytes(digest, "little") >> 1, shard.local.device)
        yield


_DROPOUTS = frozenset({F.dropout, F.alpha_dropout, torch.dropout, torch.dropout_})
_PER_ELEMENT = frozenset(
    function
    for function in RANDOM_FUNCTIONS
    if function.__name__.rstrip("_")
    in (
        "dropout", "alpha_dropout", "rrelu", "bernoulli", "poisson", "normal", "rand_like", "randn_like",
        "randint_like", "uniform", "exponential", "cauchy", "log_normal", "geometric", "random",
    )
)  # fmt: skip


# --- rules: what a tensor is ------------------------------------------------------------------------------------------


def _of_shape(func: Any, args: Any, kwargs: Any) -> Any:
    """What the wrapper knows: the shape, type and device of the whole."""
    with without_torch_functions():
        return func(*args, **kwargs)


def _of_local(func: Any, args: Any, kwargs: Any) -> Any:
    """What is known of, or done to, what this rank holds. Autograd's hooks get gradients of that."""
    args, kwargs = tree_map(lambda leaf: leaf.local if isinstance(leaf, SequenceShard) else leaf, (args, kwargs))
    return func(*args, **kwargs)


def _gradient(func: Any, args: Any, kwargs: Any) -> Any:
    gradient = args[0].local.grad
    return None if gradient is None else _wrap(gradient, args[0], _from_right(args[0]))


def _refused(func: Any, args: Any, kwargs: Any) -> Any:
    raise RuntimeError(
        f"{func.__name__} can't differentiate by a tensor of which each rank holds a part of the sequence (cp); "
        "differentiate by parameters, with backward()"
    )


# --- the table --------------------------------------------------------------------------------------------------------

_SPACES = (torch, torch.Tensor, F, torch.special, torch.linalg, torch._C._nn, torch._C._VariableFunctions)


def _spelled(names: str | Iterable[str], spaces: tuple[Any, ...] = _SPACES) -> Iterator[Any]:
    """The functions and methods of these names, wherever torch has them."""
    for name in names.split() if isinstance(names, str) else names:
        for space in spaces:
            function = getattr(space, name, None)
            if callable(function):
                yield function


def _getters(names: str, access: str = "__get__") -> Iterator[Any]:
    """What reads (or sets) these attributes of a tensor, as far as this torch has them."""
    for name in names.split():
        if hasattr(torch.Tensor, name):
            yield getattr(getattr(torch.Tensor, name), access)


_ARITHMETIC = """
    add sub subtract mul multiply div divide true_divide floor_divide remainder fmod pow float_power neg negative
    positive rsub addcmul addcdiv lerp hypot copysign heaviside ldexp nextafter maximum minimum fmax fmin
    abs absolute sign sgn signbit square sqrt rsqrt reciprocal exp exp2 expm1 log log2 log10 log1p logaddexp
    logaddexp2 sin cos tan asin acos atan atan2 arctan2 arcsin arccos arctan sinh cosh tanh asinh acosh atanh
    arcsinh arccosh arctanh sinc erf erfc erfinv lgamma digamma mvlgamma polygamma xlogy logit sigmoid
    ceil floor round trunc fix frac clamp clamp_min clamp_max clip nan_to_num deg2rad rad2deg angle conj
    eq ne lt le gt ge less less_equal greater greater_equal not_equal isclose isnan isinf isfinite isposinf
    isneginf isreal logical_and logical_or logical_xor logical_not bitwise_and bitwise_or bitwise_xor bitwise_not
    bitwise_left_shift bitwise_right_shift masked_fill copy fill zero
    gelu silu mish relu relu6 elu celu selu leaky_relu hardtanh hardswish hardsigmoid hardshrink softshrink tanhshrink
    softplus softsign logsigmoid threshold
    expit log_ndtr ndtr ndtri entr i0 i0e i1 i1e xlog1py zeta erfcx
    detach clone contiguous requires_grad_ resolve_conj resolve_neg
    zeros_like ones_like empty_like full_like
    float double half bfloat16 int long short bool char byte cfloat
    __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __div__ __rdiv__ __floordiv__
    __rfloordiv__ __mod__ __rmod__ __pow__ __rpow__ __neg__ __pos__ __abs__ __invert__ __and__ __rand__ __or__ __ror__
    __xor__ __rxor__ __lshift__ __rlshift__ __rshift__ __rrshift__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__
    __iadd__ __isub__ __imul__ __itruediv__ __idiv__ __ifloordiv__ __imod__ __ipow__ __iand__ __ior__ __ixor__
"""
_MOVES = """
    unsqueeze squeeze transpose permute movedim moveaxis swapaxes swapdims t adjoint select unbind diagonal
    expand broadcast_to
"""
_ONE_DIM = ("input", "dim", "keepdim")


def _in_place(names: str) -> str:
    return " ".join(f"{name}_" for name in names.split() if not name.endswith("_"))


_TABLE: list[tuple[Iterable[Any], Rule]] = [
    (_spelled(_ARITHMETIC), _elementwise),
    (_spelled(_in_place(_ARITHMETIC)), _elementwise),
    (_getters("data real imag"), _elementwise),
    (_getters("data grad", "__set__"), _elementwise),
    (_spelled("where"), _where),
    (_spelled("to type type_as cpu cuda"), _conversion),
    (_spelled("linear"), _rows(lambda given: 1)),
    (_spelled("layer_norm rms_norm"), _rows(_normalized_dims)),
    ((F.embedding,), _rows(_looked_up, added=1)),
    (_spelled("one_hot"), _rows(_one_hot_dims, added=1)),
    (_spelled("matmul mm bmm mv __matmul__"), _matmul),
    (_spelled("addmm"), _addmm),
    (_spelled("einsum"), _einsum),
    (_spelled("softmax log_softmax softmin cumsum cumprod cummax cummin logcumsumexp"), _along(("input", "dim"))),
    (_spelled("sort"), _along(("input", "dim"), -1)),
    (_spelled("argsort"), _along(("input", "dim"), -1)),
    (_spelled("topk"), _along(("input", "k", "dim"), -1)),
    (_spelled("glu"), _along(("input", "dim"), -1)),
    (_spelled("normalize"), _along(("input", "p", "dim"), 1)),
    (_spelled("flip"), _along(("input", "dims"))),
    (_spelled("roll"), _along(("input", "shifts", "dims"))),
    (_spelled("index_select"), _along(("input", "dim", "index"))),
    (_spelled("repeat_interleave"), _along(("input", "repeats", "dim"))),
    (_spelled("diff"), _along(("input", "n", "dim"), -1)),
    (_spelled("gather"), _along(("input", "dim", "index"), aligned=True)),
    (_spelled("take_along_dim"), _along(("input", "indices", "dim"), aligned=True)),
    (_spelled("tril triu"), _along(("input",), (-2, -1))),
    (_spelled("sum mean"), _reduction(_ONE_DIM, summed=True)),
    (_spelled("prod amax amin argmax argmin max min any all logsumexp median nanmedian nansum nanmean count_nonzero "
              "var std var_mean std_mean aminmax"), _reduction(_ONE_DIM)),
    (_spelled("mode"), _reduction(_ONE_DIM, -1)),
    (_spelled("norm vector_norm"), _reduction(("input", "p", "dim", "keepdim"))),
    (_spelled("cat concat concatenate stack", (torch,)), _joined),
    ((F.pad,), _pad),
    ((torch.Tensor.__getitem__,), _getitem),
    (_spelled("narrow"), _sections(("input", "dim", "start", "length"))),
    (_spelled("chunk split unsafe_chunk unsafe_split split_with_sizes tensor_split"), _sections(("input", "n", "dim"))),
    (_spelled(_MOVES), _moved),
    (_getters("T mT H mH"), _moved),
    ((torch.Tensor.__iter__,), _iterated),
    (_spelled("view reshape flatten unflatten ravel"), _reshape),
    (_spelled("expand_as"), _like_shape("expand")),
    (_spelled("view_as"), _like_shape("view")),
    (_spelled("reshape_as"), _like_shape("reshape")),
    ((F.cross_entropy, F.nll_loss), _class_loss),
    (_spelled("mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits kl_div",
              (F,)), _elementwise_loss),
    (RANDOM_FUNCTIONS, _random),
    (_getters("shape dtype device layout ndim itemsize nbytes is_cuda is_cpu is_meta is_sparse is_quantized is_nested "
              "is_mkldnn is_xpu is_mps names name _base output_nr"), _of_shape),
    (_spelled("dim ndimension size numel nelement __len__ is_floating_point is_complex is_signed is_contiguous stride "
              "element_size get_device is_neg is_conj is_same_size __hash__ __dir__"), _of_shape),
    (_getters("requires_grad grad_fn is_leaf _version retains_grad _backward_hooks"), _of_local),
    (_getters("requires_grad", "__set__"), _of_local),
    (_spelled("register_hook register_post_accumulate_grad_hook retain_grad result_type new_tensor new_empty new_zeros "
              "new_ones new_full is_inference is_pinned is_shared data_ptr untyped_storage record_stream"), _of_local),
    (_getters("grad"), _gradient),
    ((torch.autograd.grad,), _refused),
]  # fmt: skip

RULES: dict[Any, Rule] = {function: rule for functions, rule in _TABLE for function in functions}
"""Rules by function; one that is listed twice follows the later rule."""


SequenceShard.computes = staticmethod(run)
