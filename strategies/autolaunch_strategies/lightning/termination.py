"""SIGTERM on any rank ends training on all ranks, after the same step."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import SIGTERMException


class Termination:
    """Takes the place of lightning's answer to SIGTERM, for one trainer.

    Lightning's handler runs a collective wherever the signal found the process, which meets some other collective of
    the other ranks, and only rank 0's signal counts. Here the handler makes a note, and the check that lightning's
    training loop makes at every step asks all ranks for theirs.
    """

    def __init__(self, trainer: pl.Trainer, device: torch.device) -> None:
        self.trainer = trainer
        self.received = False
        self._device = torch.device("cpu") if "cpu:" in dist.get_backend_config() else device
        # Methods of one trainer are replaced: lightning has no hook for what happens at SIGTERM.
        trainer._signal_connector._sigterm_notifier_fn = self._make_a_note  # type: ignore[method-assign,assignment]
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = self._ask_all  # type: ignore[method-assign]

    def _make_a_note(self, signum: Any, frame: Any) -> None:
        launcher = self.trainer.strategy.launcher
        if not self.received and launcher is not None:
            launcher.kill(signum)
        self.received = True

    def _ask_all(self) -> None:
        notes = torch.tensor(int(self.received), device=self._device)
        if dist.get_world_size() > 1:
            dist.all_reduce(notes, op=dist.ReduceOp.MAX)
        if notes.item():
            self.trainer._signal_connector.received_sigterm = True
            raise SIGTERMException
