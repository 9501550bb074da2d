"""Where a training stood when the present optimizer step, or the present validation, began.

A step that raises, or is given up, leaves the weights of the step before, but loops that have gone on to its batches
and random numbers that are used up. A checkpoint of that moment takes those from here.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl

from autolaunch_strategies.checkpoint.sharded import random_state

_VALIDATION = "epoch_loop.val_loop.batch_progress"


class StepStart:
    """Notes where `trainer` stands: between two optimizer steps.

    Attributes:
        step: the optimizer steps that were done.
        loops: the state of the fit loop, as Lightning's checkpoints have it.
        random: of this rank's generators.
    """

    def __init__(self, trainer: pl.Trainer, validates: bool = False) -> None:
        self.step = trainer.global_step
        self.loops: dict[str, Any] = trainer.fit_loop.state_dict()
        self.random = random_state()
        if validates:
            self._begin_validation()

    def _begin_validation(self) -> None:
        """Say of the validation what Lightning takes for one that was cut off, in its first batch."""
        progress = self.loops[_VALIDATION]
        total = progress["total"]
        total["ready"] = total["started"] = total["processed"] + 1
        total["completed"] = total["processed"]
        progress["current"] = dict.fromkeys(progress["current"], 0)
        progress["is_last_batch"] = False
