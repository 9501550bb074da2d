"""Where a training loader stands in its pass over the data, as plain data, and how another process gets there."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from autolaunch_strategies.config import ConfigError
from autolaunch_strategies.data_parallel.first_batch import Begun, holders, values_of
from autolaunch_strategies.data_parallel.loader import (
    DistributedLoader,
    get_random_states,
    set_random_states,
    set_state,
    state_of,
    with_arrays,
    with_tensors,
)
from autolaunch_strategies.data_parallel.order import Order, has_state

CHOICES = ("required", "read_again", "start_over")
"""What a resume in the middle of an epoch does where the place in the data can't be found; see `TrainingLoader`."""

_KEY = "checkpoint.data_position={0}, in a script MeshStrategy(data_position={0!r})"


@dataclass(frozen=True)
class Resume:
    """Where the first pass of a resumed run begins.

    Attributes:
        state: of the loader (`TrainingLoader.state_dict`); None if the checkpoint holds none.
        batches: that were trained on in the epoch that was under way.
        in_next_pass: that epoch was over.
        path: of the checkpoint.
        is_again: a pass that began there has been given up before it had a batch.
    """

    state: Mapping[str, Any] | None
    batches: int
    in_next_pass: bool
    path: str
    is_again: bool = False


class Watcher(Protocol):
    """Whoever goes through training loaders, and resumes them."""

    choice: str
    """One of `CHOICES`."""

    def resumes(self, loader: TrainingLoader) -> Resume | None:
        """Where the pass of `loader` that begins now has to begin, if not at its start."""

    def begins_late(self, loader: TrainingLoader, batches: Pass) -> None:
        """A pass has to begin before its first fetch."""

    def has_ended(self, loader: TrainingLoader) -> None:
        """A pass has no more batches."""

    def before_fetch(self, loader: TrainingLoader) -> None:
        """A batch is about to be read."""

    def reads_ahead(self) -> bool:
        """Whether the batch that is read now is trained on after the next one is read."""


