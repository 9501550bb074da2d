"""Cross entropy of logits whose classes are sharded among ranks, without ever gathering them.

The sums that a softmax needs are found per rank and added over ranks (Megatron-LM, arXiv 1909.08053, section 3).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from autolaunch_strategies.tensor.sharding_errors import ShardingError

AT_ONCE = 2**24
"""Logits that are widened to fp32 at the same time: so few that this takes less memory than the logits."""


def vocabulary_cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    group: dist.ProcessGroup,
    classes: int,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """As `torch.nn.functional.cross_entropy`, of logits [n, classes of this rank] and targets [n], equal on all ranks.

    Args:
        logits: this rank's part, cut as `torch.chunk` cuts `classes` (the last parts may be smaller or empty).
        target: class indices, the same on every rank.
        group: the ranks among which the classes are sharded.

    Returns:
        a plain tensor, the same on every rank: 0-dim for `mean` and `sum`, [n] for `none`; in the type of `logits`, or
        in fp32 where autocast is on, as torch's own.

    Raises:
        IndexError: a target is no class (on a CPU; elsewhere its loss is nan).
    """
    per_rank = -(-classes // group.size())
    first = min(per_rank * group.rank(), classes)
    kept = target != ignore_index
    absent = kept & ((target < 0) | (target >= classes))
    if target.device.type == "cpu" and absent.any():
        raise IndexError(f"Target {int(target[absent][0])} is out of bounds.")
    losses: torch.Tensor = _VocabularyCrossEntropy.apply(logits, target - first, kept, group, classes, label_smoothing)
    losses = losses.masked_fill(absent, float("nan"))
    dtype = torch.float32 if torch.is_autocast_enabled(logits.device.type) else logits.dtype
    if reduction == "none":
        return losses.to(dtype)
    total = losses.sum()
    return (total if reduction == "sum" else total / kept.sum()).to(dtype)


class _VocabularyCrossEntropy(torch.autograd.Function):
    """Keeps the logits and one number per row, and finds the probabilities a second time in the backward pass."""

    @staticmethod
    def forward(
        context: Any,
        logits: torch.Tensor,
        local: torch.Tensor,
        kept: torch.Tensor,
        group: dist.ProcessGroup,
        classes: int,
        smoothing: float,
    ) -> torch.Tensor:
        rows, count = logits.shape
        wide = torch.promote_types(logits.dtype, torch.float32)
        largest = logits.new_full((rows,), float("-inf"), dtype=wide)
        if count:
            largest = logits.amax(dim=1).to(wide)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        mine = (local >= 0) & (local < count)
        local = local.where(mine, 0)
        # Along the first dim: the sum of exponentials, the logit of the target, the sum of all logits.
        sums = logits.new_zeros((3 if smoothing else 2, rows), dtype=wide)
        for part in _parts(rows, count):
            shifted = logits[part] - largest[part, None]
            sums[1, part] = shifted.gather(1, local[part, None])[:, 0].where(mine[part], 0.0)
            if smoothing:
                sums[2, part] = shifted.sum(dim=1)
            sums[0, part] = shifted.exp_().sum(dim=1)
        dist.all_reduce(sums, group=group)
        log_total = sums[0].log()
        losses = log_total - sums[1]
        if smoothing:
            losses = (1 - smoothing) * losses + smoothing * (log_total - sums[2] / classes)
        context.save_for_backward(logits, largest + log_total, local, mine, kept)
        context.classes, context.smoothing = classes, smoothing
        return losses.where(kept, 0.0)

    @staticmethod
    def backward(context: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled():  # a second derivative is meant, which these numbers do not have
            raise ShardingError(
                "the loss",
                "the gradient of a cross entropy of sharded logits can't be differentiated again (create_graph=True)",
                "whole logits, by the rule of the layer that makes them",
                "lm_head: {ColWiseParallel: {gather_output: true}}",
            )
        logits, log_total, local, mine, kept = context.saved_tensors
        scale = grads[0].where(kept, 0.0)
        at_target = mine.to(scale.dtype) * (context.smoothing - 1)
        gradient = torch.empty_like(logits)
        for part in _parts(*logits.shape):
            wide = (logits[part] - log_total[part, None]).exp_()
            wide.scatter_add_(1, local[part, None], at_target[part, None])
            if context.smoothing:
                wide -= context.smoothing / context.classes
            gradient[part] = wide.mul_(scale[part, None])
        return gradient, None, None, None, None, None


def _parts(rows: int, count: int) -> Iterator[slice]:
    """Rows that are worked on together; none if they are empty."""
    step = max(AT_ONCE // count, 1) if count else 0
    return (slice(first, first + step) for first in range(0, rows, step)) if count else iter(())
