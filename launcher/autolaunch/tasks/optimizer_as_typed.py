"""A learning rate or another option of the optimizer that is changed for a resumed run counts in it."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl


class OptimizerAsTyped(pl.Callback):
    """Puts back into a resumed run those options of its optimizer that are others than in the run that it continues.

    A checkpoint holds the options of the optimizer's groups and the rates of its schedule, and loading it would undo
    what was typed. What has not changed stays as the checkpoint has it. For optimizers of `models.optimizer`.
    """

    def __init__(self) -> None:
        self._typed: list[list[dict[str, Any]]] = []

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Look at the optimizers before they are filled."""
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
                _follow(schedule.scheduler)


def _follow(scheduler: Any) -> None:
    """Let the optimizer of a LambdaLR go on at the step of the schedule, from the rates that its groups began with."""
    groups = scheduler.optimizer.param_groups
    scheduler.base_lrs = [group["initial_lr"] for group in groups]
    rates = zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
    scheduler._last_lr = [base * factor(scheduler.last_epoch) for base, factor in rates]
    for group, rate in zip(groups, scheduler._last_lr, strict=True):
        group["lr"] = rate
