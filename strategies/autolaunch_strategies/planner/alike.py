"""Blocks that are the same but for the values of their parameters, told without running them."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import nn

from autolaunch_strategies.torch_private.calls import HOOKS

_OF_EVERY_MODULE = frozenset(nn.Module().__dict__) | {"_compiled_call_impl"}
"""Attributes that torch gives every module, and the one by which calls of blocks are intercepted."""


def structure(block: nn.Module, sharded: Mapping[str, int | None]) -> Hashable:
    """What two blocks have in common if they run the same on the same arguments: classes, attributes, shapes, sharding.

    Attributes without a value that can be compared count as themselves, so that only blocks that share them are alike.

    Args:
        sharded: dim along which a parameter of the block is sharded.
    """
    return tuple(
        (
            name,
            type(part),
            part.training,
            tuple(len(getattr(part, hooks)) for hooks in HOOKS),
            tuple((key, _comparable(value)) for key, value in part.__dict__.items() if key not in _OF_EVERY_MODULE),
            tuple(
                (key, _comparable(tensor), sharded.get(f"{name}.{key}".lstrip(".")))
                for held in (part._parameters, part._buffers)
                for key, tensor in held.items()
            ),
        )
        for name, part in block.named_modules()
    )


def _comparable(value: Any) -> Hashable:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype, value.device.type, value.requires_grad
    if value is None or isinstance(value, bool | int | float | str | torch.dtype):
        return type(value), value
    if isinstance(value, tuple | list):
        return type(value), tuple(_comparable(item) for item in value)
    return id(value)
