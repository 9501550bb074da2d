"""Where the training loaders of a Trainer stand: saved with the loops, and taken up by the run that goes on."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loops.fetchers import _PrefetchDataFetcher

from autolaunch_strategies.config import ConfigError, nearest
from autolaunch_strategies.data_parallel.loader import set_random_states, with_arrays
from autolaunch_strategies.data_parallel.position import CHOICES, Pass, Resume, TrainingLoader, foreign_state


class Positions:
    """Resumes the training loaders of a Trainer, with the random numbers that belong there.

    Lightning gives a loader its state back in some resumes only (not at the end of an epoch, not where the loader was
    made before the checkpoint was read), and its own warning is about loaders that this one can resume.

    Args:
        choice: what a resume in the middle of an epoch does where the place in the data can't be found.

    Raises:
        ConfigError: another `choice`.
    """

    def __init__(self, choice: str = "required") -> None:
        if choice not in CHOICES:
            close = nearest(str(choice), CHOICES)
            raise ConfigError(
                f"data_position={choice!r}",
                "not one of the choices" + (f"; did you mean {close}?" if close else ""),
                "required (the place in the data is found again, or the resume is refused), read_again (what was "
                "trained on is read again and thrown away), start_over (the epoch's data are begun again)",
                f"MeshStrategy(data_position={close or 'required'!r})",
            )
        self.choice = choice
        self._trainer: pl.Trainer | None = None
        self._pending: _Pending | None = None
        self._is_unsized_epoch_over = False
        self._is_told = False

    def connect(self, trainer: pl.Trainer) -> None:
        """Before the loaders of `trainer` are made."""
        self._trainer = trainer
        self._pending = None

    def loader(self, loader: Any, shared: Any) -> TrainingLoader:
        """What the Trainer goes through instead of `shared`, this rank's part of the batches of `loader`."""
        return TrainingLoader(loader, shared, self)

    # --- saving -----------------------------------------------------------------------------------------------------

    def before_save(self) -> None:
        """Say once which loaders can't be gone on with, if this is the middle of an epoch."""
        if self._is_told or self.choice != "required" or self._trainer is None or self._trainer.global_rank != 0:
            return
        progress = self._trainer.fit_loop.epoch_loop.batch_progress
        if not progress.current.ready or progress.is_last_batch:
            return
        for loader in self._loaders():
            if not loader.has_position:
                self._is_told = True
                why, line = loader.advice()
                warnings.warn(
                    "train_dataloader: a checkpoint in the middle of an epoch can't say where in the data it was: "
                    f"{why}. Resuming from it will be refused, unless checkpoint.data_position, in a script "
                    f"MeshStrategy(data_position=...), is read_again or start_over. To write: {line}",
                    stacklevel=2,
                )

    # --- resuming ---------------------------------------------------------------------------------------------------

    def resume(self, states: list[Any], batches: int, path: str, random: Callable[[], None] | None) -> None:
        """Begin the next passes there, and go on with the random numbers of the run that saved.

        Args:
            states: of all loaders in their order; those of plain lightning are of the loaders that have states.
            batches: that were trained on in the epoch that was under way; 0 if there was none.
            random: sets the random states with which training went on.
        """
        at_first_fetch = None if batches else random
        read_ahead = states[0]["drawn"].get("random") if batches and _are_ours(states) else None
        if read_ahead is not None:
            at_first_fetch = partial(set_random_states, with_arrays(read_ahead))
        self._pending = _Pending(states, batches, path, at_first_fetch, random)

    def begin(self) -> None:
        """Training begins, with all its loaders made: those that were made too early begin again."""
        pending = self._pending
        if pending is None:
            return
        assert self._trainer is not None
        loop = self._trainer.fit_loop
        if len(pending.taken) < len(self._loaders()):
            assert loop._data_fetcher is not None
            iter(loop._data_fetcher)
        between_epochs = not pending.batches
        if not (between_epochs and pending.has_fetched):  # then the batch was read with them
            pending.at_first_fetch = None if between_epochs else pending.at_first_fetch
            if pending.random is not None:
                pending.random()
        self._move_progress(pending)
        done = loop.epoch_loop.batch_progress.current.ready
        if between_epochs and done and loop.max_batches == math.inf:
            # So many were there in that epoch: else lightning would go on counting in the next one.
            loop.max_batches, self._is_unsized_epoch_over = done, True

    def _move_progress(self, pending: _Pending) -> None:
        """Let lightning count from where the loaders go on in the epoch: it ends and validates by their batches."""
        places = [loader.place for loader in self._loaders() if loader.place is not None]
        if not pending.batches or not places:
            return
        assert self._trainer is not None
        loop, place = self._trainer.fit_loop, min(places)
        if place != pending.batches:  # the Trainer's epochs may be shorter
            place = int(max(0, min(place, loop.max_batches - self._trainer.accumulate_grad_batches)))
        progress = loop.epoch_loop.batch_progress.current
        for name, count in vars(progress).items():
            setattr(progress, name, count + place - pending.batches)

    def before_validation(self) -> None:
        """A validation that the run before did not finish is gone through again, before training goes on."""
        if self._pending is not None and self._pending.random is not None:
            self._pending.random()

    def trains(self) -> None:
        """A batch is trained on: from now on a pass that begins is a new one."""
        self._pending = None

    def resumes(self, loader: TrainingLoader) -> Resume | None:
        """Where the pass of `loader` that begins now has to begin, if not at its start.

        Lightning may begin one more before it trains: at the end of an epoch in which the run was validating.

        Raises:
            ConfigError: the checkpoint was written with another number of loaders.
        """
        loaders, pending = self._loaders(), self._pending
        number = next((number for number, item in enumerate(loaders) if item is loader), None)
        if pending is None or number is None or number in pending.ended:
            return None
        states = pending.states
        if not _are_ours(states):  # lightning's own, of those that have one
            own = [item for item in loaders if item.has_own_state]
            if len(own) == len(states) > 0:
                by_loader = {id(item): state for item, state in zip(own, states, strict=True)}
                states = [foreign_state(by_loader.get(id(item))) for item in loaders]
            else:
                states = [None] * len(loaders)
        if len(states) != len(loaders):
            raise ConfigError(
                f"ckpt_path={pending.path}",
                f"was written with {len(states)} training loaders, this run has {len(loaders)}",
                "the loaders of the run that saved",
            )
        pending.taken.add(number)
        is_again = pending.late.pop(number, None) is not None
        pending.has_fetched = pending.has_fetched and number > 0
        return Resume(states[number], pending.batches, not pending.batches, pending.path, is_again)

    def begins_late(self, loader: TrainingLoader, batches: Pass) -> None:
        """A pass has to begin before its first fetch, together with those of the other loaders."""
        assert self._pending is not None
        self._pending.late[self._loaders().index(loader)] = batches

    def before_fetch(self, loader: TrainingLoader) -> None:
        """A batch is about to be read: with the random numbers with which it would have been."""
        pending = self._pending
        if pending is not None:
            if not pending.has_fetched and loader is self._loaders()[0]:
                pending.has_fetched = True
                if pending.at_first_fetch is not None:
                    pending.at_first_fetch()
            for number in sorted(pending.late):
                pending.late.pop(number).begin()
        if self._is_unsized_epoch_over:
            self._is_unsized_epoch_over = False
            assert self._trainer is not None
            self._trainer.fit_loop.max_batches = math.inf

    def has_ended(self, loader: TrainingLoader) -> None:
        """A pass of `loader` is over; the next one is a new one."""
        if self._pending is not None:
            self._pending.ended.add(self._loaders().index(loader))

    def mend_progress(self, checkpoint: dict[str, Any]) -> None:
        """Correct what lightning's `checkpoint` says of its epoch where resuming from it would go wrong.

        With ``max_steps`` reached in the middle of an epoch, that counts as done, and a resumed run would train on what
        is left of it as the next one: it is open again. And a checkpoint between two epochs, of which the first counts
        as done, would be resumed with one batch more of that: it says what it would have said right after the last one.
        """
        assert self._trainer is not None
        by_steps = self._trainer.max_steps != -1  # lightning resumes such a run in another way
        loops = _loops(checkpoint)
        epochs, batches = loops.get("epoch_progress"), loops.get("epoch_loop.batch_progress")
        if epochs is None or batches is None or not batches["current"]["ready"]:
            return
        is_counted = epochs["total"]["processed"] == epochs["total"]["started"]
        has_begun_next = epochs["total"]["ready"] > epochs["total"]["started"]
        if not is_counted:
            return
        is_done = batches.get("is_last_batch", False)
        if is_done and not (by_steps or has_begun_next):
            return
        for progress in epochs.values():
            progress["ready"] = progress["started"]
            progress["processed"] = progress["started"] - 1
            progress["completed"] = min(progress["completed"], progress["processed"])
        if is_done:
            for key in ("total", "current"):
                batches[key]["completed"] = batches[key]["ready"] - 1

    def reads_ahead(self) -> bool:
        """Whether lightning reads a batch more than it trains on, to know which is the last one."""
        fetcher = None if self._trainer is None else self._trainer.fit_loop._data_fetcher
        return isinstance(fetcher, _PrefetchDataFetcher) and fetcher.length is None

    def _loaders(self) -> list[TrainingLoader]:
        combined = None if self._trainer is None else self._trainer.fit_loop._combined_loader
        return [] if combined is None else [item for item in combined.flattened if isinstance(item, TrainingLoader)]


