"""What a pretended rank allocates and exchanges, seen operator by operator."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from autolaunch_strategies.sharded_sequence.shard import SequenceShard
from autolaunch_strategies.torch_private.fake_results import ASKS_DEVICE
from autolaunch_strategies.torch_private.modes import without_torch_functions
from autolaunch_strategies.torch_private.operators import opened
from autolaunch_strategies.torch_private.pretended import (
    WithoutCompiler,
    device_of_fake,
    group_of_collective,
    is_pretended,
    resizes_told,
)
from autolaunch_strategies.torch_private.tracing import RESULTS_OF_FAKES, reads_values
from autolaunch_strategies.tracing.shapes import is_on_shapes_alone
from autolaunch_strategies.tracing.values import ASKS_VALUE, SAY_THAT_SOMETHING_IS_WRONG, healthy_value

PARAMETERS, GRADIENTS, OPTIMIZER, ACTIVATIONS = "parameters", "gradients", "optimizer", "activations"
KINDS = (PARAMETERS, GRADIENTS, OPTIMIZER, ACTIVATIONS)
"""What memory is told apart by. Activations are everything else that is held: work and gathered parameters, too."""


@dataclass(frozen=True)
class Exchange:
    """One collective or message."""

    kind: str
    """As torch calls the operator: allreduce_, _allgather_base_, send, ..."""
    ranks: tuple[int, ...]
    """Of the group, in its order."""
    bytes: int
    """Of the largest tensor that it is given."""
    peer: int | None = None
    """Of a message: to or from which rank."""

    @property
    def is_message(self) -> bool:
        """Whether it is between two ranks."""
        return self.peer is not None


Event = tuple[int, int]
"""(number of a storage, its bytes from then on)"""


@dataclass
class Apart:
    """What was seen apart from a rank's own memory and exchanges; storages have numbers of their own."""

    events: list[Event] = field(default_factory=list)
    exchanges: list[Exchange] = field(default_factory=list)
    alive: dict[int, int] = field(default_factory=dict)
    """Bytes of storages that are there, by number."""
    made: int = 0
    """Storages so far."""


