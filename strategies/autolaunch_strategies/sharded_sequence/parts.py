"""Where the sequence is in the arguments of a call: what this rank holds of each, and results as shards again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from autolaunch_strategies.sharded_sequence.collectives import TRAFFIC
from autolaunch_strategies.sharded_sequence.shard import Positions, SequenceShard, cut

Rule = Callable[[Any, Any, Any], Any]
"""(function, args, kwargs) -> its result, computed on what this rank holds; or it raises `NeedsWhole`."""


class NeedsWhole(Exception):
    """A call can't be computed from what each rank holds. Raised on every rank, or they don't gather together."""


def map_leaves(change: Callable[[Any], Any], tree: Any) -> Any:
    """As `tree_map` of lists, tuples and dicts, in a fraction of its time, which was most of that of an operator."""
    if isinstance(tree, list | tuple):
        items = [map_leaves(change, item) for item in tree]
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    if isinstance(tree, dict):
        return {key: map_leaves(change, value) for key, value in tree.items()}
    return change(tree)


def shards_in(tree: Any) -> list[SequenceShard]:
    """All shards among some arguments."""
    if isinstance(tree, list | tuple):
        return [shard for item in tree for shard in shards_in(item)]
    if isinstance(tree, dict):
        return shards_in(list(tree.values()))
    return [tree] if isinstance(tree, SequenceShard) else []


def longest_in(tree: Any) -> SequenceShard:
    """The shard with the longest sequence, with which others broadcast."""
    return max(shards_in(tree), key=lambda shard: shard.positions.size)


def first_of(args: Any) -> SequenceShard:
    """The first argument.

    Raises:
        NeedsWhole: it is no shard.
    """
    if args and isinstance(args[0], SequenceShard):
        return args[0]
    raise NeedsWhole


def only_shard(args: Any, kwargs: Any) -> SequenceShard:
    """The first argument, if no other is a shard.

    Raises:
        NeedsWhole: it is none, or another one is, too.
    """
    if shards_in((args[1:], kwargs)):
        raise NeedsWhole
    return first_of(args)


def from_right(shard: SequenceShard) -> int:
    """The place of the sequence dim from the right: 1 for the last."""
    return len(shard.sizes) - shard.sequence_dim


def parts_of(tree: Any, lead: SequenceShard, right: int, exact: bool = False) -> Any:
    """What this rank holds of tensors that broadcast with `lead` (aligned at the last dim, as torch does).

    Args:
        right: the place of the sequence dim from the right, 1 for the last.
        exact: tensors don't broadcast: each has an entry for each position.

    Raises:
        NeedsWhole: a tensor is neither the same for all positions nor has one entry for each.
    """

    def part(leaf: Any) -> Any:
        if isinstance(leaf, SequenceShard):
            if from_right(leaf) == right and leaf.positions == lead.positions:
                return leaf.local
            leaf = leaf.whole()
        if not isinstance(leaf, torch.Tensor):
            return leaf
        dim = leaf.dim() - right
        if dim >= 0 and leaf.shape[dim] == lead.positions.size:
            TRAFFIC.cuts += 1
            return cut(leaf, dim, lead.positions, lead.group)
        if exact or (dim >= 0 and leaf.shape[dim] != 1):
            raise NeedsWhole
        return leaf

    return map_leaves(part, tree)


def as_shards(result: Any, lead: SequenceShard, right: int, positions: Positions | None = None) -> Any:
    """The tensors in `result` as shards with the sequence at the place `right`; the local tensor of `lead` is `lead`.

    Args:
        positions: where they are not those of `lead`.
    """

    def shard(leaf: Any) -> Any:
        if leaf is lead._local:  # changed in place, or left as it was
            lead.watch()
            return lead
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return SequenceShard.of(leaf, leaf.dim() - right, positions or lead.positions, lead.group)

    return map_leaves(shard, result)


def on_own_part(func: Any, args: Any, kwargs: Any, right: int | None = None) -> Any:
    """`func` with what this rank holds of the first argument; the sequence is at its place, or at `right`."""
    shard = args[0]
    result = func(shard.local, *args[1:], **kwargs)
    return as_shards(result, shard, from_right(shard) if right is None else right)


def whole(leaf: Any) -> Any:
    """A shard as the whole tensor; anything else as it is."""
    return leaf.whole() if isinstance(leaf, SequenceShard) else leaf


def named(names: tuple[str, ...], args: Any, kwargs: Any) -> dict[str, Any]:
    """The arguments of a call by name; numpy's `axis` is `dim`."""
    arguments = dict(zip(names, args, strict=False)) | kwargs
    return arguments | {"dim": arguments["axis"]} if "axis" in arguments else arguments


def numbered(dims: Any, count: int) -> list[int]:
    """One dim of `count`, several, or None for all, as numbers >= 0."""
    if dims is None or isinstance(dims, bool):
        return list(range(count))
    several = [dims] if isinstance(dims, int) else list(dims)
    return [int(dim) % count for dim in several] or list(range(count))
