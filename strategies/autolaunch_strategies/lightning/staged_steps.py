"""The steps of a LightningModule on a rank that holds some stages of its model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map

from autolaunch_strategies.config import ConfigError
from autolaunch_strategies.data_parallel.sharding import DataParallelModule
from autolaunch_strategies.lightning.hooks import gradients_are_read
from autolaunch_strategies.lightning.relay import StageRelay
from autolaunch_strategies.pipeline.batch import LossAndOutput, StagedBatch
from autolaunch_strategies.pipeline.run import Pipeline
from autolaunch_strategies.tensor.views import plain


class StagedSteps:
    """Runs the steps of a module through a pipeline; what the last stage returns and logs is known to all.

    exact: a step runs once for each batch; its call of the model runs all microbatches, and the loss is differentiated
    where lightning asks for it. microbatch: a step runs once for each microbatch and stage, forward and backward by the
    schedule, within lightning's training step; the gradients are kept apart until lightning asks for the backward
    pass, because it sets gradients to zero before that.

    Manual optimization: a step runs to its end on every stage, with what the last one made of the model's output; its
    backward passes and optimizer steps are those of all stages together.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        pipeline: Pipeline,
        data_parallel: DataParallelModule,
        data_group: dist.ProcessGroup | None,
        weight: Callable[[], float | torch.Tensor] = lambda: 1.0,
        count: Callable[[Any], Any] | None = None,
    ) -> None:
        """Take over the steps of `module`.

        Args:
            data_group: the ranks that hold the same stages and see other data.
            weight: what the mean loss of this rank's batch is multiplied by.
            count: over how many items the loss of a microbatch is the mean; by default over its samples.
        """
        self.module, self.pipeline, self.data_parallel, self.weight = module, pipeline, data_parallel, weight
        self.count = count
        self.relay = StageRelay(module, pipeline.group, pipeline.is_last, data_group, pipeline.device)
        self.batch = StagedBatch(module, pipeline, data_parallel, self.relay)
        pipeline.stays = not module.automatic_optimization

    def training_step(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What the user's `step` returns on the last stage; elsewhere its loss as a plain value."""
        self.pipeline.number = self.module.trainer.fit_loop.epoch_loop.total_batch_idx
        train = self._whole if self.batch.is_exact else self._by_schedule
        loss, output = self.batch.run("training_step", lambda: train(step, *args, **kwargs))
        return output if self.pipeline.is_last or self.pipeline.stays else loss

    def evaluation_step(self, name: str, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What the user's `step` returns on the last stage; elsewhere None."""
        stays, self.pipeline.stays = self.pipeline.stays, False
        try:
            return self.batch.run(name, lambda: (None, self._whole(step, *args, **kwargs)[1]))[1]
        finally:
            self.pipeline.stays = stays
            self.data_parallel.forget_gathered()

    def backward(self, differentiate: Callable[[], Any], loss: torch.Tensor) -> None:
        """A backward pass of the last training step, with gradients exchanged over dp and over stages.

        Args:
            differentiate: differentiates `loss`, where it is.
        """
        self.batch.backward(differentiate, loss)

    def _whole(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> LossAndOutput:
        with self.relay.recording():
            return self.batch.whole(lambda: _with_loss(step(*args, **kwargs)))

    def _by_schedule(self, step: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> LossAndOutput:
        def run(part: Any, items: float | torch.Tensor) -> LossAndOutput:
            if self.pipeline.is_last:
                self.relay.microbatch(items)
            loss, output = _with_loss(step(part, *args, **kwargs))
            if loss is None:
                raise ConfigError(
                    "pp.loss=microbatch",
                    "training_step returned no loss for a microbatch, so the batch can't be left out as a whole",
                    "a loss for every microbatch, or pp.loss=exact",
                    "pp=exact",
                )
            return loss, output

        def whole_loss() -> torch.Tensor | None:
            with self.relay.unrecorded():
                return _with_loss(step(batch, *args, **kwargs))[0]

        for parameter in self._whose_gradients_will_be_dropped():
            parameter.grad = None
        scale = self.weight() / self.module.trainer.accumulate_grad_batches
        with self.relay.recording():
            trained = self.batch.by_schedule(batch, run, whole_loss, scale, self.count)
        if self.pipeline.drew_in_replay:
            self.relay.forget_whole()
        if trained.loss is None:
            return None, None
        return trained.loss, _merged(trained.microbatches.rest, trained.loss, trained.samples)

    def _whose_gradients_will_be_dropped(self) -> set[nn.Parameter]:
        """Parameters whose gradients lightning sets to zero after this training step, before any hook can read them."""
        trainer: Any = self.module.trainer
        if trainer.fit_loop.epoch_loop.batch_idx % trainer.accumulate_grad_batches:
            return set()
        if gradients_are_read(self.module):
            return set()
        groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
        return {parameter for group in groups for parameter in group["params"]}


def _with_loss(output: Any) -> LossAndOutput:
    output = plain(output) if isinstance(output, torch.Tensor) else tree_map(plain, output)
    loss = output.get("loss") if isinstance(output, Mapping) else output
    return loss if isinstance(loss, torch.Tensor) else None, output


def _merged(outputs: list[Any], loss: torch.Tensor, samples: list[int]) -> Any:
    """What the step would have returned for the batch: tensors by sample joined, everything else of the first."""
    first = outputs[0]
    if not isinstance(first, Mapping):
        return loss
    merged = dict(first)
    for key, value in first.items():
        values = [output[key] for output in outputs]
        by_sample = all(
            isinstance(item, torch.Tensor) and item.dim() > 0 and len(item) == count
            for item, count in zip(values, samples, strict=True)
        )
        if by_sample:
            merged[key] = torch.cat([item.detach() for item in values])
        elif isinstance(value, torch.Tensor):
            merged[key] = value.detach()
    return {**merged, "loss": loss}
