"""Functions that are called with the gradient of a tensor, or when it has been added up."""

from __future__ import annotations

import torch

_KINDS = "_backward_hooks", "_post_accumulate_grad_hooks"
"""Of `Tensor.register_hook`, and of `Tensor.register_post_accumulate_grad_hook`."""


def has_gradient_hooks(tensor: torch.Tensor) -> bool:
    """Whether any is there that has not been removed."""
    return any(getattr(tensor, kind) for kind in _KINDS)


def swap_below_hooks(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """As `torch.utils.swap_tensors`, but hooks of `tensor` stay, and can be removed by what they were registered with.

    Torch leaves them in its dicts, and calls none of them any more.
    """
    hooks = {kind: getattr(tensor, kind) for kind in _KINDS}
    torch.utils.swap_tensors(tensor, other)
    for kind, registered in hooks.items():
        if registered:
            setattr(tensor, kind, None)
            setattr(tensor, kind, registered)
