"""Many tensors in one flat one: a single call for all of them, where torch's public functions take one for each."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def flattened(tensors: list[torch.Tensor]) -> torch.Tensor:
    """The numbers of dense tensors of one device, one after the other, in a new 1-D tensor; at least two of them."""
    assert len(tensors) > 1, "of a single one it would be a view"
    return torch._C._nn.flatten_dense_tensors(tensors)


def parts_like(flat: torch.Tensor, tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
    """What `flattened` has put together, as contiguous views in the shapes of `tensors`."""
    return torch._C._nn.unflatten_dense_tensors(flat, tensors)
