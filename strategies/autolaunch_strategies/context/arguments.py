"""The arguments of a call as a flat list, and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten


@dataclass(frozen=True)
class Form:
    """How a call was written: equal ones have equal places for what they are given."""

    places: int
    """How many arguments stand without a name."""
    names: tuple[str, ...]
    nesting: str = ""
    """What holds tensors within arguments, if anything does."""
    spec: Any = field(default=None, compare=False)

    def arguments(self, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """(args, kwargs) of such a call; as many leaves as `flattened` gave."""
        values = leaves if self.spec is None else tree_unflatten(leaves, self.spec)
        return tuple(values[: self.places]), dict(zip(self.names, values[self.places :], strict=True))


def flattened(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Form]:
    """What is in the arguments of a call, within lists, tuples and dicts, too, and how they are written."""
    values, names = [*args, *kwargs.values()], tuple(kwargs)
    if is_simple(args, kwargs):
        return values, Form(len(args), names)
    leaves, spec = tree_flatten(values)
    return leaves, Form(len(args), names, str(spec), spec)


def is_simple(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether nothing is in any of the arguments of a call."""
    return all(isinstance(item, _SIMPLE) for item in (*args, *kwargs.values()))


_SIMPLE = (torch.Tensor, int, float, str, type(None))
"""What most arguments are; nothing is in them."""
