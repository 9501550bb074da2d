"""The steps of a LightningModule on a rank that holds some stages of its model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.utils._pytree import tree_map

from autolaunch_strategies.checkpoint.sharded import share_random_state
from autolaunch_strategies.config import ConfigError
from autolaunch_strategies.data_parallel.sharding import DataParallelModule
from autolaunch_strategies.lightning.relay import StageRelay
from autolaunch_strategies.pipeline.objective import Objective, train_by_schedule
from autolaunch_strategies.pipeline.run import Pipeline
from autolaunch_strategies.pipeline.shared import SharedGradients
from autolaunch_strategies.tensor.views import plain


class PipelinedSteps:
    """Runs the steps of a module through a pipeline; what the last stage returns and logs is known to all.

    exact: a step runs once for each batch; its call of the model runs all microbatches, and the loss is differentiated
    where lightning asks for it. microbatch: a step runs once for each microbatch and stage, forward and backward by the
    schedule, within lightning's training step; the gradients are kept aside until lightning asks for the backward
    pass, because it sets gradients to zero before that.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        pipeline: Pipeline,
        data_parallel: DataParallelModule,
        data_group: dist.ProcessGroup | None,
    ) -> None:
        self.module, self.pipeline, self.data_parallel = module, pipeline, data_parallel
        self.relay = StageRelay(module, pipeline.group, pipeline.is_last, data_group, pipeline.device)
        self.shared = SharedGradients(module, pipeline.cutting, pipeline)
        self._aside: dict[nn.Parameter, torch.Tensor] = {}
        self.objective = Objective(pipeline)

    # --- training ---------------------------------------------------------------------------------------------------

    def training_step(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What the user's `step` returns on the last stage; elsewhere its loss as a plain value."""
        self.pipeline.number = self.module.trainer.fit_loop.epoch_loop.total_batch_idx
        if self.pipeline.config.loss == "exact":
            return self._recorded("training_step", lambda: self._whole(step, *args, **kwargs))
        return self._recorded("training_step", lambda: self._by_schedule(step, *args, **kwargs))

    def backward(self, differentiate: Callable[[], Any]) -> None:
        """The backward pass of the last training step, with gradients exchanged over dp and over stages.

        Args:
            differentiate: differentiates the loss, where it is.
        """
        if self.pipeline.config.loss == "exact":
            with self.data_parallel.several_backwards():
                if self.pipeline.is_last:
                    with self.pipeline.clock.busy():
                        differentiate()
                self.pipeline.drain()
        else:
            for parameter, gradient in self._aside.items():
                parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
            self._aside.clear()
        self.data_parallel.finish_backward()
        if not self.data_parallel.accumulates:
            self.shared.sum()

    def _whole(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.data_parallel.gather_rest()
        output = None
        with self.pipeline.whole_step():
            output = tree_map(plain, step(*args, **kwargs))
            self.objective.refuse_parameters_outside(_loss_of(output))
        return output

    def _by_schedule(self, step: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
        def run(part: Any, samples: int) -> tuple[torch.Tensor, Any]:
            if self.pipeline.is_last:
                self.relay.microbatch(samples)
            output = tree_map(plain, step(part, *args, **kwargs))
            loss = _loss_of(output)
            if loss is None:
                raise ConfigError(
                    "pp.loss=microbatch",
                    "training_step returned no loss for a microbatch, so the batch can't be left out as a whole",
                    "a loss for every microbatch, or pp.loss=exact",
                    "pp=exact",
                )
            return loss, output

        self.data_parallel.forget_gathered()
        dropped = self._whose_gradients_will_be_dropped()
        before = {item: None if item in dropped else item.grad for item in self.module.parameters()}
        for parameter in before:
            parameter.grad = None
        scale = 1 / self.module.trainer.accumulate_grad_batches
        keep_outputs = not self.objective.is_compared
        trained = train_by_schedule(self.pipeline, self.data_parallel, batch, run, scale, keep_outputs)
        for parameter in before:
            if parameter.grad is not None:
                self._aside[parameter] = parameter.grad
            parameter.grad = before[parameter]
        if trained.loss is None:
            return None
        if not self.objective.is_compared:
            with self.relay.unrecorded():
                self.objective.compare(trained, lambda: _loss_of(tree_map(plain, step(batch, *args, **kwargs))))
        return _merged(trained.microbatches.rest, trained.loss, trained.samples)

    def _whose_gradients_will_be_dropped(self) -> set[nn.Parameter]:
        """What lightning sets gradients of to zero after this training step, with nobody looking at them before."""
        trainer: Any = self.module.trainer
        if trainer.fit_loop.epoch_loop.batch_idx % trainer.accumulate_grad_batches:
            return set()
        hooks = ("optimizer_zero_grad", "on_before_zero_grad")
        if any(is_overridden(hook, self.module, parent=pl.LightningModule) for hook in hooks):
            return set()
        if any(is_overridden("on_before_zero_grad", item, parent=pl.Callback) for item in trainer.callbacks):
            return set()
        groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
        return {parameter for group in groups for parameter in group["params"]}

    # --- validation, test, prediction -------------------------------------------------------------------------------

    def evaluation_step(self, name: str, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What the user's `step` returns on the last stage; elsewhere None."""
        try:
            return self._recorded(name, lambda: self._whole(step, *args, **kwargs))
        finally:
            self.data_parallel.forget_gathered()

    # --- what both share --------------------------------------------------------------------------------------------

    def _recorded(self, name: str, run: Callable[[], Any]) -> Any:
        """Run a step, log on every rank what it logs on the last stage, and go on with equal random numbers."""
        output = None
        self.pipeline.forget()
        try:
            with self.relay.recording():
                output = run()
        except Exception as error:
            if self.pipeline.is_last and self.pipeline.others_wait:
                self.relay.fail(error, name)
            raise
        loss = _loss_of(output) if name == "training_step" else None
        extra = {"drew": torch.tensor(float(self.pipeline.drew_behind_call()))}
        if loss is not None:
            extra["loss"] = loss.detach()
        told = self.relay.share(extra)
        if told["drew"]:
            share_random_state(self.pipeline.group, self.pipeline.last_rank)
        return output if self.pipeline.is_last else told.get("loss")


def refuse_what_cannot_run(module: pl.LightningModule, fitting: bool) -> None:
    """Raise ConfigError for modules whose training can't be run in stages."""
    if not fitting:
        return
    if not module.automatic_optimization:
        raise ConfigError(
            f"pp with {type(module).__name__}",
            "it optimizes by hand (automatic_optimization=False), but the backward pass of a pipeline belongs to all "
            "stages together",
            "automatic optimization, or a mesh with pp of size 1",
        )
    if is_overridden("backward", module, parent=pl.LightningModule):
        raise ConfigError(
            f"pp with {type(module).__name__}",
            "it overrides `backward`, which stages other than the last, that have no loss, can't run",
            "a module that leaves `backward` to lightning, or a mesh with pp of size 1",
        )


def refuse_optimizers(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Raise ConfigError for optimizers whose step needs the parameters of all stages at once."""
    for optimizer in optimizers:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ConfigError(
                f"pp with {type(optimizer).__name__}",
                "its step needs products over all parameters, of which each stage holds its own",
                "optimizers that treat each parameter by itself, such as AdamW, or a mesh with pp of size 1",
            )


def _loss_of(output: Any) -> torch.Tensor | None:
    if isinstance(output, Mapping):
        output = output.get("loss")
    return output if isinstance(output, torch.Tensor) else None


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