class TrainingLoader:
    """The batches of `shared`, and where in them training stands, for checkpoints.

    The place is found again by the order of a map-style dataset (indices are drawn once more, nothing is loaded), or by
    the state that a loader or an iterable dataset says itself (`state_dict`, `load_state_dict`). A loader whose epoch
    may have another number of batches than in the run that saved says where it goes on (`place_in_epoch`). Of other
    data it is only known how many batches were read: resuming in the middle of an epoch is refused (`required`), reads
    as many batches and throws them away (`read_again`), or goes through all data again (`start_over`).

    Generators that the dataset or `collate_fn` hold go on with the state that they had; those of worker processes are
    seeded anew.

    Every attribute that is not named here is that of `shared`.

    Args:
        loader: as `ordered` has returned it.
        shared: the part of it that belongs to this rank; `loader` itself if there is one part only.
        watcher: goes through it.
    """

    def __init__(self, loader: Any, shared: Any, watcher: Watcher) -> None:
        self.shared, self._loader, self._watcher = shared, loader, watcher
        self._order = _order_of(loader)
        self._stateful = None if self._order is not None else _stateful(loader)
        self._batches = 0
        self.place: int | None = None
        """How many batches of its epoch are behind the resumed pass, where this run may count others than the last."""
        self._held: list[Any] = []
        self._begin: dict[str, Any] | None = None
        self._before: dict[str, Any] | None = None
        """What `state_dict` was before the batch that was read last, if that is one too far."""

    def __len__(self) -> int:
        return len(self.shared)

    def __getattr__(self, name: str) -> Any:
        if name == "shared":  # not there yet: a copy is being made
            raise AttributeError(name)
        return getattr(self.shared, name)

    @property
    def _iterator(self) -> Any:
        """Where a DataLoader keeps its workers; lightning ends them."""
        return getattr(self._reader, "_iterator", None)

    @_iterator.setter
    def _iterator(self, iterator: Any) -> None:
        if isinstance(self._reader, DataLoader):
            self._reader._iterator = iterator

    @property
    def _reader(self) -> Any:
        return self.shared.reader if isinstance(self.shared, DistributedLoader) else self.shared

    def __iter__(self) -> Iterator[Any]:
        return Pass(self, self._watcher)

    @property
    def has_own_state(self) -> bool:
        """Whether the loader itself has a `state_dict`, which plain lightning saves."""
        return self._stateful is not None and self._stateful is self._loader

    @property
    def _joined(self) -> int:
        """How many batches of the loader are one of all ranks."""
        return self.shared.joined if isinstance(self.shared, DistributedLoader) else 1

    @property
    def has_position(self) -> bool:
        """Whether its place in the middle of an epoch can be found again."""
        return self._order is not None or self._stateful is not None

    def state_dict(self) -> dict[str, Any]:
        """Where training stands, as plain data.

        ``position`` is the same on every rank that is given a part of the same batches, ``drawn`` is this rank's own.
        """
        return self._before if self._before is not None else self._state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing: the `watcher` says where a pass begins, also where lightning would not."""

    def _state(self) -> dict[str, Any]:
        position: dict[str, Any] = {"batches": self._batches}
        if self._order is not None:
            position["order"] = self._order.state_dict()
        elif self._stateful is not None:
            position["state"] = with_tensors(copy.deepcopy(self._stateful.state_dict()))
        if self._order is None and getattr(self._loader, "batch_size", None) is not None:
            position["batch_size"] = self._loader.batch_size
        drawn: dict[str, Any] = {"generators": self._generators()}
        if not self.has_position:
            drawn["begin"] = self._begin
        return {"position": position, "drawn": drawn}

    def _generators(self) -> list[Any]:
        """The states of those that the data hold, in an order that depends on how they are held."""
        return [with_tensors(state_of(generator)) for generator in self._held]

    def _set_generators(self, states: list[Any]) -> None:
        if len(self._held) == len(states):
            for generator, state in zip(self._held, states, strict=True):
                set_state(generator, with_arrays(state))

    # --- for a pass -------------------------------------------------------------------------------------------------

    def end_pass(self, resume: Resume) -> None:
        """Leave the samplers as the pass left them that a resumed run has ended before."""
        position = {} if resume.state is None else resume.state["position"]
        if self._order is None or "order" not in position:
            return
        if isinstance(self._reader, DataLoader) and self._reader.persistent_workers and self._reader.num_workers:
            # They were there: starting them draws a seed, which that pass had drawn.
            outside = get_random_states()
            self._order.is_silent = True
            iter(self._reader)
            self._order.is_silent = False
            set_random_states(outside)
        self._order.resume_behind(position["order"])

    def begin_pass(self, resume: Resume | None) -> Iterator[Any]:
        """The batches from where `resume` says on."""
        self._batches, self._before, self.place = 0, None, None
        self._held = _generators_of(self._loader)
        if self._order is not None:
            self._order.forget()
        state = None if resume is None else resume.state
        if resume is None or (resume.in_next_pass and state is None):
            return self._fresh()
        if not resume.in_next_pass and not resume.batches:
            if state is not None and self._order is not None and "order" in state["position"]:
                self._order.resume(state["position"]["order"])
            return self._fresh()
        batches = self._positioned(resume)
        return self._by_choice(resume) if batches is None else batches

    def _fresh(self) -> Iterator[Any]:
        self._begin = None
        if not self.has_position:
            self._begin = {"random": with_tensors(get_random_states()), "generators": self._generators()}
        return iter(self.shared)

    def _positioned(self, resume: Resume) -> Iterator[Any] | None:
        """Batches from the place that the checkpoint says on; None if it says none."""
        position = {} if resume.state is None else resume.state["position"]
        if resume.state is not None:
            self._set_generators(resume.state["drawn"]["generators"])
        self._batches = 0 if resume.in_next_pass else position.get("batches", resume.batches)
        if self._stateful is not None and "state" in position:
            self._check_batch_size(resume)
            return self._from_state(position["state"], resume.in_next_pass)
        if resume.in_next_pass:
            return self._fresh()
        if self._order is not None and "order" in position:
            if self._watcher.choice == "start_over" and not self._order.can_resume(position["order"]):
                return None
            self._order.resume(position["order"])
            return iter(self.shared)
        if self._order is not None and not position and self._order.resume_at(self._batches * self._joined):
            return iter(self.shared)
        return None

    def _from_state(self, state: Any, in_next_pass: bool) -> Iterator[Any]:
        assert self._stateful is not None
        initial = copy.deepcopy(self._stateful.state_dict())
        self._stateful.load_state_dict(with_arrays(copy.deepcopy(state)))
        for holder in (self._loader, getattr(self._loader, "dataset", None)):
            if isinstance(holder, Begun):
                holder.forget()
        if in_next_pass:
            return self._next_from_state(initial)
        place_in_epoch = getattr(self._stateful, "place_in_epoch", None)
        if place_in_epoch is not None:
            self._batches = self.place = place_in_epoch(self._batches)
        return iter(self.shared)

    def _next_from_state(self, initial: Any) -> Iterator[Any]:
        """The pass after one that was ended by training: what may be left of that one is not in it."""
        assert self._stateful is not None
        outside = get_random_states()
        iter(self._loader)  # takes up the loaded state
        for attempt in range(3):
            if attempt == 2:  # some hand out nothing at all until they are told where to begin
                self._stateful.load_state_dict(initial)
            set_random_states(outside)
            batches = iter(self.shared)
            for first in batches:
                return itertools.chain([first], batches)
        return iter(())

    def _by_choice(self, resume: Resume) -> Iterator[Any]:
        choice, state = self._watcher.choice, resume.state
        if choice == "start_over":
            self._batches = self.place = 0
            return self._fresh()
        begin = None if state is None else state["drawn"].get("begin")
        if choice == "read_again" and self._order is None and begin is not None:
            assert state is not None
            self._check_batch_size(resume)
            outside, generators = get_random_states(), self._generators()
            set_random_states(with_arrays(begin["random"]))
            self._set_generators(begin["generators"])
            self._begin = begin
            batches = iter(self.shared)
            for _ in itertools.islice(batches, self._batches):
                pass
            if isinstance(self.shared, DistributedLoader):
                self.shared.weights.clear()
            set_random_states(outside)
            self._set_generators(generators)
            return batches
        why, line = self.advice() if not self.has_position else ("the checkpoint does not say its place", "")
        if begin is not None and self._order is None:
            line = f"{line or 'state_dict() and load_state_dict(state)'}; to read and throw away what was trained on, "
            line += _KEY.format("read_again")
        line += f"{'; ' if line else ''}to begin the epoch's data again, " + _KEY.format("start_over")
        raise ConfigError(
            f"ckpt_path={resume.path}",
            f"was written after {resume.batches} batches of an epoch, and train_dataloader can't go on there: {why}",
            "a checkpoint from the end of an epoch, or a loader whose position can be restored",
            line,
        )

    def _check_batch_size(self, resume: Resume) -> None:
        """Raise ConfigError if a pass would go on in batches of another size than those that it counts."""
        assert resume.state is not None
        there, here = resume.state["position"].get("batch_size"), getattr(self._loader, "batch_size", None)
        ends_with_its_data = self._stateful is not None and not _has_length(self.shared)
        if resume.in_next_pass or ends_with_its_data or None in (there, here) or there == here:
            return
        raise ConfigError(
            f"ckpt_path={resume.path}",
            f"was written after {resume.batches} batches of {there} of an epoch, and where "
            f"{type(self._loader).__name__} goes on in it with batches of {here} is not known",
            "the batch size of the run that saved, or a checkpoint from the end of an epoch",
            f"batch_size={there}",
        )

    def advice(self) -> tuple[str, str]:
        """(why its place can't be found again, what to write so that it can)."""
        loader = self._loader
        if isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset):
            data = (
                getattr(loader.dataset, "data", loader.dataset) if isinstance(loader.dataset, Begun) else loader.dataset
            )
            name = type(data).__name__
            if has_state(loader.dataset):
                return (
                    f"{name} is read by worker processes, which keep its state",
                    "num_workers=0, or torchdata's StatefulDataLoader",
                )
            return (
                f"{name} is iterable and has no state_dict",
                f"state_dict(self) and load_state_dict(self, state) in {name}, with num_workers=0 or torchdata's "
                "StatefulDataLoader; or a dataset with __len__ and __getitem__",
            )
        name = type(_unbegun(loader)).__name__
        return (
            f"{name} goes through its data in a way of its own and has no state_dict",
            f"state_dict(self) and load_state_dict(self, state) in {name}",
        )

    def note_read(self, before: dict[str, Any] | None) -> None:
        """A batch has been read; `before` is what `state_dict` was before, if it is not trained on at once."""
        self._batches += 1
        self._before = before
        if self._order is not None:
            self._order.handed_out(self._joined)

    def note_end(self) -> None:
        """There are no more."""
        self._before = None

    def state_before_reading(self) -> dict[str, Any]:
        """`state_dict` now, with the random states with which the next batch is read."""
        state = self._state()
        return {**state, "drawn": {**state["drawn"], "random": with_tensors(get_random_states())}}