class Trace(WithoutCompiler):
    """Follows memory from the first operator to the last, and what is exchanged while `listens`.

    Memory is that of storages, from the operator that makes one to the end of the last tensor that has it. A value
    that the host asks of a tensor is answered with 1.
    """

    def __init__(self) -> None:
        super().__init__()
        self.exchanges: list[Exchange] = []
        self.listens = False
        self._numbers: dict[int, int] = {}
        """id of a live storage -> its number."""
        self._next = itertools.count()
        self._alive: dict[int, Any] = {}
        self._sizes: dict[int, int] = {}
        self._kinds: dict[int, str] = {}
        self._changes: list[Event] = []
        """While it listens."""
        self._apart: Apart | None = None
        self._of_apart: dict[int, tuple[Apart, int]] = {}
        """Storages that are counted apart: where, and as which number."""
        self._held = self._most = 0
        self._at_most = 0
        self._before: dict[int, int] = {}
        self._no: set[int] = set()
        """Storages of truth values that are False."""

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within it operators are seen."""
        with resizes_told(self._resized), self:
            yield

    @contextmanager
    def listening(self) -> Iterator[None]:
        """The part of which `peak` and `exchanges` tell."""
        self._before, self._changes = dict(self._sizes), []
        self._most, self._at_most = self._held, 0
        self.listens = True
        try:
            yield
        finally:
            self.listens = False

    @contextmanager
    def apart(self) -> Iterator[Apart]:
        """Within it what is made is counted, and what is exchanged is noted, in what it gives alone."""
        assert self._apart is None
        self._apart = Apart()
        try:
            yield self._apart
        finally:
            self._apart = None

    def number_apart(self, tensor: Any) -> int | None:
        """The number that the storage of a tensor has in its `Apart`; None of one that was there before."""
        number = self._number(tensor)
        found = None if number is None else self._of_apart.get(number)
        return None if found is None else found[1]

    def replay(
        self,
        events: Iterable[Event],
        numbers: dict[int, int],
        ends: Mapping[int, Callable[[], Any]] = MappingProxyType({}),
        kinds: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        """Count storages that are not there as what an `Apart` has seen.

        Args:
            numbers: of storages in `events` -> here; new ones are added.
            ends: called in place of the end of storages that are there.
            kinds: of storages in `events`.
        """
        for number, size in events:
            if size == 0 and number in ends:
                ends[number]()
            elif number in numbers:
                self._resize(numbers[number], size)
            elif size:
                numbers[number] = next(self._next)
                self._kinds[numbers[number]] = kinds.get(number, ACTIVATIONS)
                self._resize(numbers[number], size)

    def take_as_freed(self, tensor: Any) -> None:
        """Count the storage of a tensor no longer."""
        if (number := self._number(tensor)) is not None:
            self._resize(number, 0)

    def _number(self, tensor: Any) -> int | None:
        local = local_of(tensor)
        return None if local is None else self._numbers.get(id(local.untyped_storage()))

    def name(self, kind: str, tensors: Iterable[Any]) -> None:
        """Say what the storages of tensors are, those of a rank's parts; whatever they were called before."""
        for tensor in tensors:
            if (local := local_of(tensor)) is not None and not local.is_meta:
                self._see(local)
                self._kinds[self._numbers[id(local.untyped_storage())]] = kind

    def peak(self) -> dict[str, int]:
        """Bytes by `KINDS` at the moment at which most was held."""
        sizes = dict(self._before)
        for number, size in self._changes[: self._at_most]:
            sizes[number] = size
        peak = dict.fromkeys(KINDS, 0)
        for number, size in sizes.items():
            peak[self._kinds.get(number, ACTIVATIONS)] += size
        return peak

    def size(self, tensors: Iterable[Any]) -> int:
        """Bytes of the storages of tensors, of a rank's parts; one that several share counts once."""
        parts = [local for tensor in tensors if (local := local_of(tensor)) is not None]
        storages = {id(storage): storage for storage in (part.untyped_storage() for part in parts)}
        return sum(storage.nbytes() for storage in storages.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is ASKS_DEVICE and (device := device_of_fake(args[0])) is not None:
            return device  # half of all calls: each tensor is asked for its own
        if not is_pretended(types):
            return NotImplemented
        with without_torch_functions():  # which were asked before autograd was
            return self._run(func, args, kwargs or {})

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        if (run := opened(func)) is not None:
            with self:  # what it does inside takes memory and exchanges, too
                return run(*args, **kwargs)
        try:
            output = RESULTS_OF_FAKES.get(func.overloadpacket, func)(*args, **kwargs)
        except Exception as error:
            if not reads_values(error) or func.overloadpacket is not ASKS_VALUE:
                raise
            return healthy_value(args[0], self._numbers.get(id(args[0].untyped_storage())) in self._no)
        if func.namespace in ("c10d", "_c10d_functional"):
            self._exchanged(func, args, output)
        elif func.namespace == "prim":
            return output
        if is_on_shapes_alone():
            return output
        for tensor in _tensors(output):
            self._see(tensor)
        if func.overloadpacket in SAY_THAT_SOMETHING_IS_WRONG and isinstance(output, torch.Tensor):
            self._no.add(self._numbers[id(output.untyped_storage())])
        return output

    def _exchanged(self, func: Any, args: Any, output: Any) -> None:
        group = group_of_collective(func, args) if self.listens else None
        if group is None:
            return
        ranks = tuple(dist.get_process_group_ranks(group))
        kind = func.overloadpacket.__name__
        size = max((tensor.nbytes for tensor in _tensors((args, output))), default=0)
        peer = None
        if kind in ("send", "recv_"):
            peer = ranks[args[2]]
        exchanges = self.exchanges if self._apart is None else self._apart.exchanges
        exchanges.append(Exchange(kind, ranks, size, peer))

    def _see(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if id(storage) in self._numbers or tensor.is_meta:  # nothing is held on meta
            return
        number = self._numbers[id(storage)] = next(self._next)
        if self._apart is not None:
            self._of_apart[number] = self._apart, self._apart.made
            self._apart.made += 1
        self._alive[number] = weakref.ref(storage, self._ended(id(storage), number))
        self._resize(number, storage.nbytes())

    def _ended(self, key: int, number: int) -> Callable[[Any], None]:
        def ended(_: Any) -> None:
            if self._numbers.get(key) == number:
                del self._numbers[key]
            self._resize(number, 0)

        return ended

    def _resized(self, storage: torch.UntypedStorage) -> None:
        if (number := self._numbers.get(id(storage))) is not None:
            self._resize(number, storage.nbytes())

    def _resize(self, number: int, size: int) -> None:
        if number in self._of_apart:
            apart, number = self._of_apart[number]
            apart.events.append((number, size))
            if size:
                apart.alive[number] = size
            else:
                apart.alive.pop(number, None)
            return
        self._held += size - self._sizes.get(number, 0)
        if size:
            self._sizes[number] = size
        else:
            self._sizes.pop(number, None)
        if self.listens:
            self._changes.append((number, size))
            if self._held > self._most:
                self._most, self._at_most = self._held, len(self._changes)


def local_of(tensor: Any) -> torch.Tensor | None:
    """This rank's part of a tensor; None of what is none, or has no memory."""
    if isinstance(tensor, SequenceShard):
        tensor = tensor.local
    if isinstance(tensor, DTensor):
        tensor = tensor._local_tensor
    return tensor if isinstance(tensor, torch.Tensor) else None


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _tensors(value)
