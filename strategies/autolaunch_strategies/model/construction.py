"""Construct a model without memory, and make its tensors later, one at a time, the same on every mesh.

A model's constructor runs once, unmodified, with every tensor on `meta`, while each operation is written down. To make
one tensor afterwards, only the operations that its values depend on are run. Every random operation has a seed of
its own (from the run's seed and its place in the constructor), so a value never depends on which other tensors this
rank makes, nor in which order. Deferred initialisation of this kind is known from torchdistx.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from autolaunch_strategies.torch_private.random_state import saved_random_state, seed_torch
from autolaunch_strategies.torch_private.tracing import (
    argument_names,
    is_random,
    returns_numbers,
    storage_key,
    takes_device,
    writes_to,
)
from autolaunch_strategies.torch_private.trees import leaves_in, mapped

_OVERWRITES = {"normal_", "uniform_", "fill_", "zero_", "copy_", "random_", "exponential_", "bernoulli_"}
"""In-place operators after which nothing of the old values is left."""

_WITHOUT_TENSORS = (str, bytes, int, float, bool, type(None), torch.dtype, torch.device, torch.Size)
_NO_PARTS = (nn.Module, type, FunctionType, ModuleType)
"""Of objects that a module holds: what has no tensors in it, and what is not looked into."""


@dataclass(frozen=True)
class _View:
    """A tensor as a window on recorded memory."""

    storage: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


@dataclass
class _Operation:
    index: int
    operator: Any
    arguments: Any  # (args, kwargs) with a _View or a _Constant for every tensor
    outputs: list[_View | None]
    reads: set[int]
    writes: set[int]
    overwrites: int | None  # the storage whose old values no longer matter, if any


@dataclass(frozen=True)
class _Constant:
    value: torch.Tensor = field(compare=False)


class Construction:
    """The record of one constructor: `with construction.recording(): model = Model()`, then `tensor(parameter)`."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._operations: list[_Operation] = []
        self._writers: dict[int, list[int]] = {}
        self._alive: dict[int, torch.UntypedStorage] = {}  # keeps the keys of recorded memory unique
        self.named: dict[str, torch.Tensor] = {}
        self._given: dict[int, Callable[[], torch.Tensor]] = {}
        self.replaying = False
        self.gives_shapes_alone = False
        """Whether nobody looks at the values that `tensor` gives."""

    def remember(self, module: nn.Module) -> None:
        """Keep the recorded parameters and buffers of `module` under their names, before anything replaces them.

        What was kept before stays: a parameter that has been converted since has other memory, of which nothing is
        recorded.
        """
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if self.knows(tensor):
                self.named.setdefault(name, tensor.detach())

    def give(self, tensor: torch.Tensor, read: Callable[[], torch.Tensor]) -> None:
        """Let `read` say what a recorded tensor holds, instead of the constructor: for what is computed from it, too.

        Args:
            tensor: recorded, and all of its memory.
            read: returns values of its shape, in any type.
        """
        assert self.knows(tensor) and _covers_its_memory(tensor), "the tensor is a part of another one"
        self._given[storage_key(tensor)] = lambda: read().to(tensor.dtype)

    def settle(self, module: nn.Module, leave: Iterable[Any] = ()) -> None:
        """Make the recorded tensors for real, on the CPU, that are neither parameters nor buffers of `module`.

        Attributes of modules, and what is held by containers and objects in them: states of metrics, noise schedules,
        distributions. Nobody else would: they are in no `state_dict`, and `Module.to` doesn't move them.

        Args:
            leave: objects that a module refers to, and that are no part of it.
        """
        named = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
        seen = {id(item) for item in leave}

        def settled(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                plain = id(value) not in named and not value.requires_grad and self.knows(value)
                return made.setdefault(id(value), self.tensor(value)) if plain else value
            if type(value) in _WITHOUT_TENSORS or id(value) in seen or isinstance(value, _NO_PARTS):
                return value
            if isinstance(value, tuple):
                parts = [settled(part) for part in value]
                if all(part is old for part, old in zip(parts, value, strict=True)):
                    return value
                return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
            seen.add(id(value))
            items = enumerate(value) if isinstance(value, list) else value.items() if isinstance(value, dict) else ()
            for key, part in [(key, new) for key, old in items if (new := settled(old)) is not old]:
                value[key] = part
            if hasattr(value, "__dict__"):
                settled(vars(value))
            return value

        made: dict[int, torch.Tensor] = {}
        for part in module.modules():
            for name, value in list(vars(part).items()):
                if name not in ("_parameters", "_buffers", "_modules"):
                    vars(part)[name] = settled(value)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Within it every new tensor is made on `meta` and recorded.

        Reading values (`item()`, `tolist()`, `numpy()`) works: they are computed from the record.
        """
        with ExitStack() as stack:
            stack.enter_context(_PretendReal(self))
            stack.enter_context(_Record(self))
            yield

    def knows(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` is on meta and its memory was recorded here."""
        return tensor.is_meta and storage_key(tensor) in self._alive

    def tensor(self, tensor: torch.Tensor, device: torch.device | str = "cpu") -> torch.Tensor:
        """The values that the constructor gave to `tensor` (a recorded meta tensor), whole, on `device`."""
        assert self.knows(tensor), "the tensor was not made in this construction"
        if self.gives_shapes_alone:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
        self.replaying = True
        try:
            return self._replay(_view(tensor), torch.device(device))
        finally:
            self.replaying = False

    # --- recording ---

    def record(self, operator: Any, args: Any, kwargs: Any, output: Any) -> None:
        """Write down one operation that ran on meta."""
        if operator.is_view:
            return  # the output is another window on recorded memory; windows are recorded where they are used
        names = writes_to(operator)
        written = {
            storage_key(value)
            for name, value in _named_arguments(operator, args, kwargs)
            if name in names
            for value in leaves_in(value)
            if isinstance(value, torch.Tensor)
        }
        arguments = mapped(self._describe, (args, kwargs))
        reads = {leaf.storage for leaf in leaves_in(arguments) if isinstance(leaf, _View)}
        outputs: list[_View | None] = []
        for leaf in leaves_in(output):
            if isinstance(leaf, torch.Tensor):
                self._keep(leaf)
                outputs.append(_view(leaf))
                written.add(storage_key(leaf))
            else:
                outputs.append(None)
        overwrites = None
        name = operator.overloadpacket.__name__
        if name in _OVERWRITES and isinstance(args[0], torch.Tensor) and _covers_its_memory(args[0]):
            overwrites = storage_key(args[0])
            if not any(leaf.storage == overwrites for leaf in leaves_in(arguments[0][1:]) if isinstance(leaf, _View)):
                reads.discard(overwrites)
        index = len(self._operations)
        self._operations.append(_Operation(index, operator, arguments, outputs, reads, written, overwrites))
        for key in written:
            self._writers.setdefault(key, []).append(index)

    def _keep(self, tensor: torch.Tensor) -> None:
        self._alive.setdefault(storage_key(tensor), tensor.untyped_storage())

    def _describe(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if not value.is_meta:
                return _Constant(value.detach().clone())
            self._keep(value)
            return _view(value)
        if isinstance(value, torch.Generator):
            return None  # every random operation gets a seed of its own
        return value

    # --- replaying ---

    def _needed(self, wanted: int) -> list[_Operation]:
        """The operations on which the values in the memory `wanted` depend, in the order in which they ran."""
        needed: set[int] = set()
        looked_at: dict[int, int] = {}
        todo = [(wanted, len(self._operations))]
        while todo:
            storage, before = todo.pop()
            if storage in self._given or looked_at.get(storage, -1) >= before:
                continue
            looked_at[storage] = before
            for index in reversed(self._writers.get(storage, [])):
                if index >= before:
                    continue
                operation = self._operations[index]
                needed.add(index)
                todo += [(read, index) for read in operation.reads if read != storage]
                if operation.overwrites == storage and storage not in operation.reads:
                    break
        return [self._operations[index] for index in sorted(needed)]

    def _replay(self, wanted: _View, device: torch.device) -> torch.Tensor:
        memory: dict[int, torch.Tensor] = {}

        def window(view: _View) -> torch.Tensor:
            if view.storage not in memory and view.storage in self._given:
                memory[view.storage] = self._given[view.storage]().to(device).contiguous().view(-1)
            elif view.storage not in memory:  # written only by operations that were pruned: any value will do
                assert view.storage in self._writers, "a tensor of which nothing says what it holds"
                numbers = self._alive[view.storage].nbytes() // view.dtype.itemsize
                memory[view.storage] = torch.empty(numbers, dtype=view.dtype, device=device)
            base = memory[view.storage]
            base = base if base.dtype == view.dtype else base.view(view.dtype)
            return base.as_strided(view.size, view.stride, view.offset)

        def real(leaf: Any) -> Any:
            if isinstance(leaf, _View):
                return window(leaf)
            if isinstance(leaf, _Constant):
                return leaf.value.to(device)
            if isinstance(leaf, torch.device):
                return device
            return leaf

        with torch.no_grad():
            for operation in self._needed(wanted.storage):
                args, kwargs = mapped(real, operation.arguments)
                if is_random(operation.operator):
                    with saved_random_state(device):
                        seed_torch(_seed(self.seed, operation.index), device)
                        output = operation.operator(*args, **kwargs)
                else:
                    output = operation.operator(*args, **kwargs)
                for view, tensor in zip(operation.outputs, leaves_in(output), strict=True):
                    if view is not None and view.storage not in memory and view.storage not in self._given:
                        memory[view.storage] = _flat(tensor, view)
            return window(wanted)

    def values(self, tensors: Any) -> Any:
        """The same structure with every recorded tensor in it made for real on the CPU."""

        def make(leaf: Any) -> Any:
            return self.tensor(leaf) if isinstance(leaf, torch.Tensor) and self.knows(leaf) else leaf

        return tree_map(make, tensors)


class _Record(TorchDispatchMode):
    def __init__(self, construction: Construction) -> None:
        super().__init__()
        self.construction = construction

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [leaf for leaf in leaves_in((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if self.construction.replaying or (tensors and not any(tensor.is_meta for tensor in tensors)):
            return func(*args, **kwargs)  # data that the constructor holds already, e.g. torch.tensor([...])
        if tensors and returns_numbers(func):
            return func(*self.construction.values(args), **self.construction.values(kwargs))
        if _only_fills(func, args, kwargs):
            self.construction.record(func, args, kwargs, args[0])
            return args[0]
        on_meta = mapped(_to_meta, (args, kwargs))
        recorded_kwargs = {key: value for key, value in kwargs.items() if key != "pin_memory"}
        if takes_device(func):
            on_meta[1]["device"] = torch.device("meta")
            on_meta[1].pop("pin_memory", None)
            recorded_kwargs["device"] = torch.device("cpu")  # stands for the device of the replay
        output = func(*on_meta[0], **on_meta[1])
        self.construction.record(func, args, recorded_kwargs, output)
        return output


class _PretendReal(TorchFunctionMode):
    """Lets a constructor believe that its tensors are ordinary ones on the CPU.

    Some initialisers (`torch.nn.init.trunc_normal_`) do nothing on meta, and reading a tensor's memory does not pass
    through the dispatcher.
    """

    _READS_MEMORY: frozenset[Any] = frozenset({torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__})
    _INDEXES: frozenset[Any] = frozenset({torch.Tensor.__getitem__, torch.Tensor.__setitem__})
    _ANSWERS: dict[Any, Any] = {
        # These are descriptors; torch's stubs say bool.
        torch.Tensor.is_meta.__get__: False,  # type: ignore[attr-defined]  # a descriptor, to stubs a bool
        torch.Tensor.is_cpu.__get__: True,  # type: ignore[attr-defined]  # a descriptor, to stubs a bool
        torch.Tensor.device.__get__: torch.device("cpu"),
    }

    def __init__(self, construction: Construction) -> None:
        super().__init__()
        self.construction = construction

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self._ANSWERS and self.construction.knows(args[0]):
            return self._ANSWERS[func]
        if func in self._READS_MEMORY and self.construction.knows(args[0]):
            args = (self.construction.tensor(args[0]), *args[1:])
        if func in self._INDEXES:
            args = (args[0], _with_lists_as_tensors(args[1]), *args[2:])
        return func(*args, **(kwargs or {}))


def _with_lists_as_tensors(index: Any) -> Any:
    """An index without lists, which torch would make tensors of where the indexed one is, on meta: without values."""
    if isinstance(index, tuple):
        return tuple(map(_with_lists_as_tensors, index))
    if isinstance(index, list):
        if not index:
            return torch.tensor(index, dtype=torch.int64)
        numbers = all(isinstance(item, int) for item in leaves_in(index))
        return torch.tensor(index) if numbers else tuple(map(_with_lists_as_tensors, index))
    return torch.as_tensor(index) if isinstance(index, np.ndarray) else index


def _view(tensor: torch.Tensor) -> _View:
    return _View(
        storage_key(tensor), tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()), tensor.dtype
    )


def _flat(tensor: torch.Tensor, view: _View) -> torch.Tensor:
    """All memory of a fresh tensor as 1-D, laid out as the recorded one was."""
    if tensor.stride() != view.stride or tensor.storage_offset() != view.offset:
        copy = tensor.new_empty_strided(view.size, view.stride)
        copy.copy_(tensor)
        tensor = copy
    numbers = tensor.untyped_storage().nbytes() // tensor.dtype.itemsize
    return tensor.as_strided((numbers,), (1,), 0)


def _covers_its_memory(tensor: torch.Tensor) -> bool:
    return tensor.numel() * tensor.dtype.itemsize == tensor.untyped_storage().nbytes() and not any(
        stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
    )


def _to_meta(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor) and not leaf.is_meta and leaf.dim() > 0:
        return leaf.to("meta")
    return None if isinstance(leaf, torch.Generator) else leaf


def _only_fills(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether nothing is to be done on meta, where torch draws in Python and takes ten times as long as for others."""
    if func is torch.ops.aten.normal_.default:
        std: float = args[2] if len(args) > 2 else kwargs.get("std", 1.0)
        return std >= 0 and (args[0].is_floating_point() or args[0].is_complex())
    return func is torch.ops.aten.uniform_.default and args[0].is_floating_point()


def _named_arguments(operator: Any, args: Any, kwargs: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    yield from zip(argument_names(operator), args, strict=False)
    yield from kwargs.items()


def _seed(seed: int, index: int) -> int:
    """A 63-bit seed for the random operation number `index`; far apart for neighbouring seeds and indices."""
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
