"""What all ranks agree on: to end training because a signal came to one of them, to save, or that all still can."""

from __future__ import annotations

import itertools
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException

from autolaunch_strategies.lightning.step_start import StepStart
from autolaunch_strategies.torch_private.collectives import default_store, host_device

POLL_SECONDS = 0.02
OTHERS_SECONDS = 2.0
"""How much later than this rank the others may fail, beside the time of two steps."""

_numbers = itertools.count()


class TrainingStopped(SIGTERMException):
    """A signal ended training, on all ranks between the same two steps, or batches of a validation.

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
        seconds: how long training may take to end then, or to save after a failure; None: for ever.
        too_late: what happens after that, in another thread; it is told the signal's number or the failure.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        device: torch.device,
        alone: tuple[signal.Signals, ...] = (),
        seconds: float | None = None,
        too_late: Callable[[int | BaseException], None] | None = None,
    ) -> None:
        self.trainer = trainer
        self._seconds, self._too_late = seconds, too_late
        self.before_resumed_validation: Callable[[], None] = lambda: None
        """Called before a validation that a resumed run makes once more."""
        self.updates = False
        """Whether the optimizer may have begun to change weights since the present step began."""
        self._start: StepStart | None = None
        self._validates = False
        self._began = 0.0
        self._step_seconds = 0.0
        self._number = next(_numbers)
        self._limit: threading.Timer | None = None
        self.received = 0
        """Number of the signal that came; 0 if none did."""
        self.save_agreed = False
        """Whether a checkpoint is to be written after this step, the same on every rank."""
        self._asked_to_save = False
        self._alone = alone
        self._device = host_device(device)
        # Methods of one trainer are replaced: lightning has no hook for what happens at SIGTERM.
        connector = trainer._signal_connector
        validation = trainer.fit_loop.epoch_loop.val_loop
        for owner, name in (
            (connector, "register_signal_handlers"),
            (trainer.fit_loop.epoch_loop, "advance"),
            (validation, "run"),
            (validation, "_evaluation_step"),
        ):
            vars(owner).pop(name, None)  # that of an earlier `fit`
        connector._sigterm_notifier_fn = self._make_a_note  # type: ignore[method-assign,assignment]  # of this object alone
        loop = trainer.fit_loop.epoch_loop
        loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]  # of this object alone
        self._advance = loop.advance
        loop.advance = self._ask_and_advance  # type: ignore[method-assign]  # of this object alone
        self._run_validation = validation.run
        validation.run = self._validate  # type: ignore[method-assign]  # of this object alone
        self._evaluation_step = validation._evaluation_step
        validation._evaluation_step = self._ask_and_evaluate  # type: ignore[method-assign,assignment]  # of this object alone
        self._asks_in_validation = False
        self._register = connector.register_signal_handlers
        connector.register_signal_handlers = self._register_handlers  # type: ignore[method-assign]  # of this object alone

    def ask_to_save(self) -> None:
        """Vote for a checkpoint. One vote is enough; `save_agreed` says on every rank when it is to be written."""
        self._asked_to_save = True

    def saved(self) -> None:
        """A checkpoint has been written: forget votes for one."""
        self._asked_to_save = self.save_agreed = False

    def unfinished(self) -> StepStart | None:
        """Where the present step began, if the weights are still those of then; else what stands now is a whole step.

        Raises:
            RuntimeError: neither: the optimizer has begun to change weights.
        """
        start = self._start
        if start is not None and start.step == self.trainer.global_step and not self.updates:
            return start
        loop = self.trainer.fit_loop.epoch_loop
        batches: Any = loop.batch_progress.current
        if batches.processed != batches.ready or loop._should_accumulate():
            raise RuntimeError("the optimizer was changing weights")
        return None

    def all_can_save(self) -> bool:
        """Whether all ranks have come here, out of the same step; waits for those that may still come. Collective.

        To be asked when a step has raised: other ranks may be waiting for this one in a collective, and ask nothing.
        """
        world = dist.get_world_size()
        if world == 1:
            return True
        store, key = default_store(), f"autolaunch/can_save/{self._number}/{self.trainer.global_step}"
        came = store.add(key, 1)
        end = time.monotonic() + OTHERS_SECONDS + 2 * self._step_seconds
        while came < world and time.monotonic() < end:
            time.sleep(POLL_SECONDS)
            came = store.add(key, 0)
        return came >= world

    def limit(self, reason: int | BaseException) -> None:
        """Let training end within `seconds` from now, because of a signal or a failure."""
        self.end_limit()
        if self._seconds is not None and self._too_late is not None:
            self._limit = threading.Timer(self._seconds, self._too_late, [reason])
            self._limit.daemon = True
            self._limit.start()

    def end_limit(self) -> None:
        """Training has ended."""
        if self._limit is not None:
            self._limit.cancel()
            self._limit = None

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
        if not self.received and signum in self._alone:
            self.limit(int(signum))
        self.received = int(signum)

    def _ask_and_advance(self, data_fetcher: Any) -> None:
        if self._is_between_steps():
            self._ask_all()
            now = time.monotonic()
            if self._start is not None:
                self._step_seconds = now - self._began
            self._began, self._start, self.updates = now, StepStart(self.trainer), False
        self._advance(data_fetcher)

    def _is_between_steps(self) -> bool:
        loop = self.trainer.fit_loop.epoch_loop
        batches = loop.batch_progress.current
        # The gradients of half a step can't be saved.
        return batches.completed == batches.ready and not loop._should_accumulate()

    def _ask_all(self) -> None:
        signum, save = self._greatest(self.received, int(self._asked_to_save))
        self.save_agreed = bool(save)
        if signum:
            self._start = None  # the step that began there is done
        self._stop_if(signum)

    def _greatest(self, *notes: int) -> list[int]:
        """The greatest of what the ranks have, one by one. Collective."""
        tensor = torch.tensor(notes, device=self._device)
        if dist.get_world_size() > 1:
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return tensor.tolist()

    def _stop_if(self, signum: int) -> None:
        if signum:
            self.trainer._signal_connector.received_sigterm = True
            raise TrainingStopped(signum, self.trainer.global_step)

    # --- in a validation between two steps ---------------------------------------------------------------------------

    def _validate(self) -> Any:
        loop = self.trainer.fit_loop.epoch_loop.val_loop
        if self.trainer.state.fn != TrainerFn.FITTING or self.trainer.sanity_checking or not self._is_between_steps():
            return self._run_validation()
        if loop.restarted_mid_evaluation:
            self.before_resumed_validation()
        self._start, self.updates, self._asks_in_validation = StepStart(self.trainer, validates=True), False, True
        result = self._run_validation()
        self._start, self._asks_in_validation = None, False
        return result

    def _ask_and_evaluate(self, batch: Any, batch_idx: int, *arguments: Any) -> None:
        if self._asks_in_validation:
            if batch_idx == 0:
                self._asks_in_validation = self._ranks_have_as_many_batches()
            if self._asks_in_validation:
                self._stop_if(self._greatest(self.received)[0])
        self._evaluation_step(batch, batch_idx, *arguments)

    def _ranks_have_as_many_batches(self) -> bool:
        """Whether all ranks validate on the same number of batches, and so can ask each other at each. Collective."""
        counts = self.trainer.fit_loop.epoch_loop.val_loop.max_batches
        finite = [int(count) if count != float("inf") else -1 for count in counts]
        most = self._greatest(*finite, *(-count for count in finite))
        return all(count >= 0 for count in finite) and most == [*finite, *(-count for count in finite)]