@dataclass
class _Pending:
    """A resume that waits for its loaders."""

    states: list[Any]
    batches: int
    path: str
    at_first_fetch: Callable[[], None] | None
    """Sets the random states with which the first batch is read, if it may be read before training begins."""
    random: Callable[[], None] | None
    """Sets those with which training begins."""
    taken: set[int] = field(default_factory=set)
    """The numbers of the loaders that know."""
    ended: set[int] = field(default_factory=set)
    late: dict[int, Pass] = field(default_factory=dict)
    has_fetched: bool = False


def _are_ours(states: list[Any]) -> bool:
    return bool(states) and all(isinstance(state, dict) and {"position", "drawn"} <= set(state) for state in states)


def trained_batches(checkpoint: dict[str, Any]) -> int:
    """Batches that were trained on in the epoch that was under way when lightning's `checkpoint` was written."""
    progress = _loops(checkpoint).get("epoch_loop.batch_progress", {})
    return 0 if progress.get("is_last_batch", False) else int(progress.get("current", {}).get("ready", 0))


def take_states(checkpoint: dict[str, Any]) -> list[Any]:
    """The states of the training loaders, taken out of lightning's `checkpoint`."""
    states: list[Any] = _loops(checkpoint).get("state_dict", {}).pop("combined_loader", [])
    return states


def _loops(checkpoint: dict[str, Any]) -> dict[str, Any]:
    loops: dict[str, Any] = checkpoint.get("loops", {}).get("fit_loop", {})
    return loops
