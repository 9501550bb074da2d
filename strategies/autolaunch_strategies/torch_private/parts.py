"""A DTensor as its layout and the part that this rank holds, at less of the processor's time than `to_local` takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._utils import compute_global_tensor_info

Layout = DTensorSpec
"""What a DTensor is beside the part that this rank holds: mesh, placements, shape, stride and dtype of the whole."""


def layout_of(tensor: DTensor) -> Layout:
    """Not a copy: the same object each time, which compares at once."""
    return tensor._spec


def with_layout(part: torch.Tensor, layout: Layout) -> DTensor:
    """The inverse of `parts_of`. Differentiable."""
    return DTensor.from_local(
        part, layout.mesh, layout.placements, run_check=False, shape=layout.shape, stride=layout.stride
    )


def parts_of(tensors: Sequence[DTensor]) -> tuple[torch.Tensor, ...]:
    """What this rank holds of each, as `to_local` returns it. Differentiable, once.

    One function of all, whose gradients take over the layouts of the tensors instead of working them out.
    """
    return _Parts.apply(*tensors) if tensors else ()


class _Parts(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, *tensors: DTensor) -> tuple[torch.Tensor, ...]:
        context.set_materialize_grads(False)
        context.layouts = [tensor._spec for tensor in tensors]
        parts = tuple(tensor._local_tensor.view_as(tensor._local_tensor) for tensor in tensors)
        context.strides = [part.stride() for part in parts]
        context.mark_non_differentiable(
            *(part for part, needed in zip(parts, context.needs_input_grad, strict=True) if not needed)
        )
        return parts

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(context: Any, *gradients: Any) -> Any:
        return tuple(map(_gradient, gradients, context.layouts, context.strides))


def _gradient(part: torch.Tensor | None, layout: Layout, stride: tuple[int, ...]) -> DTensor | None:
    if part is None:
        return None
    placements = tuple(Replicate() if isinstance(item, Partial) else item for item in layout.placements)
    if part.stride() == stride and placements == layout.placements:
        return DTensor(part, layout, requires_grad=False)  # tensors share layouts, as results of operators do
    _, whole_stride = compute_global_tensor_info(part, layout.mesh, layout.placements)
    return DTensor.from_local(
        part, layout.mesh, placements, run_check=False, shape=layout.shape, stride=tuple(whole_stride)
    )
