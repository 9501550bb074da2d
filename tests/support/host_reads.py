"""Finds where the host would wait for a GPU, on a machine that has none."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests import ROOT

_aten = torch.ops.aten
_WAITING = {
    _aten._local_scalar_dense.default,  # item(), bool(), float(), int(), use as an index
    _aten.nonzero.default,  # and what else has as many elements as the values say
    _aten.masked_select.default,
    _aten._unique2.default,
    _aten.lift_fresh.default,  # torch.tensor(data, device=...) copies from memory that is not pinned
}
_WAITING_FUNCTIONS = {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.new_tensor}
"""What does not come by the dispatcher."""


class HostReads:
    """Collects, from `begin` to `end`, the places in the code where a value is read by the host, or copied from it.

    A place is ``file:function``, of the innermost frame that is not torch's or this file's; where the optimizer's own
    code is in between, it is ``torch.optim``.

    Args:
        allowed: tells of a place whether what it reads is in the host's own memory on every machine.
    """

    def __init__(self, allowed: Callable[[str], bool]) -> None:
        self.found: dict[str, int] = {}
        """Place -> how often."""
        self._allowed = allowed
        self._modes: tuple[Any, ...] = ()

    @property
    def runs(self) -> bool:
        """Whether it has begun and not ended."""
        return bool(self._modes)

    def begin(self) -> None:
        """What runs from here on is watched."""
        self._modes = (_Dispatched(self), _Called(self))
        for mode in self._modes:
            mode.__enter__()

    def end(self) -> None:
        """Up to here; does nothing where nothing has begun."""
        for mode in reversed(self._modes):
            mode.__exit__(None, None, None)
        self._modes = ()

    def note(self) -> None:
        """The present place reads."""
        place = _place(sys._getframe(2))
        if not self._allowed(place):
            self.found[place] = self.found.get(place, 0) + 1


class _Dispatched(TorchDispatchMode):
    def __init__(self, reads: HostReads) -> None:
        super().__init__()
        self.reads = reads

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        by_mask = func is _aten.index.Tensor and any(i is not None and i.dtype == torch.bool for i in args[1])
        if func in _WAITING or by_mask:
            self.reads.note()
        return func(*args, **(kwargs or {}))


class _Called(TorchFunctionMode):
    def __init__(self, reads: HostReads) -> None:
        super().__init__()
        self.reads = reads

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _WAITING_FUNCTIONS:
            self.reads.note()
        return func(*args, **(kwargs or {}))


def _place(frame: FrameType | None) -> str:
    while frame is not None:
        file = frame.f_code.co_filename
        if "/torch/optim/" in file:
            return "torch.optim"
        if file.startswith(str(ROOT)) and file != __file__:
            return f"{file.removeprefix(f'{ROOT}/').split('/', 2)[-1]}:{frame.f_code.co_name}"
        if "/lightning/" in file:
            return f"lightning{file.rpartition('/lightning')[2]}:{frame.f_code.co_name}"
        frame = frame.f_back
    return "nowhere"
