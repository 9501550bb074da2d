"""What blocks save for their backward pass waits in host memory: it leaves after the forward pass and is back in time.

What moves are storages, whole and once each, however many tensors are views of them; what was saved comes back as the
same views. On a GPU they move on a stream of their own, beside the computation of the next block in either direction:
of two blocks at a time the tensors are on the device, those of the block that runs and of the one that leaves or comes.

What stays where it is: parameters, buffers, views and casts of them; what comes into a block and needs no gradient
(masks, positions), since all blocks share it; what is small; and tensors of types that have no storage of their own.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from autolaunch_strategies.model.blocks import Block
from autolaunch_strategies.torch_private.modes import without_torch_functions
from autolaunch_strategies.torch_private.parts import Layout, layout_of, parts_of, with_layout

SMALLEST = 1 << 20
"""Bytes of a storage below which it stays: a copy takes about as long as it takes to start one."""


def apply_offload(blocks: Iterable[Block]) -> None:
    """Let what blocks save for their backward pass wait in host memory."""
    offloads = Offloads()
    for block in blocks:
        forward = block.module.forward
        block.module.forward = functools.wraps(forward)(offloads.around(block.module, forward))


class Offloads:
    """Of the blocks of a rank that run one after another."""

    def __init__(self) -> None:
        self._last: Callable[[], _Pass | None] = lambda: None
        """The forward pass of a block that ran last: its tensors are on the device still."""
        self._lanes: dict[torch.device, _Lane] = {}

    def around(self, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        """What stands in the place of the forward of a block."""

        def run(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            shared = [item for item in tree_leaves((args, kwargs)) if _is_constant(item)]
            now = _Pass(self._lane, _storages([*module.parameters(), *module.buffers(), *shared]), self._last)
            with saved_tensors_hooks(now.pack, _unpack):
                output = forward(*args, **kwargs)
            if (before := self._last()) is not None:
                before.leave()
            self._last = weakref.ref(now)
            return output

        return run

    def _lane(self, device: torch.device) -> _Lane:
        if device not in self._lanes:
            self._lanes[device] = _Lane(device)
        return self._lanes[device]


class _Lane:
    """Copies between a device and the host, in order; on a GPU on a stream of their own, to and from pinned memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._of_device = None if device.type == "cpu" else torch.get_device_module(device)
        self._stream = None if self._of_device is None else self._of_device.Stream(device)

    def out(self, storage: torch.UntypedStorage) -> _Moved:
        """Begin to copy it to the host."""
        device = torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)
        host = torch.empty(len(device), dtype=torch.uint8, pin_memory=self._stream is not None)
        return _Moved(self, host, device, self._copy(device, host))

    def back(self, host: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """(its copy on the device, the event when it is one)."""
        device = torch.empty(len(host), dtype=torch.uint8, device=self._device)
        return device, self._copy(host, device)

    def wait(self, event: Any) -> None:
        """Let what is computed from now on begin after an event."""
        if self._of_device is not None:
            self._of_device.current_stream(self._device).wait_event(event)

    def _copy(self, source: torch.Tensor, target: torch.Tensor) -> Any:
        """Begin once all is done that is computed so far, with the source, or with what was at the target's place."""
        if self._of_device is None:
            target.copy_(source)
            return None
        assert self._stream is not None
        self._stream.wait_stream(self._of_device.current_stream(self._device))
        with self._of_device.stream(self._stream):
            target.copy_(source, non_blocking=True)
        return self._stream.record_event()


@dataclass(eq=False)
class _Moved:
    """A storage, on the host, on the device, or on both."""

    lane: _Lane
    host: torch.Tensor
    device: torch.Tensor | None
    copied: Any
    """The event when the last copy, out or back, is one."""

    def leave(self) -> None:
        """Free what is on the device: what takes its place is computed after the last copy from or to it."""
        if self.device is not None:
            self.lane.wait(self.copied)
            self.device = None

    def come(self) -> None:
        """Begin to copy it back."""
        if self.device is None:
            self.device, self.copied = self.lane.back(self.host)

    def there(self) -> torch.Tensor:
        """Its bytes on the device, for what is computed from now on."""
        self.come()
        assert self.device is not None
        self.lane.wait(self.copied)
        return self.device

    def __del__(self) -> None:
        self.leave()


@dataclass(frozen=True, eq=False)
class _View:
    """What autograd keeps in the place of a tensor."""

    of: _Pass
    storage: _Moved
    dtype: torch.dtype
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]
    layout: Layout | None
    """Of the DTensor of which it is the part; None for what is none."""


