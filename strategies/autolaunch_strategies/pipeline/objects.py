"""Dataclasses that hold tensors, as containers: what they hold is cut, sent and differentiated like that of a dict."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import SUPPORTED_NODES, TreeSpec, register_pytree_node, tree_flatten

from autolaunch_strategies.torch_private.trees import children_of, flattened


def open_dataclasses(value: Any) -> None:
    """Let pytrees look into the classes of dataclasses in `value` that hold tensors, from now on."""
    is_new = True
    while is_new:
        is_new = False
        for leaf in flattened(value)[0]:
            if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type) and _holds_tensors(leaf):
                is_new |= _open(type(leaf))


def open_dataclasses_of(spec: TreeSpec) -> None:
    """The same for a spec that another rank made."""
    kind: Any = spec.type
    if dataclasses.is_dataclass(kind):
        _open(kind)
    for child in children_of(spec):
        open_dataclasses_of(child)


def _holds_tensors(leaf: Any) -> bool:
    if isinstance(leaf, torch.Tensor | nn.Module):
        return False
    values = tree_flatten([getattr(leaf, field.name, None) for field in dataclasses.fields(leaf)])[0]
    return any(isinstance(value, torch.Tensor) for value in values)


def _open(kind: Any) -> bool:
    if kind in SUPPORTED_NODES:
        return False
    names = [field.name for field in dataclasses.fields(kind)]

    def flatten(item: Any) -> tuple[list[Any], None]:
        return [getattr(item, name) for name in names], None

    def unflatten(values: Any, context: None) -> Any:
        item: Any = object.__new__(kind)  # as it was: its constructor may take other arguments than its fields
        for name, value in zip(names, values, strict=True):
            object.__setattr__(item, name, value)
        return item

    register_pytree_node(kind, flatten, unflatten)
    return True
