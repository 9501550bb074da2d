"""Rules for functions that compute each element from those at the same place."""

from __future__ import annotations

from typing import Any

import torch

from autolaunch_strategies.sharded_sequence.parts import (
    NeedsWhole,
    as_shards,
    first_of,
    from_right,
    longest_in,
    map_leaves,
    parts_of,
)
from autolaunch_strategies.sharded_sequence.shard import SequenceShard
from autolaunch_strategies.sharded_sequence.spelling import changes_first


def elementwise(func: Any, args: Any, kwargs: Any) -> Any:
    """Functions that compute each element from those at the same place, with broadcasting."""
    changes = changes_first(func)
    if changes or kwargs.get("out") is not None:
        first_of(args)  # a plain tensor stays plain
    lead = args[0] if changes else longest_in((args, kwargs))
    right = from_right(lead)
    args, kwargs = parts_of((args, kwargs), lead, right)
    return as_shards(func(*args, **kwargs), lead, right)


def where(func: Any, args: Any, kwargs: Any) -> Any:
    """Elements of one tensor or the other; with a condition alone it lists indices."""
    if len(args) + len(kwargs) == 1:
        raise NeedsWhole
    return elementwise(func, args, kwargs)


def conversion(func: Any, args: Any, kwargs: Any) -> Any:
    """To another type or device; to that of another tensor, of which nothing else counts."""

    def as_empty(leaf: Any) -> Any:
        return leaf.new_empty(0) if isinstance(leaf, torch.Tensor) else leaf

    rest, options = map_leaves(as_empty, (args[1:], kwargs))
    first = args[0]
    if not isinstance(first, SequenceShard):
        return func(first, *rest, **options)
    converted = func(first.local, *rest, **options)
    if not isinstance(converted, torch.Tensor):  # the name of a type
        return converted
    if converted.device != first.local.device:
        raise NeedsWhole
    return as_shards(converted, first, from_right(first))
