"""The first batch of a loader, read ahead of the training, which then goes as if nobody had read it."""

from __future__ import annotations

import collections
import io
import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from autolaunch_strategies.data_parallel.loader import (
    equal_states,
    get_random_states,
    set_random_states,
    set_state,
    state_of,
)

_MOST_OBJECTS = 2000
_CONTAINERS = (list, dict, set, collections.deque, collections.OrderedDict, collections.defaultdict)


class FirstBatches:
    """Reads first batches, and gives back those that could be read once only.

    What can be read again is put back where it was: random states of torch, numpy and python, generators and counters
    that the loader, its samplers and its data hold. What can't (an iterator, a file that is being read) keeps the
    samples, and hands them out first when the training asks for them: see `give_back`.
    """

    def __init__(self) -> None:
        self._begun: list[tuple[Any, Begun]] = []
        """(data that goes one way, the same from its beginning)."""

    def undisturbed(self, make: Callable[[], Any]) -> Any:
        """What `make` returns, a loader, say, without a trace of what it draws."""
        with _put_back([]):
            return make()

    def read(self, loader: Any) -> Any:
        """The first batch of `loader`, read in this process; None if there is none.

        Args:
            loader: a `DataLoader`, or whatever can be gone through.

        Raises:
            Exception: whatever the data raise.
        """
        if not isinstance(loader, DataLoader):
            if not _goes_one_way(loader):
                return _read_again(loader, lambda: next(iter(loader), None))
            return next(iter(self._taken(loader, 1)), None)
        if type(loader).__iter__ is not DataLoader.__iter__:
            return _read_again(loader, lambda: next(iter(loader), None))
        data: Any = loader.dataset
        if not isinstance(data, IterableDataset):
            return _read_again(loader, lambda: _of_indices(loader))
        if not _goes_one_way(data):
            return _read_again(loader, lambda: _of_stream(loader, iter(data)))
        with _put_back([]):  # `collate_fn` may draw
            return _of_stream(loader, iter(self._taken(data, loader.batch_size or 1)))

    def give_back(self, loader: Any) -> Any:
        """`loader`, or what stands for it, that begins with the samples that have been read; once for each."""
        for place, (data, begun) in enumerate(self._begun):
            if loader is data:
                del self._begun[place]
                return begun
            if isinstance(loader, DataLoader) and loader.dataset is data:
                object.__setattr__(loader, "dataset", begun)  # the loader refuses a plain assignment
                return loader
        return loader

    def _taken(self, data: Any, count: int) -> list[Any]:
        begun = next((begun for known, begun in self._begun if known is data), None)
        if begun is None:
            begun = Begun(data)
            self._begun.append((data, begun))
        return begun.first(count)


def first_batch(loader: DataLoader) -> Any:
    """The first batch of `loader`, read without a trace; None if there is none, or it would be missing afterwards."""
    data: Any = loader.dataset
    if isinstance(data, IterableDataset) and _goes_one_way(data):
        return None
    return FirstBatches().read(loader)


class Begun(IterableDataset):
    """Data of which some samples have been read: the first pass over it begins with these.

    What was drawn for them is drawn when they are handed out, if that would draw the same then.
    """

    def __init__(self, data: Any) -> None:
        self.data = data
        self._samples: list[Any] = []
        self._rest: Iterator[Any] | None = iter(data)
        self._drawn: list[tuple[Any, Any]] = []
        """Of every kind of random numbers: (state before the samples were read, state after)."""

    def first(self, count: int) -> list[Any]:
        """The first samples. Random states are put back."""
        assert self._rest is not None
        states = get_random_states()
        set_random_states([after for _, after in self._drawn] or states)
        try:
            self._samples += itertools.islice(self._rest, max(0, count - len(self._samples)))
        finally:
            before = [state for state, _ in self._drawn] or states
            self._drawn = list(zip(before, get_random_states(), strict=True))
            set_random_states(states)
        return self._samples[:count]

    def __iter__(self) -> Iterator[Any]:
        if self._rest is None:
            return iter(self.data)
        samples, rest = self._samples, self._rest
        self._samples, self._rest = [], None
        return itertools.chain(self._handed_out(samples), rest)

    def _handed_out(self, samples: list[Any]) -> Iterator[Any]:
        now = zip(get_random_states(), self._drawn, strict=True)
        set_random_states([after if equal_states(state, before) else state for state, (before, after) in now])
        yield from samples

    def forget(self) -> None:
        """The data stand somewhere else now: go on from there."""
        self._samples, self._rest = [], None

    def __len__(self) -> int:
        return len(self.data)

    def __getattr__(self, name: str) -> Any:
        if name == "data":  # not there yet: a copy is being made
            raise AttributeError(name)
        return getattr(self.data, name)


