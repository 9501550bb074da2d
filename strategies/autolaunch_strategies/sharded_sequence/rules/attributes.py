"""Rules for what a tensor is, and for what autograd knows of it."""

from __future__ import annotations

from typing import Any

from autolaunch_strategies.sharded_sequence.parts import as_shards, from_right, map_leaves
from autolaunch_strategies.sharded_sequence.shard import SequenceShard
from autolaunch_strategies.torch_private.modes import without_torch_functions


def of_shape(func: Any, args: Any, kwargs: Any) -> Any:
    """Attributes that the wrapper itself answers: shape, type and device of the whole tensor."""
    with without_torch_functions():
        return func(*args, **kwargs)


def of_local(func: Any, args: Any, kwargs: Any) -> Any:
    """Attributes and methods of this rank's local tensor. A hook of autograd gets the local gradient."""
    args, kwargs = map_leaves(lambda leaf: leaf.local if isinstance(leaf, SequenceShard) else leaf, (args, kwargs))
    return func(*args, **kwargs)


def filled(func: Any, args: Any, kwargs: Any) -> Any:
    """A new tensor, the same for all positions: a shard if it has as many dims, and has the sequence where that is."""
    shard, *rest = args
    if rest and isinstance(rest[0], int):
        rest = [rest]  # sizes one by one
    sizes, dim = kwargs["size"] if "size" in kwargs else rest[0], shard.sequence_dim
    if len(sizes) != len(shard.sizes) or sizes[dim] != shard.positions.size:
        return of_local(func, args, kwargs)
    own = (*sizes[:dim], shard.local.shape[dim], *sizes[dim + 1 :])
    if "size" in kwargs:
        kwargs = kwargs | {"size": own}
    else:
        rest[0] = own
    return as_shards(func(shard.local, *rest, **kwargs), shard, from_right(shard))


def gradient(func: Any, args: Any, kwargs: Any) -> Any:
    """The gradient of what this rank holds, as a shard."""
    (shard,) = args
    of_part = shard.local.grad
    return None if of_part is None else as_shards(of_part, shard, from_right(shard))


def refused(func: Any, args: Any, kwargs: Any) -> Any:
    """Gradients by a shard, of which autograd knows this rank's part only."""
    raise RuntimeError(
        f"{func.__name__} can't differentiate by a tensor of which each rank holds a part of the sequence (cp); "
        "differentiate by parameters, with backward()"
    )
