"""Rules for losses: of this rank's entries, summed over ranks."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from autolaunch_strategies.sharded_sequence.collectives import sum_over
from autolaunch_strategies.sharded_sequence.parts import (
    NeedsWhole,
    as_shards,
    from_right,
    longest_in,
    named,
    parts_of,
)
from autolaunch_strategies.sharded_sequence.rules.along import NARROW
from autolaunch_strategies.sharded_sequence.shard import SequenceShard, on_parts


def class_loss(func: Any, args: Any, kwargs: Any) -> Any:
    """Losses of scores [n, classes, ...] and targets: indices [n, ...], or probabilities of the shape of scores."""
    arguments = _arguments(func, args, kwargs)
    scores, target, weight = arguments["input"], arguments["target"], arguments.get("weight")
    reduction, ignored = arguments.get("reduction", "mean"), arguments.get("ignore_index", -100)
    if (
        not isinstance(scores, SequenceShard)
        or isinstance(weight, SequenceShard)
        or len(scores.sizes) < 2
        or scores.sequence_dim == 1
        or reduction not in ("none", "sum", "mean")
    ):
        raise NeedsWhole
    probabilities = target.is_floating_point() and tuple(target.shape) == scores.sizes
    if not probabilities and tuple(target.shape) != scores.sizes[:1] + scores.sizes[2:]:
        raise NeedsWhole
    right = len(scores.sizes) - max(scores.sequence_dim, 1)
    parts = parts_of(target, scores, from_right(scores) if probabilities else right, exact=True)
    losses = func(**arguments | {"input": scores.local, "target": parts, "reduction": "none"})

    def count() -> Any:
        if probabilities:
            return math.prod(scores.sizes) // scores.sizes[1]
        sharded = isinstance(target, SequenceShard)
        classes = parts if sharded else target
        kept = classes != ignored
        counted = kept.sum() if weight is None else weight[classes.where(kept, 0)].where(kept, 0).sum()
        return sum_over(counted, scores.group) if sharded else counted

    return _reduced(losses, scores, right, reduction, count)


def elementwise_loss(func: Any, args: Any, kwargs: Any) -> Any:
    """Losses of each element and that at the same place of the target."""
    arguments = _arguments(func, args, kwargs)
    reduction = arguments.get("reduction", "mean")
    weighted = arguments.get("weight") is not None and "binary" not in func.__name__  # divides by the sum of weights
    if weighted or reduction not in ("none", "sum", "mean", "batchmean"):
        raise NeedsWhole
    lead = longest_in(arguments)
    right, batch = from_right(lead), arguments["input"].shape[0]
    losses = func(**parts_of(arguments, lead, right) | {"reduction": "none"})

    def count() -> int:
        if reduction == "batchmean":
            return int(batch)
        shape = list(losses.shape)
        shape[len(shape) - right] = lead.positions.size
        return math.prod(shape)

    return _reduced(losses, lead, right, reduction, count)


def _arguments(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    arguments = named(_names_of(func), args, kwargs)
    if arguments.get("size_average") is not None or arguments.get("reduce") is not None:
        raise NeedsWhole
    return arguments


@lru_cache(maxsize=64)
def _names_of(func: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(func).parameters)


def _reduced(losses: torch.Tensor, lead: SequenceShard, right: int, reduction: str, count: Callable[[], Any]) -> Any:
    """Losses of this rank's entries: as a shard, or summed over ranks, and divided by `count()`."""
    if reduction == "none":
        return as_shards(losses, lead, right)
    total = torch.sum(losses, dtype=torch.float32 if losses.dtype in NARROW else None)
    total = on_parts(total, lambda part: sum_over(part, lead.group))
    if reduction != "sum":
        total = total / count()
    return total.to(losses.dtype)
