"""Tensors among the arguments and outputs of modules, and labels on their memory."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import Any, Generic, TypeVar

import torch
from torch.utils._pytree import tree_flatten

from autolaunch_strategies.torch_private.tracing import storage_key

Label = TypeVar("Label", bound=Hashable)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors among the leaves of nested arguments or outputs, in order."""
    return [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, torch.Tensor)]


def first_input(args: Any, kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """The tensor among a module's arguments that styles change: as `styles.base.change_first_input`."""
    positional = next((value for value in args if isinstance(value, torch.Tensor)), None)
    if positional is not None:
        return positional
    tensors = [value for value in kwargs.values() if isinstance(value, torch.Tensor)]
    return next((value for value in tensors if value.is_floating_point()), tensors[0] if tensors else None)


def first_output(value: Any) -> torch.Tensor | None:
    """The tensor in a module's output that styles change: as `styles.base.change_first_output`."""
    if isinstance(value, torch.Tensor):
        return value
    values = value.values() if isinstance(value, Mapping) else value if isinstance(value, tuple | list) else ()
    return next((item for item in values if isinstance(item, torch.Tensor)), None)


_NONE: frozenset[Any] = frozenset()


class Labels(Generic[Label]):
    """Labels on the memory of tensors: all tensors that share memory have the same.

    Labelled memory is kept alive: the key of memory that is freed may be that of other memory later.
    """

    def __init__(self) -> None:
        self._labels: dict[int, frozenset[Label]] = {}
        self._alive: dict[int, torch.Tensor] = {}

    def of(self, *tensors: torch.Tensor) -> frozenset[Label]:
        """The labels of all `tensors` together."""
        return self.at([storage_key(tensor) for tensor in tensors])

    def at(self, keys: Iterable[int]) -> frozenset[Label]:
        """The same of memory by its keys."""
        known = [self._labels[key] for key in keys if key in self._labels]
        return known[0] if len(known) == 1 else _NONE.union(*known)

    def put(self, tensor: torch.Tensor, labels: Iterable[Label]) -> None:
        """Give the memory of `tensor` these labels instead of those that it has."""
        key = storage_key(tensor)
        self._labels[key] = frozenset(labels)
        self._alive.setdefault(key, tensor)

    def add(self, tensor: torch.Tensor, labels: frozenset[Label]) -> None:
        """Give the memory of `tensor` these labels, next to those that it has."""
        if labels:
            self.put(tensor, labels | self.of(tensor))