class Pass:
    """One pass through a `TrainingLoader`.

    It begins at once, as with its loader; but the one behind an epoch that the run before has ended begins with its
    first batch, since what else happens between epochs comes before.
    """

    def __init__(self, loader: TrainingLoader, watcher: Watcher) -> None:
        self._loader, self._watcher = loader, watcher
        self._resume = watcher.resumes(loader)
        self._batches: Iterator[Any] | None = None
        self._error: ConfigError | None = None
        try:
            if self._resume is not None and self._resume.in_next_pass:
                if not self._resume.is_again:
                    loader.end_pass(self._resume)
                watcher.begins_late(loader, self)
            else:
                self.begin()
        except ConfigError as error:
            self._error = error  # lightning would hide it by one of its own now

    def begin(self) -> None:
        """Begin, if that has not been done."""
        if self._batches is None:
            self._batches = self._loader.begin_pass(self._resume)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._error is not None:
            raise self._error
        self._watcher.before_fetch(self._loader)
        assert self._batches is not None
        before = self._loader.state_before_reading() if self._watcher.reads_ahead() else None
        try:
            batch = next(self._batches)
        except StopIteration:
            self._loader.note_end()
            self._watcher.has_ended(self._loader)
            raise
        self._loader.note_read(before)
        return batch


