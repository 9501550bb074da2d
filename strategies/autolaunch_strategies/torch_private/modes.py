"""Function and dispatch modes: which are active, and how to leave them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FunctionType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


def is_active(mode: TorchFunctionMode) -> bool:
    """Whether calls of torch functions go through `mode` right now."""
    return any(active is mode for active in torch.overrides._get_current_function_mode_stack())


def is_innermost(mode: TorchFunctionMode) -> bool:
    """Whether `mode` is the first that calls of torch functions go through right now."""
    active = torch.overrides._get_current_function_mode_stack()
    return bool(active) and active[-1] is mode


def push_mode(mode: TorchFunctionMode) -> None:
    """Let calls of torch functions go through `mode` first, until `pop_mode`."""
    torch.overrides._push_mode(mode)


def pop_mode() -> None:
    """Leave the innermost function mode."""
    torch.overrides._pop_mode()


_PLACE_OF_INPLACE = {
    function: list(parameters).index("inplace")
    for function in vars(torch.nn.functional).values()
    if isinstance(function, FunctionType)
    and "inplace" in (parameters := inspect.signature(function, follow_wrapped=False).parameters)
}
"""Functions that change their first argument if they are asked to -> the place of the argument that asks."""


def changes_first(func: Any, args: Any = (), kwargs: Any = None) -> bool:
    """Whether a torch function changes its first argument in place: by its name, or asked to (`inplace=True`).

    Plain code: compilers trace it.
    """
    name = getattr(func, "__name__", "")
    if name == "__setitem__" or (name.endswith("_") and not name.endswith("__")):
        return True
    if name.startswith("__i"):
        return name not in ("__invert__", "__index__", "__int__")
    place = _PLACE_OF_INPLACE.get(func)
    return place is not None and bool(args[place] if len(args) > place else (kwargs or {}).get("inplace"))


@contextmanager
def outside_of_modes() -> Iterator[None]:
    """Within it tensors are made that are kept: real ones, whatever mode (fake, inference, device) is active."""
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.inference_mode(False):
        yield


def without_autocast(device_type: str) -> AbstractContextManager[Any]:
    """Within it operators run in the types of what they are given; costs nothing where they do anyway."""
    return torch.autocast(device_type, enabled=False) if torch.is_autocast_enabled(device_type) else nullcontext()


without_torch_functions = torch._C.DisableTorchFunction
"""A context in which neither function modes nor subclasses of tensors are asked: attributes are those of the object."""
