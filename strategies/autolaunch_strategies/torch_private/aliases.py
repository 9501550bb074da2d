"""Views: what a tensor is a view of, as autograd knows it, and whether memory is shared, which for DTensors differs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

Replay = Callable[[torch.Tensor], torch.Tensor]
"""Makes of what a tensor is a view of, or of a whole plain tensor in its place, the view."""

TensorKeys = WeakIdKeyDictionary
"""A dictionary whose keys are tensors, as long as they live."""


def viewed(tensor: torch.Tensor) -> tuple[torch.Tensor, Replay] | None:
    """What autograd takes `tensor` for a view of, and how it is made of that; None if it is no view."""
    if not tensor._is_view() or tensor._base is None:
        return None
    return tensor._base, tensor._view_func_unsafe


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor, unknown to autograd: writes into it are writes into the tensor."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor.detach()


def share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether what this rank holds of two tensors is in one storage."""
    storages = (own_part(item).untyped_storage()._cdata for item in (one, other))
    return next(storages) == next(storages)
