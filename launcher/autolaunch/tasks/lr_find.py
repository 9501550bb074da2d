"""lr_find: a short training whose learning rate grows from step to step, to see where the loss falls fastest.

It ends where the loss diverges, and nothing of it is kept but the curve: the run that follows begins anew.
"""

from __future__ import annotations

import csv
import io
import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import torch

from autolaunch.job import ResolvedJob, write_beside
from autolaunch.launch.place import Place
from autolaunch.report.metrics import StepMetrics
from autolaunch.report.summary_file import write_summary
from autolaunch.report.terminal import Terminal
from autolaunch.tasks import fit
from autolaunch_strategies.config import ConfigError

CURVE = "lr_find.csv"

_SMOOTHING = 0.9
"""What the smoothed loss keeps of itself at each step."""
_DIVERGED = 4.0
"""Times its lowest, at which the smoothed loss ends the search."""


def run(job: ResolvedJob, place: Place) -> dict[str, Any]:
    """Train with growing rates, write the curve and what it suggests; collective over all ranks. Returns the summary.

    Raises:
        ConfigError: a LightningModule with several optimizers, or without a loss.
    """
    config, keys = job.config, job.config["lr_find"]
    limits = {"max_steps": keys["steps"], "max_epochs": None, "max_time": None, "limit_val_batches": 0}
    trainer = {**config["trainer"], **limits, "log_every_n_steps": 1, "nonfinite_patience": None}
    training = {
        **config,
        "task": "fit",
        "trainer": trainer,
        "scheduler": {**config["scheduler"], "name": "constant", "warmup_steps": 0},
        "checkpoint": {**config["checkpoint"], "enabled": False},
    }
    steps = StepMetrics(late=False)
    rising = RisingRates(keys["min"], keys["max"], keys["steps"], steps)
    summary = fit.run(replace(job, config=training), place, steps, [rising])
    suggested = suggestion(rising.rates, rising.smoothed)
    summary |= {"task": "lr_find", "suggested_lr": suggested}
    if place.rank == 0:
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(("step", "lr", "loss", "smoothed_loss"))
        writer.writerows(zip(itertools.count(1), rising.rates, rising.losses, rising.smoothed, strict=False))
        write_beside(job.output_dir / CURVE, text.getvalue())
        write_summary(job.output_dir, summary)
        where = f"{job.output_dir / CURVE}"
        if suggested is None:
            line = f"no suggestion: the loss does not fall between lr_find.min and lr_find.max; the curve: {where}"
        else:
            key = "optimizer.lr" if config["module"] is None else "the module's own lr"
            line = f"{key}={suggested:.2g}: there the loss falls fastest; the curve: {where}"
        Terminal().print(line, highlight=False, soft_wrap=True)
    return summary


class RisingRates(pl.Callback):
    """Lets the rates of the only optimizer grow by the same factor at each step, and ends training where it diverges.

    Groups of parameters keep their ratios. What the module's schedule sets is set again before each step.

    Args:
        low: the rate of the first step.
        high: the rate of the last step.
        count: how many steps.
        metrics: what measures the loss of the whole batch, before this callback is called; so the curve is the same on
            every mesh, and on every rank.
    """

    def __init__(self, low: float, high: float, count: int, metrics: StepMetrics) -> None:
        self._low, self._factor = low, (high / low) ** (1 / max(1, count - 1))
        self._metrics = metrics
        self._ratios: list[float] = []
        self.rates: list[float] = []
        """Of each step, of the first group."""
        self.losses: list[float] = []
        self.smoothed: list[float] = []
        """The losses as a mean that forgets."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if len(trainer.optimizers) != 1:
            raise ConfigError(
                "autolaunch lr_find",
                f"{type(pl_module).__name__} has {len(trainer.optimizers)} optimizers, each with a rate of its own",
                "modules with one optimizer",
            )
        rates = [float(group["lr"]) for group in trainer.optimizers[0].param_groups]
        self._ratios = [rate / rates[0] if rates[0] else 1.0 for rate in rates]

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        rate = self._low * self._factor ** len(self.rates)
        for group, ratio in zip(trainer.optimizers[0].param_groups, self._ratios, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate * ratio)
            else:
                group["lr"] = rate * ratio

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == len(self.rates) or self._metrics.latest is None:
            return
        loss = self._metrics.latest.loss
        if loss is None:
            raise ConfigError(
                "autolaunch lr_find",
                f"training_step of {type(pl_module).__name__} has returned no loss, by which rates are compared",
                "`return loss`, which a training_step that optimizes by hand may do, too",
            )
        self.rates.append(self._low * self._factor ** len(self.rates))
        self.losses.append(loss)
        # Weighted by what the mean has kept of each, so that the first ones count as much.
        weights = [_SMOOTHING**age for age in range(len(self.losses) - 1, -1, -1)]
        total = sum(weight * value for weight, value in zip(weights, self.losses, strict=True))
        self.smoothed.append(total / sum(weights))
        if not math.isfinite(self.smoothed[-1]) or self.smoothed[-1] > _DIVERGED * min(self.smoothed):
            trainer.should_stop = True


def suggestion(rates: Sequence[float], smoothed: Sequence[float]) -> float | None:
    """The rate at which the smoothed loss falls fastest over the logarithm of the rate, before it is lowest.

    None where it does not fall, or there are fewer than three steps.
    """
    finite = [loss for loss in smoothed if math.isfinite(loss)]
    if len(finite) < 3:
        return None
    lowest = min(range(len(finite)), key=finite.__getitem__)
    falls = {
        step: (finite[step + 1] - finite[step - 1]) / math.log(rates[step + 1] / rates[step - 1])
        for step in range(1, min(lowest + 1, len(finite) - 1))
    }
    steepest = min(falls, key=falls.__getitem__, default=None)
    return None if steepest is None or falls[steepest] >= 0 else rates[steepest]
