"""What a pretended rank allocates and exchanges, seen operator by operator."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from autolaunch_strategies.sharded_sequence.shard import SequenceShard
from autolaunch_strategies.torch_private.operators import opened
from autolaunch_strategies.torch_private.pretended import (
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


class Trace(TorchDispatchMode):
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
        self._alive: dict[int, Any] = {}
        self._sizes: dict[int, int] = {}
        self._kinds: dict[int, str] = {}
        self._changes: list[tuple[int, int]] = []
        """(number of a storage, its bytes from then on), while it listens."""
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
        if not is_pretended(types):
            return NotImplemented
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default and (device := device_of_fake(args[0])) is not None:
            return device  # half of all calls: each tensor is asked for its own
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
        self.exchanges.append(Exchange(kind, ranks, size, peer))

    def _see(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if id(storage) in self._numbers or tensor.is_meta:  # nothing is held on meta
            return
        number = self._numbers[id(storage)] = len(self._alive)
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
