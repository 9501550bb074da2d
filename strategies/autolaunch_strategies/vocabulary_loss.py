"""Cross entropy of logits whose classes are divided among ranks, without ever gathering them.

The sums that a softmax needs are found per rank and added over ranks (Megatron-LM, arXiv 1909.08053, section 3).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


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
        group: the ranks among which the classes are divided.

    Returns:
        a plain tensor, the same on every rank: 0-dim for `mean` and `sum`, [n] for `none`; in the type of `logits`.
    """
    per_rank = -(-classes // group.size())
    first = min(per_rank * group.rank(), classes)
    losses: torch.Tensor = _VocabularyCrossEntropy.apply(
        logits, target, group, first, classes, ignore_index, label_smoothing
    )
    losses = losses.to(logits.dtype)
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    return losses.sum() / (target != ignore_index).sum()


class _VocabularyCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any,
        logits: torch.Tensor,
        target: torch.Tensor,
        group: dist.ProcessGroup,
        first: int,
        classes: int,
        ignore_index: int,
        smoothing: float,
    ) -> torch.Tensor:
        count = logits.shape[1]
        wide = logits.float()
        largest = wide.amax(dim=1) if count else wide.new_full((len(wide),), float("-inf"))
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        shifted = wide - largest[:, None]
        local = target - first
        mine = (local >= 0) & (local < count)
        local = local.where(mine, 0)
        at_target = shifted.gather(1, local[:, None])[:, 0].where(mine, 0.0) if count else largest.new_zeros(len(wide))
        total = shifted.exp_().sum(dim=1)  # in place: this is the largest tensor of the model
        sums = torch.stack([total, at_target])
        if smoothing:
            sums = torch.cat([sums, (wide.sum(dim=1) - count * largest)[None]])
        dist.all_reduce(sums, group=group)
        log_total = sums[0].log()
        losses = log_total - sums[1]
        if smoothing:
            losses = (1 - smoothing) * losses + smoothing * (log_total - sums[2] / classes)
        kept = target != ignore_index
        context.save_for_backward(shifted.div_(sums[0][:, None]), local, mine, kept)
        context.classes, context.smoothing, context.dtype = classes, smoothing, logits.dtype
        return losses.where(kept, 0.0)

    @staticmethod
    def backward(context: Any, *grads: Any) -> Any:
        probabilities, local, mine, kept = context.saved_tensors
        scale = grads[0].float().where(kept, 0.0)
        gradient = probabilities.clone()
        rows = mine.nonzero()[:, 0]
        gradient[rows, local[rows]] -= 1 - context.smoothing
        if context.smoothing:
            gradient -= context.smoothing / context.classes
        gradient *= scale[:, None]
        return gradient.to(context.dtype), None, None, None, None, None, None
