"""What all ranks agree on between two steps: to end training because a signal came to one of them, or to save."""

from __future__ import annotations

import signal
from pathlib import Path
from types import FrameType
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import SIGTERMException


class TrainingStopped(SIGTERMException):
    """A signal ended training, on all ranks between the same two steps.

    Attributes:
        signum: the signal.
        step: the optimizer steps that were done.
        checkpoint: what was written of it, if anything.
    """

    def __init__(self, signum: int, step: int) -> None:
        super().__init__(128 + signum)
        self.signum, self.step = signum, step
        self.checkpoint: Path | None = None


class Votes:
    """Takes the place of lightning's answer to SIGTERM, for one trainer, and lets all ranks save at the same step.

    Lightning's handler runs a collective wherever the signal found the process, which meets some other collective of
    the other ranks, and only rank 0's signal counts. Here the handler makes a note, and the check that lightning's
    training loop makes at every batch asks all ranks for theirs, where a step begins.

    Args:
        trainer: whose loop it is.
        device: where a tensor for all ranks has to be.
        alone: signals that only this object answers to while training lasts: the first of them ends it between two
            steps, a second one at once. Other than these, SIGTERM is answered beside whatever handler there was.
    """

    def __init__(self, trainer: pl.Trainer, device: torch.device, alone: tuple[signal.Signals, ...] = ()) -> None:
        self.trainer = trainer
        self.received = 0
        """Number of the signal that came; 0 if none did."""
        self.save_agreed = False
        """Whether a checkpoint is to be written after this step, the same on every rank."""
        self._asked_to_save = False
        self._alone = alone
        self._device = torch.device("cpu") if "cpu:" in dist.get_backend_config() else device
        # Methods of one trainer are replaced: lightning has no hook for what happens at SIGTERM.
        connector = trainer._signal_connector
        connector._sigterm_notifier_fn = self._make_a_note  # type: ignore[method-assign,assignment]
        loop = trainer.fit_loop.epoch_loop
        loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]
        self._advance = loop.advance
        loop.advance = self._ask_and_advance  # type: ignore[method-assign]
        self._register = connector.register_signal_handlers
        connector.register_signal_handlers = self._register_handlers  # type: ignore[method-assign]

    def ask_to_save(self) -> None:
        """Vote for a checkpoint. One vote is enough; `save_agreed` says on every rank when it is to be written."""
        self._asked_to_save = True

    def saved(self) -> None:
        """A checkpoint has been written: forget votes for one."""
        self._asked_to_save = self.save_agreed = False

    def _register_handlers(self) -> None:
        self._register()  # notes the handlers that it puts back at the end
        for signum in self._alone:
            self.trainer._signal_connector._register_signal(signum, self._make_a_note)
        # Lightning would put back what it has not changed, and so remove handlers that are written in C
        # (`faulthandler`'s, which write stacks): Python takes them for none.
        before = self.trainer._signal_connector._original_handlers
        for unchanged in [signum for signum, handler in before.items() if signal.getsignal(signum) is handler]:
            del before[unchanged]

    def _make_a_note(self, signum: int, frame: FrameType | None) -> Any:
        if self.received and signum in self._alone:
            if signum == signal.SIGINT:
                raise KeyboardInterrupt
            raise SystemExit(128 + signum)
        launcher = self.trainer.strategy.launcher
        if not self.received and launcher is not None:
            launcher.kill(signum)
        self.received = int(signum)

    def _ask_and_advance(self, data_fetcher: Any) -> None:
        self._ask_all()
        self._advance(data_fetcher)

    def _ask_all(self) -> None:
        loop = self.trainer.fit_loop.epoch_loop
        if loop.batch_progress.current.completed % self.trainer.accumulate_grad_batches:
            return  # the gradients of half a step can't be saved
        notes = torch.tensor([self.received, int(self._asked_to_save)], device=self._device)
        if dist.get_world_size() > 1:
            dist.all_reduce(notes, op=dist.ReduceOp.MAX)
        signum, save = notes.tolist()
        self.save_agreed = bool(save)
        if signum:
            self.trainer._signal_connector.received_sigterm = True
            raise TrainingStopped(signum, self.trainer.global_step)
