"""How torch spells its functions: one name is a function, a method, one that works in place, and an operator."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch
from torch.nn import functional as F

_SPACES = (torch, torch.Tensor, F, torch.special, torch.linalg, torch._C._nn, torch._C._VariableFunctions)
_BINARY = "add sub mul truediv div floordiv mod pow and or xor lshift rshift"
_UNARY_AND_COMPARING = "neg pos abs invert eq ne lt le gt ge"
_AUGMENTED = frozenset(f"__i{name}__" for name in _BINARY.split())


def spelled(names: str, spaces: tuple[Any, ...] = _SPACES) -> Iterator[Any]:
    """The functions and methods of these names, wherever torch has them."""
    for name in names.split():
        for space in spaces:
            function = getattr(space, name, None)
            if callable(function):
                yield function


def in_place(names: str) -> Iterator[Any]:
    """Those of them that change their first argument."""
    yield from spelled(" ".join(f"{name}_" for name in names.split() if not name.endswith("_")))


def operators() -> Iterator[Any]:
    """What Python's operators call, but for `@` and `[]`."""
    names = [f"{side}{name}" for name in _BINARY.split() for side in ("", "r", "i")] + _UNARY_AND_COMPARING.split()
    yield from spelled(" ".join(f"__{name}__" for name in names), (torch.Tensor,))


def getters(names: str, access: str = "__get__") -> Iterator[Any]:
    """What reads (or sets) these attributes of a tensor, as far as this torch has them."""
    for name in names.split():
        if hasattr(torch.Tensor, name):
            yield getattr(getattr(torch.Tensor, name), access)


@lru_cache(maxsize=1024)
def changes_first(func: Any) -> bool:
    """Whether it changes its first argument in place."""
    name = getattr(func, "__name__", "")
    return name in _AUGMENTED or name in ("__setitem__", "__set__") or (name.endswith("_") and not name.endswith("__"))
