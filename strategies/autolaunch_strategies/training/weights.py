"""What the parts of a mean count: numbers, or 0-dim tensors of a device for which nobody waits."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def weighed(loss: torch.Tensor, weight: float | torch.Tensor) -> torch.Tensor:
    """`loss` times `weight`, in the type of `loss` (if it is one of fractions)."""
    if isinstance(weight, torch.Tensor):
        return loss * weight.to(loss.device, loss.dtype if loss.is_floating_point() else None)
    return loss if weight == 1 else loss * weight


def shares_of(counts: Sequence[float | torch.Tensor]) -> list[float | torch.Tensor]:
    """Each of some counts as a share of their sum; equal shares where all of them are 0."""
    total, equal = sum(counts), 1 / len(counts)
    if isinstance(total, torch.Tensor):
        return [(count / total).where(total > 0, equal) for count in map(torch.as_tensor, counts)]
    return [count / total if total else equal for count in counts]
