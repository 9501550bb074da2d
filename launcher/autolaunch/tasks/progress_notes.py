"""Where a task makes progress, noted for whoever watches the ranks."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl

from autolaunch.launch.heartbeat import PULSE, Activity


class Moves(pl.Callback):
    """Notes every batch, and the parts of a training step; first in line, so that what other callbacks do is seen.

    The first step compiles: until it is done the rank is starting.
    """

    def __init__(self) -> None:
        self._in_loop = Activity.STARTING
        self._between = Activity.STARTING

    def _step(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        PULSE.moved(self._in_loop, trainer.global_step)

    def _other(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        PULSE.moved(self._between, trainer.global_step)

    def _ends(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        PULSE.moved(Activity.ENDING, trainer.global_step)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Note that a batch is done, perhaps the first step."""
        if not trainer.fit_loop._should_accumulate():
            self._in_loop, self._between = Activity.STEP, Activity.BETWEEN
        PULSE.moved(self._between, trainer.global_step)

    def _evaluated(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        if not trainer.sanity_checking:
            self._between = Activity.BETWEEN
        PULSE.moved(self._between, trainer.global_step)

    def on_save_checkpoint(self, trainer: pl.Trainer, *_: Any) -> None:
        """Note that a checkpoint is written; the next note says that it is."""
        PULSE.moved(Activity.SAVING, trainer.global_step)

    on_train_batch_start = on_before_backward = on_after_backward = on_before_optimizer_step = _step
    on_train_epoch_start = on_train_epoch_end = on_validation_start = on_validation_end = _other
    on_validation_batch_start = on_test_batch_start = on_predict_batch_start = _other
    on_validation_batch_end = on_test_batch_end = on_predict_batch_end = _evaluated
    on_train_end = on_test_end = on_predict_end = teardown = _ends
