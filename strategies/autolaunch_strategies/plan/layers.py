"""Layers whose parameters styles know: what their dims mean."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def is_linear(module: nn.Module) -> bool:
    """A linear layer that styles know: torch's, or `transformers`' Conv1D, whose weight is [in, out]."""
    return isinstance(module, nn.Linear) or (type(module).__name__ == "Conv1D" and hasattr(module, "nf"))


def features(module: nn.Module) -> tuple[int, int]:
    """(inputs, outputs) of a linear layer."""
    weight: Any = module.weight
    return (weight.shape[1], weight.shape[0]) if isinstance(module, nn.Linear) else (weight.shape[0], weight.shape[1])


def is_convolution(module: nn.Module) -> bool:
    """A convolution of torch whose outputs can be computed by themselves."""
    if isinstance(module, _TRANSPOSED):
        return module.groups == 1
    return isinstance(module, _CONVOLUTIONS)


def is_layer(module: nn.Module) -> bool:
    """Whether styles know what the dims of its weight mean."""
    return is_linear(module) or is_convolution(module) or isinstance(module, nn.Embedding)


def outputs_of_convolution(module: nn.Module) -> int:
    """How many channels it returns."""
    channels: int = module.out_channels  # type: ignore[assignment]  # torch: a tensor or a module
    return channels


def column_dim(module: nn.Module, parameter: torch.Tensor) -> int:
    """The dim of a parameter that runs along the outputs of its module."""
    if parameter.dim() == 1:
        return 0
    if is_convolution(module):
        return 1 if isinstance(module, _TRANSPOSED) else 0
    if isinstance(module, nn.Linear):  # parameters beside the weight (LoRA) may be laid out either way
        return 1 if parameter.shape[1] == module.out_features != parameter.shape[0] else 0
    return 1


def row_dim(module: nn.Module, parameter: torch.Tensor) -> int:
    """The dim of a 2-D parameter that runs along the inputs of its module."""
    if isinstance(module, nn.Linear):
        return 0 if parameter.shape[0] == module.in_features != parameter.shape[1] else 1
    return 0