def _of_stream(loader: DataLoader, samples: Iterator[Any]) -> Any:
    if loader.batch_size is None:
        sample = next(samples, None)
        return None if sample is None else loader.collate_fn(sample)
    first = list(itertools.islice(samples, loader.batch_size))
    return loader.collate_fn(first) if first else None


def _of_indices(loader: DataLoader) -> Any:
    indices: Any = next(iter(loader.batch_sampler if loader.batch_sampler is not None else loader.sampler), None)
    if indices is None:
        return None
    data: Any = loader.dataset
    if loader.batch_sampler is None:
        return loader.collate_fn(data[indices])
    if getattr(data, "__getitems__", None):
        return loader.collate_fn(data.__getitems__(list(indices)))
    return loader.collate_fn([data[index] for index in indices])


def _goes_one_way(data: Any) -> bool:
    """Whether what has been read of `data` would be missing the next time, as far as can be seen."""
    if isinstance(data, Iterator) or (isinstance(data, IterableDataset) and iter(data) is iter(data)):
        return True
    return any(isinstance(value, Iterator | io.IOBase) for holder in holders([data]) for value in values_of(holder))


# --- states that are put back ------------------------------------------------------------------------------------


def _read_again(loader: Any, read: Any) -> Any:
    with _put_back([loader]):
        return read()


@contextmanager
def _put_back(roots: list[Any]) -> Iterator[None]:
    """Put back afterwards what may change when data are read: random states, and attributes that `roots` lead to."""
    states = get_random_states()
    owners = holders(roots)
    attributes = [(holder.__dict__, dict(holder.__dict__)) for holder in owners]
    values = [value for holder in owners for value in values_of(holder)]
    contents = [(value, value.copy()) for value in values if type(value) in _CONTAINERS]
    generators = [(value, state_of(value)) for value in values if state_of(value) is not None]
    try:
        yield
    finally:
        set_random_states(states)
        for now, before in (*attributes, *contents):
            now.clear()
            if isinstance(now, dict | set):
                now.update(before)
            else:
                now.extend(before)
        for generator, state in generators:
            set_state(generator, state)


def holders(roots: Iterable[Any]) -> list[Any]:
    """The objects with attributes that `roots` lead to, each once: not models, classes, functions or devices."""
    reached: dict[int, Any] = {}
    waiting = collections.deque(roots)
    while waiting and len(reached) < _MOST_OBJECTS:
        item = waiting.popleft()
        passed_over = (torch.Tensor, nn.Module, type, FunctionType, ModuleType)
        if id(item) in reached or isinstance(item, passed_over) or type(getattr(item, "__dict__", None)) is not dict:
            continue
        reached[id(item)] = item
        for value in values_of(item):
            waiting.extend(_some(value) if isinstance(value, list | tuple | dict) else (value,))
    return list(reached.values())


def values_of(holder: Any) -> list[Any]:
    """What an object holds; what a method is bound to counts (a `collate_fn` with a tokenizer, say)."""
    return [getattr(value, "__self__", value) for value in holder.__dict__.values()]


def _some(value: Any) -> list[Any]:
    items = value.values() if isinstance(value, dict) else value
    return list(itertools.islice(items, 64))  # datasets that are joined, or transforms; not a list of all samples