@dataclass(eq=False)
class _Pass:
    """One forward pass of one block. It lives as long as something of it is kept for a backward pass."""

    lane: Callable[[torch.device], _Lane]
    staying: set[int]
    """Storages that don't move."""
    before: Callable[[], _Pass | None]
    """The pass that ran before, whose backward pass comes after."""
    moved: dict[tuple[int, int], Callable[[], _Moved | None]] = field(default_factory=dict)
    """Storage and its version -> what became of it, in the order in which they were saved."""
    coming: bool = False

    def pack(self, tensor: torch.Tensor) -> Any:
        """What autograd keeps in the place of a tensor that is saved: the tensor itself, if it stays."""
        with without_torch_functions(), torch.no_grad():
            if _is_of_parameter(tensor):
                return tensor
            layout = layout_of(tensor) if type(tensor) is DTensor else None
            part = tensor if layout is None else parts_of((tensor,))[0]  # type: ignore[arg-type]  # it is a DTensor
            if type(part) is not torch.Tensor or part.layout is not torch.strided or part.is_conj() or part.is_neg():
                return tensor
            storage = part.untyped_storage()
            if storage.nbytes() < SMALLEST or storage._cdata in self.staying:
                return tensor
            key = (storage._cdata, part._version)
            moved = self.moved.get(key, lambda: None)()
            if moved is None:
                moved = self.lane(part.device).out(storage)
                self.moved[key] = weakref.ref(moved)
            return _View(self, moved, part.dtype, int(part.storage_offset()), part.shape, part.stride(), layout)

    def leave(self) -> None:
        """Free what is on the device of it."""
        for moved in self._kept():
            moved.leave()

    def come(self) -> None:
        """Begin to copy back what is needed, in the order in which a backward pass needs it."""
        if not self.coming:
            self.coming = True
            for moved in reversed(self._kept()):
                moved.come()

    def _kept(self) -> list[_Moved]:
        return [moved for reference in self.moved.values() if (moved := reference()) is not None]


def _unpack(kept: Any) -> torch.Tensor:
    if not isinstance(kept, _View):
        return kept
    with without_torch_functions(), torch.no_grad():
        kept.of.come()
        if (before := kept.of.before()) is not None:
            before.come()
        storage = kept.storage.there().untyped_storage()
        part = torch.empty(0, dtype=kept.dtype, device=storage.device)
        part.set_(storage, kept.offset, kept.shape, kept.stride)
        return part if kept.layout is None else with_layout(part, kept.layout)


def _is_constant(item: Any) -> bool:
    return isinstance(item, torch.Tensor) and not item.requires_grad


def _is_of_parameter(tensor: torch.Tensor) -> bool:
    """Whether it is a parameter (a gathered one, too), a view of one, or one in another dtype, as autocast makes it."""
    base = tensor if tensor._base is None else tensor._base
    if isinstance(base, nn.Parameter):
        return True
    function = base.grad_fn
    if function is None or function.name() != "ToCopyBackward0":
        return False
    source = function.next_functions[0][0]
    return source is not None and isinstance(getattr(source, "variable", None), nn.Parameter)


def _storages(tensors: Iterable[torch.Tensor]) -> set[int]:
    with without_torch_functions(), torch.no_grad():
        parts = [parts_of((item,))[0] if type(item) is DTensor else item for item in tensors]
        return {part.untyped_storage()._cdata for part in parts if _has_storage(part)}


def _has_storage(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided
