"""Weights averaged over the steps of a training, wherever they are sharded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn

from autolaunch_strategies.checkpoint.storage import Reader
from autolaunch_strategies.config import ConfigError
from autolaunch_strategies.training.optimizers import after_steps

TRAINED = "trained_weight"
"""The name of a weight in the state of its optimizer, in checkpoints that have the average in its place."""


class EMA(pl.Callback):
    """Keeps an exponential moving average of the trained weights: ``average = decay average + (1 - decay) weight``.

    As Lightning's `EMAWeightAveraging`: it begins as the weights after the first step that counts, takes the place of
    the weights while the model is validated and when the training has ended, and is what a checkpoint holds as the
    model, so that exports and evaluations get it. Unlike that one it works however weights are sharded: each rank has
    the average of what it holds, in float32 at least. Buffers are not averaged. Needs a `MeshStrategy`.

    Args:
        decay: from 0 to 1.
        every_n_steps: steps of an optimizer from one update of its weights to the next.
        start_step: the first step of an optimizer, from 0, that counts.

    Raises:
        ConfigError: one of them is out of range.
    """

    def __init__(self, decay: float = 0.999, every_n_steps: int = 1, start_step: int = 0) -> None:
        if not 0.0 <= decay <= 1.0:
            raise ConfigError(f"EMA: decay={decay}", "out of range", "0 to 1", "callbacks.ema.decay=0.999")
        if every_n_steps < 1:
            raise ConfigError(
                f"EMA: every_n_steps={every_n_steps}", "out of range", "1 or more", "callbacks.ema.every_n_steps=1"
            )
        self.decay, self.every_n_steps, self.start_step = decay, every_n_steps, start_step
        self._averages: dict[nn.Parameter, torch.Tensor] = {}
        self._weights: dict[nn.Parameter, torch.Tensor] = {}
        """The weights themselves, while their averages are in their place."""
        self._has_ended = False
        """Whether training has, and the averages stay there; the weights are kept for checkpoints."""
        self._ends: list[Callable[[], None]] = []
        self._steps: list[int] = []
        """How many each optimizer has made; those that a checkpoint says, until it is gone on with."""

    def state_dict(self) -> dict[str, Any]:
        """What goes on with a checkpoint."""
        return {"steps": self._steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on counting where a checkpoint stopped."""
        self._steps = list(state_dict["steps"])

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Check that the strategy is one that keeps what is needed."""
        if not hasattr(trainer.strategy, "weights_changed"):
            raise ConfigError(
                "EMA",
                f"{type(trainer.strategy).__name__} does not save what it needs to go on",
                "MeshStrategy; lightning.pytorch.callbacks.EMAWeightAveraging with others",
            )

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Watch the optimizers, which exist now."""
        self._forget()

        def after_step(number: int) -> None:
            self._update(trainer.optimizers[number], self._steps[number])
            self._steps[number] += 1

        # Each by itself: a trainer counts those of all.
        self._ends = [
            after_steps(optimizer, partial(after_step, number)) for number, optimizer in enumerate(trainer.optimizers)
        ]

    @torch.no_grad()
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Where a checkpoint was loaded, put its weights in the place of their averages."""
        if len(self._steps) != len(trainer.optimizers):  # none was loaded that has averages
            self._steps = [trainer.global_step // max(len(trainer.optimizers), 1)] * len(trainer.optimizers)
        for parameter, weight in _take_trained(trainer):
            self._averages[parameter] = _copy(parameter)
            parameter.copy_(weight)
        _changed(trainer)

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        """Forget what was there for a checkpoint alone."""
        _take_trained(trainer)

    @torch.no_grad()
    def _update(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        if step < self.start_step or step % self.every_n_steps:
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                average = self._averages.get(parameter)
                if average is None:
                    self._averages[parameter] = _copy(parameter)
                else:
                    average.mul_(self.decay).add_(parameter.detach().to(average.dtype), alpha=1.0 - self.decay)

    @torch.no_grad()
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Put the averages in the place of the weights."""
        if not self._has_ended:
            self._put_averages(trainer)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Put the weights back."""
        self._put_back(trainer)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Put the weights back, if it happened while the model was validated."""
        self._put_back(trainer)

    @torch.no_grad()
    def _put_averages(self, trainer: pl.Trainer) -> None:
        for parameter, average in self._averages.items():
            self._weights[parameter] = parameter.detach().clone()
            parameter.copy_(average)
        _changed(trainer)

    @torch.no_grad()
    def _put_back(self, trainer: pl.Trainer) -> None:
        if self._has_ended:
            return
        for parameter, weight in self._weights.items():
            parameter.copy_(weight)
        self._weights.clear()
        _changed(trainer)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Leave the averages in the place of the weights, which a checkpoint that is saved from now on needs, too."""
        _take_trained(trainer)  # what was there for the last checkpoint
        self._put_averages(trainer)
        self._has_ended = True
        self._watch_no_longer()

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Forget what was averaged: the weights are others now."""
        self._averages, self._weights, self._has_ended = {}, {}, False

    def _forget(self) -> None:
        self._watch_no_longer()
        self._averages, self._weights, self._steps, self._has_ended = {}, {}, [], False

    def _watch_no_longer(self) -> None:
        for end in self._ends:
            end()
        self._ends = []

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Have the averages saved as the model, and the weights beside the state of their optimizer."""
        if not self._averages:
            return
        for name, parameter in pl_module.named_parameters(remove_duplicate=False):
            average = self._averages.get(parameter)
            if average is not None and name in checkpoint["state_dict"]:
                checkpoint["state_dict"][name] = average.to(parameter.dtype)
        for optimizer, parameter in _optimized(trainer):
            if parameter in self._averages:
                optimizer.state[parameter][TRAINED] = self._weights.get(parameter, parameter.detach())


def check_averages(trainer: pl.Trainer) -> None:
    """Check that a training that goes on from averaged weights averages them.

    Raises:
        ConfigError: it would go on from the averages as if they were the weights.
    """
    callbacks: Any = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector, not by the class
    averaged = any(TRAINED in optimizer.state.get(parameter, ()) for optimizer, parameter in _optimized(trainer))
    if averaged and not any(isinstance(callback, EMA) for callback in callbacks):
        raise ConfigError(
            "ckpt_path",
            "holds averaged weights, and this run would go on from these as if they had been trained",
            "the callback that averages them; or, for a new training from the averages, their export",
            "callbacks=ema",
        )


def check_left_out(path: Path, trust: bool) -> None:
    """Check that a training that does not take up the optimizers of a checkpoint leaves no weights with them.

    Raises:
        ConfigError: it would go on from the averages as if they were the weights.
    """
    names = Reader(path, trust).read_metadata().state_dict_metadata if path.is_dir() else ()
    if any(name.endswith(f".{TRAINED}") for name in names):
        raise ConfigError(
            "ckpt_path",
            "holds averaged weights; those that were trained are with the state of its optimizer, which another "
            "optimizer does not take up",
            "the optimizer of that run; or, for a new training from the averages, their export",
        )


def _optimized(trainer: pl.Trainer) -> Iterator[tuple[torch.optim.Optimizer, nn.Parameter]]:
    """Every parameter of the optimizers with its own."""
    for optimizer in trainer.optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                yield optimizer, parameter


def _take_trained(trainer: pl.Trainer) -> list[tuple[nn.Parameter, torch.Tensor]]:
    """Parameters with their trained weights, which are removed from the states of their optimizers."""
    taken = []
    for optimizer, parameter in _optimized(trainer):
        state = optimizer.state.get(parameter, {})
        if TRAINED in state:
            taken.append((parameter, state.pop(TRAINED)))
            if not state:  # the optimizer keeps none of this parameter
                del optimizer.state[parameter]
    return taken


def _copy(parameter: nn.Parameter) -> torch.Tensor:
    """What the average of a parameter begins as, in a type in which small changes are not lost."""
    return parameter.detach().to(torch.promote_types(parameter.dtype, torch.float32), copy=True)


def _changed(trainer: pl.Trainer) -> None:
    strategy: Any = trainer.strategy
    strategy.weights_changed()
