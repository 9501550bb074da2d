"""Rules for functions along dims other than that of the sequence; sums over it are summed over ranks, too."""

from __future__ import annotations

import math
from typing import Any

import torch

from autolaunch_strategies.sharded_sequence.collectives import sum_over
from autolaunch_strategies.sharded_sequence.parts import (
    NeedsWhole,
    Rule,
    as_shards,
    first_of,
    from_right,
    named,
    numbered,
    on_own_part,
    only_shard,
    parts_of,
    shards_in,
)
from autolaunch_strategies.sharded_sequence.rules.pointwise import elementwise
from autolaunch_strategies.sharded_sequence.shard import SequenceShard, on_parts

NARROW = (torch.float16, torch.bfloat16)
"""Types in which sums are not added up."""


def along(names: tuple[str, ...], default: Any = None, aligned: bool = False) -> Rule:
    """Functions along some dims that keep the number of dims.

    Args:
        names: of the arguments.
        default: the dim if none is given.
        aligned: other tensors have the shape of the first one, except along the dim.
    """

    def rule(func: Any, args: Any, kwargs: Any) -> Any:
        shard = first_of(args) if aligned else only_shard(args, kwargs)
        arguments = named(names, args, kwargs)
        dims = arguments.get("dim", arguments.get("dims", default))
        if names[1:] == ("dims",) and len(args) > 2:
            dims = args[1:]
        if shard.sequence_dim in numbered(dims, len(shard.sizes)):
            raise NeedsWhole
        if aligned:
            rest, kwargs = parts_of((args[1:], kwargs), shard, from_right(shard), exact=True)
            args = shard, *rest
        return on_own_part(func, args, kwargs)

    return rule


def reduction(names: tuple[str, ...], default: Any = None, summed: bool = False) -> Rule:
    """Functions that reduce some dims; sums over the sequence are summed on every rank, and then over ranks.

    Args:
        names: of the arguments.
        default: the dims if none are given.
        summed: it is a sum or a mean.
    """

    def rule(func: Any, args: Any, kwargs: Any) -> Any:
        if (len(args) > 1 and isinstance(args[1], torch.Tensor)) or "other" in kwargs:
            return elementwise(func, args, kwargs)  # the larger of two
        shard = first_of(args)
        if kwargs.get("out") is not None:
            raise NeedsWhole
        arguments = named(names, args, kwargs)
        if summed and len(args) > 2 and isinstance(args[2], int) and not isinstance(args[2], bool):
            raise NeedsWhole
        dims = numbered(arguments.get("dim", default), len(shard.sizes))
        if shard.sequence_dim in dims:
            if summed:
                return _total(func, shard, dims, arguments)
            raise NeedsWhole
        result = func(shard.local, *args[1:], **kwargs)
        leaf = result if isinstance(result, torch.Tensor) else result[0]
        kept = leaf.dim() == len(shard.sizes)
        right = from_right(shard) - (0 if kept else sum(dim > shard.sequence_dim for dim in dims))
        return as_shards(result, shard, right)

    return rule


def _total(func: Any, shard: SequenceShard, dims: list[int], arguments: dict[str, Any]) -> Any:
    local, dtype, mean = shard.local, arguments.get("dtype"), func.__name__ == "mean"
    if mean and not (dtype or local.dtype).is_floating_point and not (dtype or local.dtype).is_complex:
        raise NeedsWhole
    narrow = dtype is None and local.dtype in NARROW
    rounded = func(torch.ones((1,), dtype=local.dtype, device=local.device)).dtype if narrow else None
    keepdim = bool(arguments.get("keepdim", False))
    total = torch.sum(local, dims, keepdim=keepdim, dtype=torch.float32 if narrow else dtype)
    total = on_parts(total, lambda part: sum_over(part, shard.group))
    if mean:
        total = total / math.prod(shard.sizes[dim] for dim in dims)
    return total if rounded is None else total.to(rounded)


def joined(func: Any, args: Any, kwargs: Any) -> Any:
    """cat and stack along another dim."""
    arguments = named(("tensors", "dim"), args, kwargs)
    tensors, stacks = list(arguments["tensors"]), func.__name__ == "stack"
    shards = shards_in(tensors)
    if not shards or arguments.get("out") is not None:
        raise NeedsWhole
    lead = shards[0]
    dim = int(arguments.get("dim", 0)) % (len(lead.sizes) + stacks)
    if any(tensor.dim() != len(lead.sizes) for tensor in tensors) or (dim == lead.sequence_dim and not stacks):
        raise NeedsWhole
    right = from_right(lead)
    parts = parts_of(tensors, lead, right, exact=True)
    return as_shards(func(parts, dim), lead, right + (stacks and dim > lead.sequence_dim))


def pad(func: Any, args: Any, kwargs: Any) -> Any:
    """Padding of other dims."""
    right = from_right(first_of(args))
    if any(named(("input", "pad"), args, kwargs)["pad"][2 * right - 2 : 2 * right]):
        raise NeedsWhole
    return on_own_part(func, args, kwargs)
