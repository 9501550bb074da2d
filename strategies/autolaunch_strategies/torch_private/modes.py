"""Function and dispatch modes: which are active, and how to leave them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
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


def changes_first(func: Any, args: Any = (), kwargs: Any = None) -> bool:
    """Whether a torch function changes its first argument in place: by its name, or asked to (`inplace=True`)."""
    by_name, place = _in_place(func)
    if by_name or place is None:
        return by_name
    return bool(args[place] if len(args) > place else (kwargs or {}).get("inplace"))


@lru_cache(maxsize=4096)
def _in_place(func: Any) -> tuple[bool, int | None]:
    """Whether a function's name says that it changes its first argument; the place of the argument that asks it to."""
    name = getattr(func, "__name__", "")
    operator = name.startswith("__i") and hasattr(torch.Tensor, "__" + name[3:])  # __iadd__, but not __invert__
    if operator or name == "__setitem__" or (name.endswith("_") and not name.endswith("__")):
        return True, None
    names = list(inspect.signature(func, follow_wrapped=False).parameters) if isinstance(func, FunctionType) else []
    return False, names.index("inplace") if "inplace" in names else None


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
