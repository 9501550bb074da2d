"""A training whose loss or gradients are not finite any more ends, with what is left of it in a checkpoint."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl

from autolaunch.launch.failure import RunFailed
from autolaunch.report.metrics import StepMetrics


class EndsWhenNotFinite(pl.Callback):
    """Ends training on all ranks together.

    Args:
        steps: knows since when they are not.
        patience: in steps: with a loss scaler the norms of some are infinite, and left out.

    Raises:
        RunFailed: from `on_train_batch_end` and `on_train_end`.
    """

    def __init__(self, steps: StepMetrics, patience: int) -> None:
        self.steps, self.patience = steps, patience

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Look at what has been measured of the step.

        Raises:
            RunFailed: the patience has ended.
        """
        since = self.steps.not_finite_since
        if since is None or trainer.global_step - since + 1 < self.patience:
            return
        self.steps.catch_up()
        if self.steps.not_finite_since is not None:  # the last one was, after all
            raise self._failed(
                trainer, f"not finite since step {since}, for {self.patience} steps (trainer.nonfinite_patience)"
            )

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Look at what training has come to: there may have been fewer steps than the patience.

        Raises:
            RunFailed: weights are not finite.
        """
        strategy: Any = trainer.strategy
        # Of the last step alone: with a loss scaler its norm may be infinite, and it was left out.
        if self.steps.latest is not None and not strategy.weights_are_finite():
            since = self.steps.not_finite_since
            raise self._failed(
                trainer,
                "the weights are not finite at the end of the training" + (f", since step {since}" if since else ""),
            )

    def _failed(self, trainer: pl.Trainer, what: str) -> RunFailed:
        record = self.steps.latest
        assert record is not None
        saved = getattr(trainer.checkpoint_callback, "last_model_path", "")
        said = {"loss": record.loss, "gradient norm": record.grad_norm}
        values = ", ".join(f"{name} {value:g}" for name, value in said.items() if value is not None)
        return RunFailed(
            f"{values}: {what}; "
            + (f"the last checkpoint with finite weights is {saved}" if saved else "no checkpoint was written before")
        )
