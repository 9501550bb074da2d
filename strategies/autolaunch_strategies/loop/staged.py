"""`model.forward_backward`: one batch of a training loop of its user's own, on a model that may be cut."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from autolaunch_strategies.config import ConfigError
from autolaunch_strategies.data_parallel.sharding import DataParallelModule
from autolaunch_strategies.pipeline.batch import LossAndOutput, StagedBatch, add_gradients, gradients_apart
from autolaunch_strategies.pipeline.broadcast import StageBroadcast
from autolaunch_strategies.pipeline.failure import StageFailedError
from autolaunch_strategies.pipeline.run import Pipeline
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
        self.batch = StagedBatch(model, pipeline, data_parallel, _LossExchange(pipeline))
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
        self.data_parallel.forget_gathered()
        train = self._whole if self.batch.is_exact else self._by_schedule
        # What is in ``.grad`` has been averaged and summed before.
        with gradients_apart(self.model.parameters()) as computed, _training_with(self):
            loss, whole_loss = self.batch.run("the step", lambda: train(step, batch, batch_kwargs))
            self.batch.backward(lambda: self._differentiate(whole_loss))
        add_gradients(computed)
        assert loss is not None
        return loss

    def _whole(self, step: Step, batch: Any, batch_kwargs: Any) -> LossAndOutput:
        def run() -> LossAndOutput:
            loss = loss_of(step(*batch, **batch_kwargs))
            return loss, loss

        loss, output = self.batch.whole(run)
        if loss is not None:
            _refuse_without_graph(loss)
        return loss, output

    def _differentiate(self, loss: torch.Tensor) -> None:
        with torch.autocast(self.pipeline.device.type, enabled=False):  # types are those of the forward
            loss.backward()

    def _by_schedule(self, step: Step, batch: Any, batch_kwargs: Any) -> LossAndOutput:
        if not any(isinstance(leaf, torch.Tensor) and leaf.dim() > 0 for leaf in tree_leaves((batch, batch_kwargs))):
            raise ConfigError(
                "forward_backward",
                "it was given no batch that could be cut into microbatches",
                "the tensors of the batch as arguments: step is called with a part of them",
                "loss = model.forward_backward(step, *batch)",
            )

        def run(part: Any, items: float | torch.Tensor) -> LossAndOutput:
            loss = loss_of(step(*part[0], **part[1]))
            _refuse_without_graph(loss)
            return loss, None

        trained = self.batch.by_schedule((batch, batch_kwargs), run, lambda: loss_of(step(*batch, **batch_kwargs)))
        return trained.loss, None

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


class _LossExchange:
    """The loss of a batch on every rank along pp, in fp32 unless it is in fp64, or its error on all of them."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._broadcast = StageBroadcast(pipeline.group, pipeline.last_rank, pipeline.device)

    def share(self, extra: Mapping[str, torch.Tensor | int]) -> dict[str, Any]:
        tensors = {name: item for name, item in extra.items() if isinstance(item, torch.Tensor)}
        counts = {name: item for name, item in extra.items() if not isinstance(item, torch.Tensor)}
        structure = tuple((name, item.dtype) for name, item in tensors.items()), tuple(counts)
        (types, names), values, numbers = self._broadcast.values(
            structure, list(tensors.values()), list(counts.values())
        )
        shared = {
            name: value if dtype == torch.float64 else value.float()
            for (name, dtype), value in zip(types, values, strict=False)
        }
        return {**shared, **dict(zip(names, numbers, strict=True))}

    def fail(self, error: Exception, where: str) -> None:
        """A ConfigError as it is; of another one it is not known whether it can be sent."""
        is_ours = isinstance(error, ConfigError)
        self._broadcast.fail(error if is_ours else StageFailedError.on_last_stage(where, error))


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
