"""A backward pass in two parts: first the gradients that other stages wait for, the weights' own later.

Zero-bubble schedules (arXiv 2401.10241) fill idle time with the gradients of weights. Here the linear layers of a stage
keep what these gradients are made of, input and output gradient, until they are asked for; everything else is computed
at once. Nothing of the autograd graph has to be kept or walked, and recomputed activations are computed once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode


class WeightGradients:
    """Gradients of weights that have been put off, by the part of the work that they belong to."""

    def __init__(self) -> None:
        self.put_off = False
        """Whether a backward pass that runs now leaves weights for later."""
        self._waiting: list[tuple[nn.Parameter, torch.Tensor, torch.Tensor]] = []

    def take(self) -> list[tuple[nn.Parameter, torch.Tensor, torch.Tensor]]:
        """What has been put off since the last time."""
        waiting, self._waiting = self._waiting, []
        return waiting

    def keep(self, weight: nn.Parameter, activation: torch.Tensor, gradient: torch.Tensor) -> None:
        """Put off the gradient of `weight` [out, in] at input [..., in] and output gradient [..., out]."""
        self._waiting.append((weight, activation, gradient))


def add_weight_gradients(waiting: list[tuple[nn.Parameter, torch.Tensor, torch.Tensor]]) -> None:
    """Compute gradients that were put off and add them to their weights, as a backward pass would, hooks included."""
    for weight, activation, gradient in waiting:
        torch.autograd.backward(weight.view_as(weight), _weight_gradient(weight, activation, gradient))


class PutOffWeights(TorchFunctionMode):
    """While it is active, linear layers can put off the gradients of their weights."""

    def __init__(self, gradients: WeightGradients) -> None:
        super().__init__()
        self.gradients = gradients

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.linear or not torch.is_grad_enabled():
            return func(*args, **kwargs)
        named = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
        activation, weight, bias = named["input"], named["weight"], named.get("bias")
        trained = isinstance(weight, nn.Parameter) and weight.requires_grad and weight.dim() == 2
        if not (trained and activation.requires_grad):
            return func(*args, **kwargs)
        output = _Linear.apply(activation, weight, self.gradients)
        return output if bias is None else output + bias.to(output.dtype)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any, activation: torch.Tensor, weight: nn.Parameter, gradients: WeightGradients
    ) -> torch.Tensor:
        kind = activation.device.type
        if torch.is_autocast_enabled(kind):
            activation = activation.to(torch.get_autocast_dtype(kind))
        context.save_for_backward(activation, weight)
        context.gradients, context.weight = gradients, weight
        return F.linear(activation, weight.to(activation.dtype))

    @staticmethod
    def backward(context: Any, *output_gradients: torch.Tensor) -> Any:
        (gradient,) = output_gradients
        activation, weight = context.saved_tensors
        to_input = gradient.matmul(weight.to(gradient.dtype)) if context.needs_input_grad[0] else None
        if not context.needs_input_grad[1]:
            return to_input, None, None
        if context.gradients.put_off:
            context.gradients.keep(context.weight, activation.detach(), gradient.detach())
            return to_input, None, None
        return to_input, _weight_gradient(weight, activation, gradient), None


@torch.no_grad()
def _weight_gradient(weight: torch.Tensor, activation: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    if gradient.dim() == 1:
        return torch.outer(gradient, activation).to(weight.dtype)
    return gradient.flatten(0, -2).mT.matmul(activation.flatten(0, -2)).to(weight.dtype)
