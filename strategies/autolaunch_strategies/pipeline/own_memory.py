"""Gradients with memory of their own.

Autograd may give several leaves one gradient in memory: those of `a` and `b` in `a[None] + b[None]`, for example. What
it adds to one of them in a later pass, in place, then changes the other one, too; a single pass has no later one, but
the microbatches of a batch have.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from autolaunch_strategies.pipeline.transfer import local_part


def cut_off(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` as a leaf that needs a gradient, which is alone in its memory."""
    leaf = tensor.detach().requires_grad_()
    leaf.register_post_accumulate_grad_hook(_copy_gradient)
    return leaf


@torch.no_grad()
def separate_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Copy every gradient that shares memory with that of another one of `parameters`."""
    taken: set[int] = set()
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None or gradient.layout is not torch.strided:
            continue
        memory = local_part(gradient).untyped_storage().data_ptr()
        if memory and memory in taken:  # without numbers it has none
            parameter.grad = gradient.clone()
        taken.add(memory)


def _copy_gradient(leaf: torch.Tensor) -> None:
    assert leaf.grad is not None
    leaf.grad = leaf.grad.clone(memory_format=torch.contiguous_format)
