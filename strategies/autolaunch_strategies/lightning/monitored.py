"""Metrics on which a run decides: every rank has the value of all, whether `sync_dist` was written or not."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from torchmetrics import Metric

from autolaunch_strategies.lightning.logs import LOG_ARGUMENTS
from autolaunch_strategies.lightning.replacement import Replacement


class MonitoredLogs:
    """Lets a module log what a scheduler or a callback monitors with `sync_dist=True`, from `install` to `remove`.

    Ranks would take other learning rates, and keep other checkpoints, by what each has seen.
    """

    def __init__(self, module: pl.LightningModule) -> None:
        self._module = module
        self._names: set[str] | None = None

    def install(self) -> None:
        """Take the place of `module.log`."""
        self._log = self._module.log
        vars(self._module)["log"] = Replacement(self._synchronised, self._log)

    def remove(self) -> None:
        """Leave it again."""
        del vars(self._module)["log"]

    def _synchronised(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        if self._names is None:
            self._names = _monitored(self._module.trainer)
        if name in self._names and not isinstance(value, Metric):
            options = dict(zip(LOG_ARGUMENTS, args, strict=False)) | kwargs
            self._log(name, value, **{**options, "sync_dist": not options.get("rank_zero_only")})
        else:
            self._log(name, value, *args, **kwargs)


def _monitored(trainer: pl.Trainer) -> set[str]:
    """Names under which a module logs what decides."""
    callbacks: Any = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector, not by the class
    deciding = [*callbacks, *trainer.strategy.lr_scheduler_configs]
    keys = [getattr(item, "monitor", None) for item in deciding]
    logged = [key.partition("/dataloader_idx_")[0] for key in keys if isinstance(key, str)]
    return {key.removesuffix(suffix) for key in logged for suffix in ("", "_epoch", "_step")}
