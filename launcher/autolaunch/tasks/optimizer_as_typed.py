"""A learning rate or another option of the optimizer that is changed for a resumed run counts in it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from autolaunch.models.language_model import OptimizedModule
from autolaunch.models.optimizer import learning_rate_factor, steps_left


class OptimizerAsTyped(pl.Callback):
    """Puts back into a resumed run those options of its optimizer that are others than in the run that it continues.

    A checkpoint holds the options of the optimizer's groups and the rates of its schedule, and loading it would undo
    what was typed. What has not changed stays as the checkpoint has it. A schedule that ends with the last epoch ends
    with the steps that are left, which batches of another size may make others. For optimizers of `models.optimizer`.
    """

    def __init__(self) -> None:
        self._typed: list[list[dict[str, Any]]] = []
        self._has_begun = False

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Look at the optimizers before they are filled."""
        self._has_begun = False
        self._typed = [
            [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
            for optimizer in trainer.optimizers
        ]

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Put back what has changed."""
        changed: dict[str, str] = trainer.strategy.checkpoints.changed  # type: ignore[attr-defined]  # a MeshStrategy
        options = {name.partition(".")[2] for name in changed if name.startswith("optimizer.")}
        if "lr" in options:
            options.add("initial_lr")
        for optimizer, groups in zip(trainer.optimizers, self._typed, strict=True):
            # Groups that a callback has added while it trained stand behind those of the config.
            for group, typed in zip(optimizer.param_groups, groups, strict=False):
                group.update(typed if "groups" in options else {key: typed[key] for key in options if key in typed})
        if changed:  # the schedule may have another length, or begin from another rate
            for schedule in trainer.lr_scheduler_configs:
                scheduler: Any = schedule.scheduler
                _follow(scheduler, scheduler.lr_lambdas[0])

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        """The place in the epoch is known now, and so how many steps are left of it."""
        has_begun, self._has_begun = self._has_begun, True
        if has_begun or not isinstance(pl_module, OptimizedModule) or pl_module.total_steps > 0:
            return
        callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by one of its connectors
        if any(isinstance(item, GradientAccumulationScheduler) for item in callbacks):
            return  # how many batches are a step may change from epoch to epoch
        left = steps_left(trainer)
        for schedule in trainer.lr_scheduler_configs:
            end = schedule.scheduler.last_epoch + left
            if math.isfinite(end) and end != pl_module.schedule_ends:
                _follow(schedule.scheduler, learning_rate_factor(pl_module.scheduler_cfg, int(end)))


def _follow(scheduler: Any, factor: Callable[[int], float]) -> None:
    """Let the optimizer of a LambdaLR go on at its step of a schedule, from the rates that its groups began with."""
    groups = scheduler.optimizer.param_groups
    scheduler.base_lrs = [group["initial_lr"] for group in groups]
    scheduler.lr_lambdas = [factor] * len(groups)
    scheduler._last_lr = [base * factor(scheduler.last_epoch) for base in scheduler.base_lrs]
    for group, rate in zip(groups, scheduler._last_lr, strict=True):
        group["lr"] = rate