def ordered(loader: Any) -> Any:
    """`loader`, or one like it that knows its order: for a `DataLoader` of a map-style dataset.

    Loaders that are subclasses with a state or an iteration of their own stay as they are.
    """
    if (
        not isinstance(loader, DataLoader)
        or isinstance(loader.dataset, IterableDataset)
        or type(loader).__iter__ is not DataLoader.__iter__
        or has_state(loader)
    ):
        return loader
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    same = copy.copy(loader)
    same.__dict__.update({name: Order(getattr(loader, name)), "_iterator": None})  # it refuses a plain assignment
    return same


def _order_of(loader: Any) -> Order | None:
    for sampler in (getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None)):
        if isinstance(sampler, Order):
            return sampler
    return None


def _stateful(loader: Any) -> Any:
    """What says the state of `loader` itself: it, or a dataset that it reads in this process."""
    if has_state(loader):
        return loader
    if isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__ and not loader.num_workers:
        dataset: Any = loader.dataset
        if isinstance(dataset, IterableDataset) and has_state(dataset) and not isinstance(dataset, nn.Module):
            return dataset
    return None


def _has_length(loader: Any) -> bool:
    try:
        return len(loader) >= 0
    except (TypeError, NotImplementedError):
        return False


def _unbegun(data: Any) -> Any:
    return data.data if isinstance(data, Begun) else data


def _generators_of(loader: Any) -> list[Any]:
    """Those that the dataset and `collate_fn` of a loader hold."""
    roots = [getattr(loader, name, None) for name in ("dataset", "collate_fn")]
    found = [value for holder in holders(roots) for value in values_of(holder) if state_of(value) is not None]
    return list({id(value): value for value in found}.values())


def foreign_state(state: Any) -> dict[str, Any] | None:
    """A state as of `TrainingLoader`, from one that a loader with a `state_dict` has given to somebody else."""
    return None if state is None else {"position": {"state": state}, "drawn": {"generators": []}}
