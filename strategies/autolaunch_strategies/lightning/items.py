"""What the mean loss of a rank's batch counts in that of an optimizer step, where it is a mean over labels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


class ItemCounts:
    """Makes the loss of an optimizer step a mean over all of its items, however they are spread over ranks and batches.

    A LightningModule whose `training_step` returns a mean over anything but samples says over how many items it is by
    a method ``num_items_in_batch(batch)``. The counts of a batch are added up over ranks, which is the one collective
    that this costs. Of accumulated batches, each counts beside the first one by its items; when the last one has come,
    gradients are scaled by `step_scale` to the mean over all. Nothing waits for the device.

    Args:
        count: the items of a batch of this rank; a number or a 0-dim tensor.
        group: the ranks whose data differ; None if there is just one.
    """

    def __init__(
        self, count: Callable[[Any], Any], group: dist.ProcessGroup | None, device: torch.device | None = None
    ) -> None:
        self.count, self.device = count, device
        self._group = group if group is not None and group.size() > 1 else None
        self.weight: float | torch.Tensor = 1.0
        """The weight of this rank's mean in the mean of the batch over ranks; a number where that is known without."""
        self.batch_weight_in_step: float | torch.Tensor = 1.0
        """What the batch counts in its step, beside the first one."""
        self._batches = 1
        self._totals: dict[int, torch.Tensor] = {}

    def begin(self, batch: Any, number: int = 0, batches: int = 1, is_counted: bool = True) -> None:
        """Weigh a batch that is about to be trained on. Collective over the ranks whose data differ.

        Args:
            number: of the batch in its optimizer step, from 0 on.
            batches: how many are accumulated in a step.
            is_counted: False for one that this rank has only to keep step with the others.
        """
        self.weight = self.batch_weight_in_step = 1.0
        self._batches = batches
        if number == 0 or batches == 1:
            self._totals = {}
        if self._group is None and batches == 1:
            return
        wide = torch.float32 if self.device is not None and self.device.type == "mps" else torch.float64
        here = torch.as_tensor(self.count(batch), device=self.device).detach().to(wide) * is_counted
        total = here.clone()
        if self._group is not None:
            dist.all_reduce(total, group=self._group)
            self.weight = here * self._group.size() / _divisor(total)
        self._totals[number] = total  # by number: an optimizer may run its closure several times
        if batches > 1:
            self.batch_weight_in_step = total / self._reference

    @property
    def loss_weight(self) -> float | torch.Tensor:
        """By what the loss of this rank's batch is multiplied before it is differentiated."""
        return self.weight * self.batch_weight_in_step

    @property
    def step_scale(self) -> float | torch.Tensor:
        """By what the gradients of a step are multiplied once its last batch has been differentiated."""
        if self._batches == 1:
            return 1.0
        total = torch.stack(list(self._totals.values())).sum()
        return self._batches * self._reference / _divisor(total)

    @property
    def _reference(self) -> torch.Tensor:
        return _divisor(next(iter(self._totals.values())))


def _divisor(total: torch.Tensor) -> torch.Tensor:
    """`total`, or 1 where there is nothing to divide."""
    return total.where(total > 0, 1.0)
