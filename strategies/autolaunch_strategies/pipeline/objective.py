"""A batch in microbatches, and whether its mean loss is the loss that one device would minimise."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from autolaunch_strategies.config import ConfigError
from autolaunch_strategies.data_parallel.sharding import DataParallelModule
from autolaunch_strategies.pipeline.microbatches import Microbatches, cut_leaves, shapes_of
from autolaunch_strategies.pipeline.run import Pipeline
from autolaunch_strategies.pipeline.structure import batch_size

log = logging.getLogger(__name__)


@dataclass
class TrainedBatch:
    """What the steps of the microbatches of one batch gave."""

    microbatches: Microbatches
    samples: list[int]
    """Of each microbatch."""
    loss: torch.Tensor | None
    """The mean over samples, without a gradient; on the last stage only."""


def train_by_schedule(
    pipeline: Pipeline,
    data_parallel: DataParallelModule,
    batch: Any,
    step: Callable[[Any, int], tuple[torch.Tensor, Any]],
    scale: float = 1.0,
    keep_outputs: bool = False,
) -> TrainedBatch:
    """Run a step forward and backward for every microbatch of `batch`, by the schedule of the pipeline.

    Sharded gradients are exchanged when it returns; `finish_backward` and the sum over holders are left to the caller.

    Args:
        batch: tensors of as many samples as the first one has are cut along dim 0; anything else goes into each step.
        step: of a microbatch and its number of samples; returns the loss and anything else that is to be kept.
        scale: what the gradients of the mean loss are multiplied by.
        keep_outputs: keep what the model returned, which `Objective.compare` needs.
    """
    leaves, spec = tree_flatten(batch)
    size = batch_size(leaves)
    schedule = pipeline.schedule_of(size)
    batched = tuple(isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and len(leaf) == size for leaf in leaves)
    parts = cut_leaves(leaves, batched, schedule.microbatches)
    samples = [batch_size(part) for part in parts] if schedule.microbatches > 1 else [size]
    data_parallel.gather_rest()
    with data_parallel.several_backwards():
        done = pipeline.run_schedule(
            schedule,
            lambda number: step(tree_unflatten(parts[number], spec), samples[number]),
            [count / size * scale for count in samples],
            [(batched, shapes_of(part)) for part in parts],
            keep_outputs,
        )
    if not pipeline.is_last:
        return TrainedBatch(done, samples, None)
    losses = [loss * (count / size) for loss, count in zip(done.losses, samples, strict=True)]
    return TrainedBatch(done, samples, torch.stack(losses).sum())


class Objective:
    """Refuses a loss that training in stages would not minimise as one device does. Each check is made once.

    On the last stage, where the loss is.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        self.is_compared = False
        self._parameters_checked = False

    def refuse_parameters_outside(self, loss: torch.Tensor | None) -> None:
        """Raise ConfigError for a loss that uses parameters of the model itself: it would see those of one stage."""
        if self._parameters_checked or loss is None or not torch.is_grad_enabled():
            return
        self._parameters_checked = True
        if used := self.pipeline.used_outside(loss):
            raise ConfigError(
                "pp",
                f"the loss uses {self.pipeline.cutting.name}{used[0]} outside of the call of the model, where a stage "
                "sees its own parameters only (a penalty on all weights, say)",
                "weight_decay of the optimizer, a penalty computed in the model's forward, or a mesh with pp of size 1",
            )

    def compare(self, trained: TrainedBatch, whole_loss: Callable[[], torch.Tensor | None]) -> None:
        """Raise ConfigError if the mean over microbatches is another loss than that of the whole batch.

        Args:
            whole_loss: the loss of the step on the whole batch; called with the model's output put together.
        """
        if self.is_compared or trained.loss is None:
            return
        mean, count = trained.loss, len(trained.samples)
        if count == 1:
            return
        self.is_compared = True
        whole = self.pipeline.replay(trained.microbatches, whole_loss)
        self.refuse_parameters_outside(whole)
        if self.pipeline.drew_in_replay:
            log.warning(
                "pp.loss=microbatch: the step draws random numbers, so it can't be checked that the mean of its losses "
                "over microbatches is the loss of the whole batch"
            )
            return
        if whole is None or whole.isnan() or mean.isnan():
            return
        tolerance = 1e-4 if whole.dtype in (torch.float32, torch.float64) else 1e-2
        if not torch.isclose(whole.double(), mean.double(), rtol=tolerance, atol=1e-7):
            raise ConfigError(
                "pp.loss=microbatch",
                f"the loss of the first batch is {whole.item():.6g}, but the mean over its {count} "
                f"microbatches is {mean.item():.6g}: training would minimise something else than on one device",
                "pp.loss=exact, which computes the loss of the whole batch; or a loss that is a mean over samples",
                "pp=exact",
            )
