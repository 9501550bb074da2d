"""Finds where the host would wait for a GPU, on a machine that has none."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
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
_WAITING_FUNCTIONS = {torch.Tensor.tolist, torch.Tensor.numpy}
"""What does not come by the dispatcher."""


class HostReads:
    """Collects, from `begin` to `end`, the places in the code where a value is read by the host, or copied from it.

    A place is ``directory/file:function``, of the innermost frame of this project or of lightning; ``torch.optim``
    where an optimizer's own code is inside of it. What is in the host's own memory on every machine is found as well.
    """

    def __init__(self) -> None:
        self.found: Counter[str] = Counter()
        """Place -> how often."""
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
        self.found[_place(sys._getframe(2))] += 1


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
        file, function = frame.f_code.co_filename, frame.f_code.co_name
        if "/torch/optim/" in file:
            return "torch.optim"
        # An environment may lie in the clone, or beside it under a name that begins as its does.
        is_ours = file.startswith(f"{ROOT}/") and "/site-packages/" not in file and file != __file__
        if (is_ours or "/lightning/" in file) and not function.startswith(("__torch_", "<")):
            return f"{'/'.join(Path(file).parts[-2:])}:{function}"
        frame = frame.f_back
    return "elsewhere"
