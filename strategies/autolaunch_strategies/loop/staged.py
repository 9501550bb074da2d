"""`model.forward_backward`: one batch of a training loop of its user's own, on a model that may be cut."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves

from autolaunch_strategies.checkpoint.sharded import share_random_state
from autolaunch_strategies.config import ConfigError
from autolaunch_strategies.data_parallel.sharding import DataParallelModule
from autolaunch_strategies.pipeline.failure import StageFailedError
from autolaunch_strategies.pipeline.objective import Objective, train_by_schedule
from autolaunch_strategies.pipeline.run import Pipeline
from autolaunch_strategies.pipeline.shared import SharedGradients
from autolaunch_strategies.tensor.views import plain
from autolaunch_strategies.torch_private.calls import intercept_calls, intercepted

Step = Callable[..., torch.Tensor]


def forward_backward_of(
    model: nn.Module, pipeline: Pipeline | None, data_parallel: DataParallelModule
) -> Callable[..., torch.Tensor]:
    """The `forward_backward` of a model that may be cut into stages (see `StagedLoop.forward_backward`)."""
    if pipeline is None:
        return whole_forward_backward
    return StagedLoop(model, pipeline, data_parallel).forward_backward


class StagedLoop:
    """Runs a model that is cut into stages for a loop of its user's own: batches to train on, and calls by themselves.

    All ranks along pp call it together, with the same step and the same batch.
    """

    def __init__(self, model: nn.Module, pipeline: Pipeline, data_parallel: DataParallelModule) -> None:
        self.model, self.pipeline, self.data_parallel = model, pipeline, data_parallel
        self.shared = SharedGradients(model, pipeline.cutting, pipeline)
        self.objective = Objective(pipeline)
        self._call = intercepted(model)
        intercept_calls(model, self._called)

    def forward_backward(self, step: Step, /, *batch: Any, **batch_kwargs: Any) -> torch.Tensor:
        """Compute the gradients of ``step(*batch, **batch_kwargs)``, a loss; they add up in ``.grad`` as always.

        `step` calls the model once and returns the loss. With ``loss=exact`` it sees the whole batch, and any loss is
        right; with ``loss=microbatch`` it is called for parts of the batch, cut along the first dim of its tensors, so
        everything that has this dim has to be an argument. Stages that are not the last leave it where the model is
        called. On return gradients are complete: averaged over dp and summed over the stages that hold a parameter.

        Returns:
            The loss of the whole batch (of this rank's share of it, along dp) on every rank: 0-dim, without a gradient.

        Raises:
            ConfigError: the step does not call the model, or twice, or returns no loss; with ``loss=microbatch``, its
                mean over microbatches is another loss than that of the whole batch.
            StageFailedError: the step raised something else on the last stage; there it is raised as it is.
            RuntimeError: gradients are switched off.
        """
        _refuse_without_gradients()
        self.pipeline.number += 1
        self.pipeline.forget()
        self.data_parallel.forget_gathered()
        run = self._whole if self.pipeline.config.loss == "exact" else self._by_schedule
        with self._earlier_gradients_aside():
            with _training_with(self):
                loss = run(step, batch, batch_kwargs)
            self.data_parallel.forget_gathered()  # the comparison of losses gathers again
            self.data_parallel.finish_backward()
            self.shared.sum()
        return loss

    # --- both ways to compute gradients -----------------------------------------------------------------------------

    def _whole(self, step: Step, batch: Any, batch_kwargs: Any) -> torch.Tensor:
        loss, failed = None, None
        self.data_parallel.gather_rest()
        try:
            with self.pipeline.whole_step():
                loss = loss_of(step(*batch, **batch_kwargs))
            if loss is not None:
                _refuse_without_graph(loss)
                self.objective.refuse_parameters_outside(loss)
        except Exception as error:
            if not (self.pipeline.is_last and self.pipeline.others_wait):
                raise
            failed = error
        told = self._told(loss, failed)
        with self.data_parallel.several_backwards():
            if loss is not None:
                with torch.autocast(self.pipeline.device.type, enabled=False):  # types are those of the forward
                    loss.backward()
            self.pipeline.drain()
        return told

    def _by_schedule(self, step: Step, batch: Any, batch_kwargs: Any) -> torch.Tensor:
        if not any(isinstance(leaf, torch.Tensor) and leaf.dim() > 0 for leaf in tree_leaves((batch, batch_kwargs))):
            raise ConfigError(
                "forward_backward",
                "it was given no batch that could be cut into microbatches",
                "the tensors of the batch as arguments: step is called with a part of them",
                "loss = model.forward_backward(step, *batch)",
            )

        def run(part: Any, samples: int) -> tuple[torch.Tensor, None]:
            loss = loss_of(step(*part[0], **part[1]))
            _refuse_without_graph(loss)
            return loss, None

        failed = None
        keep_outputs = not self.objective.is_compared
        trained = train_by_schedule(
            self.pipeline, self.data_parallel, (batch, batch_kwargs), run, keep_outputs=keep_outputs
        )
        try:
            self.objective.compare(trained, lambda: loss_of(step(*batch, **batch_kwargs)))
        except Exception as error:
            failed = error
        return self._told(trained.loss, failed)

    @contextmanager
    def _earlier_gradients_aside(self) -> Iterator[None]:
        """Put what is in ``.grad`` aside, and add it again at the end: it has been exchanged and summed before."""
        earlier = {item: item.grad for item in self.model.parameters() if item.grad is not None}
        for parameter in earlier:
            parameter.grad = None
        try:
            yield
        finally:
            with torch.no_grad():
                for parameter, gradient in earlier.items():
                    parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)

    def _told(self, loss: torch.Tensor | None, failed: Exception | None) -> torch.Tensor:
        """The loss on every rank along pp, or an error on all of them; then all go on with equal random numbers."""
        pipeline = self.pipeline
        source = dist.get_global_rank(pipeline.group, pipeline.last_rank)
        told = torch.zeros(4, dtype=torch.float64, device=pipeline.device)
        if pipeline.is_last:
            drew = pipeline.drew_behind_call()
            is_double = loss is not None and loss.dtype == torch.float64
            told[1:] = torch.tensor([is_double, failed is not None, drew])
            told[0] = 0.0 if loss is None else loss.detach()
        dist.broadcast(told, source, group=pipeline.group)
        _, is_double, is_failed, drew = told.tolist()
        if is_failed:
            raise self._same_error(failed, source)
        if drew:
            share_random_state(pipeline.group, pipeline.last_rank)
        return told[0].to(torch.float64 if is_double else torch.float32)

    def _same_error(self, failed: Exception | None, source: int) -> Exception:
        """On every rank along pp, what the last stage's step raised, or words that tell of it."""
        errors: list[Any] = [failed]
        if failed is not None and not isinstance(failed, ConfigError):  # it may not be possible to send it
            errors = [
                StageFailedError(f"the step failed on the last pipeline stage: {type(failed).__name__}: {failed}")
            ]
        dist.broadcast_object_list(errors, source, group=self.pipeline.group)
        return failed or errors[0]

    # --- calls by themselves ----------------------------------------------------------------------------------------

    def _called(self, *args: Any, **kwargs: Any) -> Any:
        assert self._call is not None
        if self in _TRAINING:
            return self._call(*args, **kwargs)
        if any(other.pipeline.calls for other in _TRAINING):
            raise ConfigError(
                "forward_backward",
                f"the step calls a {type(self.model).__name__} that is cut into stages behind its call of the model "
                "that it trains, where other stages have left it",
                "its call in front of that call, or in front of forward_backward",
            )
        self.data_parallel.forget_gathered()
        try:
            return self._call(*args, **kwargs)
        finally:
            self.data_parallel.forget_gathered()


_TRAINING: list[StagedLoop] = []
"""Whose `forward_backward` is running; one at most, unless a step runs another one's."""


@contextmanager
def _training_with(loop: StagedLoop) -> Iterator[None]:
    _TRAINING.append(loop)
    try:
        yield
    finally:
        _TRAINING.remove(loop)


def whole_forward_backward(step: Step, /, *batch: Any, **batch_kwargs: Any) -> torch.Tensor:
    """What `StagedLoop.forward_backward` is for a model in one piece: the same loop runs on a mesh without stages."""
    _refuse_without_gradients()
    loss = loss_of(step(*batch, **batch_kwargs))
    loss.backward()
    return loss.detach()


def _refuse_without_graph(loss: torch.Tensor) -> None:
    if not loss.requires_grad:
        raise ConfigError(
            "forward_backward",
            "the loss that the step returned has no gradient: it does not come from the output of the model",
            "a loss computed from what model(...) returned, without detach() or item()",
        )


def loss_of(returned: Any) -> torch.Tensor:
    """What a step returned, whole.

    Raises:
        ConfigError: it is not one number.
    """
    loss = plain(returned)
    if isinstance(loss, torch.Tensor) and loss.numel() == 1:
        return loss.reshape(())
    what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
    raise ConfigError(
        "forward_backward",
        f"the step returned {what}, not a loss",
        "a function of the batch that calls the model and returns the loss, a tensor with one number",
        "lambda x, y: criterion(model(x), y)",
    )


def _refuse_without_gradients() -> None:
    if not torch.is_grad_enabled():
        raise RuntimeError(
            "forward_backward computes gradients, which torch.no_grad() or inference_mode() has switched off here; "
            "model(...) runs forward only"
        )
