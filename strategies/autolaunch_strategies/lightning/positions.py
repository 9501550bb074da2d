"""Where the training loaders of a Trainer stand: saved with the loops, and taken up by the run that goes on."""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loops.fetchers import _PrefetchDataFetcher

from autolaunch_strategies.config import ConfigError, nearest
from autolaunch_strategies.data_parallel.loader import set_random_states
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
        self._late: list[Pass] = []
        self._is_unsized_epoch_over = False
        self._random: deque[Callable[[], None]] = deque()
        """What gives the random numbers their states, once before each of the next batches is read."""
        self._is_told = False

    def connect(self, trainer: pl.Trainer) -> None:
        """Before the loaders of `trainer` are made."""
        self._trainer = trainer
        self._pending = None
        self._late.clear()
        self._random.clear()

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
        self._pending = _Pending(states, batches, path)
        read_ahead = states[0]["drawn"].get("random") if batches and _are_ours(states) else None
        if read_ahead is not None:
            self._random.append(lambda: set_random_states(read_ahead))
        if random is not None:
            self._random.append(random)

    def begin(self) -> None:
        """Training begins, with all its loaders made: those that were made too early begin again."""
        if self._pending is None:
            return
        assert self._trainer is not None
        loop, between_epochs = self._trainer.fit_loop, not self._pending.batches
        if len(self._pending.taken) < len(self._loaders()):
            assert loop._data_fetcher is not None
            self._late.clear()
            iter(loop._data_fetcher)
        self._pending = None
        if between_epochs and self._random:
            self._random.popleft()()
        done = loop.epoch_loop.batch_progress.current.ready
        if between_epochs and done and loop.max_batches == math.inf:
            # So many were there in that epoch: else lightning would go on counting in the next one.
            loop.max_batches, self._is_unsized_epoch_over = done, True

    def resumes(self, loader: TrainingLoader) -> Resume | None:
        """Where the pass of `loader` that begins now has to begin, if not at its start.

        Raises:
            ConfigError: the checkpoint was written with another number of loaders.
        """
        loaders = self._loaders()
        number = next((number for number, item in enumerate(loaders) if item is loader), None)
        if self._pending is None or number is None or number in self._pending.taken:
            return None
        states = self._pending.states
        if not _are_ours(states):  # lightning's own, of those that have one
            own = [item for item in loaders if item.has_own_state]
            if len(own) == len(states) > 0:
                by_loader = {id(item): state for item, state in zip(own, states, strict=True)}
                states = [foreign_state(by_loader.get(id(item))) for item in loaders]
            else:
                states = [None] * len(loaders)
        if len(states) != len(loaders):
            raise ConfigError(
                f"ckpt_path={self._pending.path}",
                f"was written with {len(states)} training loaders, this run has {len(loaders)}",
                "the loaders of the run that saved",
            )
        self._pending.taken.add(number)
        batches = self._pending.batches
        return Resume(states[number], batches, not batches, self._pending.path)

    def before_fetch(self, loader: TrainingLoader) -> None:
        """A batch is about to be read: with the random numbers with which it would have been."""
        if self._random and loader is self._loaders()[0]:
            self._random.popleft()()
        late, self._late = self._late, []
        for batches in late:
            batches.begin()
        if self._is_unsized_epoch_over:
            self._is_unsized_epoch_over = False
            assert self._trainer is not None
            self._trainer.fit_loop.max_batches = math.inf

    def begins_late(self, batches: Pass) -> None:
        """A pass that has to begin before its first fetch, together with those of the other loaders."""
        self._late.append(batches)

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
    taken: set[int] = field(default_factory=set)


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


def reopen_epoch(checkpoint: dict[str, Any]) -> None:
    """Let an epoch that the end of training cut short go on, instead of being counted twice.

    With ``max_steps`` reached in its middle, lightning counts it as done, and a resumed run would train on what is left
    of it as the next one, which samplers and schedulers are told the number of.
    """
    if trained_batches(checkpoint):
        for progress in _loops(checkpoint).get("epoch_progress", {}).values():
            if progress["processed"] == progress["started"]:
                progress["processed"] -= 1
            progress["completed"] = min(progress["completed"], progress["processed"])


def _loops(checkpoint: dict[str, Any]) -> dict[str, Any]:
    loops: dict[str, Any] = checkpoint.get("loops", {}).get("fit_loop", {})
    return loops
