"""Linear layers of a stage, which see one microbatch after the other: what they keep of each for its backward pass.

A backward pass can have two parts: first the gradients that other stages wait for, those of weights later. Zero-bubble
schedules (arXiv 2401.10241) fill idle time with the latter. The layers keep what these gradients are made of, input and
output gradient, until they are asked for; everything else is computed at once. Nothing of the autograd graph has to be
kept or walked, and recomputed activations are computed once.

Autocast makes a copy of every weight in each call, and autograd keeps it: one for each microbatch in flight. Here there
is one copy for all microbatches of a batch. The numbers are those of autocast, which would copy the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from autolaunch_strategies.sharded_sequence.shard import SequenceShard


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


class Casts:
    """Copies of weights in the type of autocast, each made once for all microbatches of a batch."""

    def __init__(self) -> None:
        self._copies: dict[int, tuple[torch.Tensor, int, torch.Tensor]] = {}

    def of(self, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """`weight` in another type, as it is now; itself if it has that type."""
        if weight.dtype == dtype:
            return weight
        known = self._copies.get(id(weight))
        if known is None or known[0] is not weight or known[1] != weight._version or known[2].dtype != dtype:
            with torch.no_grad():
                known = self._copies[id(weight)] = weight, weight._version, weight.to(dtype)
        return known[2]

    def clear(self) -> None:
        """Forget all."""
        self._copies.clear()


class StageLinears(TorchFunctionMode):
    """While it is active, linear layers cast their weights once, and can put off the gradients of their weights.

    Args:
        puts_off: whether any backward pass is going to have two parts.
    """

    def __init__(self, gradients: WeightGradients, casts: Casts, puts_off: bool) -> None:
        super().__init__()
        self.gradients, self.casts, self.puts_off = gradients, casts, puts_off

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.linear or not torch.is_grad_enabled() or SequenceShard in types:
            return func(*args, **kwargs)
        if torch.compiler.is_compiling():  # a graph decides by itself what it keeps
            return func(*args, **kwargs)
        named = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
        activation, weight, bias = named["input"], named["weight"], named.get("bias")
        if not (isinstance(weight, nn.Parameter) and weight.dim() == 2 and activation.requires_grad):
            return func(*args, **kwargs)
        if not ((self.puts_off and weight.requires_grad) or _is_cast(weight, activation.device.type)):
            return func(*args, **kwargs)
        if isinstance(activation, DTensor) != isinstance(weight, DTensor):
            return func(*args, **kwargs)  # what is whole meets what is sharded: torch tells the gradients apart
        if bias is not None and (isinstance(bias, DTensor) or isinstance(weight, DTensor)):
            # A bias that every rank holds whole has a gradient of its own kind, and not that of the output.
            output = _Linear.apply(activation, weight, None, self.gradients, self.casts)
            return output + bias.to(output.dtype)
        return _Linear.apply(activation, weight, bias, self.gradients, self.casts)


def _is_cast(weight: torch.Tensor, device_type: str) -> bool:
    """Whether autocast makes a copy of a weight."""
    return (
        torch.is_autocast_enabled(device_type)
        and weight.dtype == torch.float32
        and weight.dtype != torch.get_autocast_dtype(device_type)
    )


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any,
        activation: torch.Tensor,
        weight: nn.Parameter,
        bias: torch.Tensor | None,
        gradients: WeightGradients,
        casts: Casts,
    ) -> torch.Tensor:
        kind = activation.device.type
        context.given = activation.dtype
        if torch.is_autocast_enabled(kind):
            activation = activation.to(torch.get_autocast_dtype(kind))
        context.save_for_backward(activation if weight.requires_grad else None, weight)
        context.gradients, context.casts, context.weight = gradients, casts, weight
        context.bias_type = None if bias is None else bias.dtype
        added = bias if bias is None else bias.to(activation.dtype)
        return F.linear(activation, casts.of(weight, activation.dtype), added)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(context: Any, *output_gradients: torch.Tensor) -> Any:
        (gradient,) = output_gradients
        activation, weight = context.saved_tensors
        to_input = to_weight = to_bias = None
        if context.needs_input_grad[0]:
            to_input = gradient.matmul(context.casts.of(context.weight, gradient.dtype)).to(context.given)
        if context.needs_input_grad[2]:
            to_bias = (gradient if gradient.dim() == 1 else gradient.flatten(0, -2).sum(0)).to(context.bias_type)
        if context.needs_input_grad[1]:
            if context.gradients.put_off:
                context.gradients.keep(context.weight, activation.detach(), gradient.detach())
            else:
                to_weight = _weight_gradient(weight, activation, gradient)
        return to_input, to_weight, to_bias, None, None


@torch.no_grad()
def _weight_gradient(weight: torch.Tensor, activation: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    if gradient.dim() == 1:
        return torch.outer(gradient, activation).to(weight.dtype)
    return gradient.flatten(0, -2).mT.matmul(activation.flatten(0, -2)).to(weight.dtype)
