"""Frozen linear layers in four bits, as bitsandbytes computes them, on any mesh along dp, pp and cp.

bitsandbytes' own layer quantises when it is moved to a device and keeps what it needs for it in attributes of a tensor:
neither outlives construction on meta, nor sharding. Here the packed bits and the scales of their blocks are two frozen
parameters of the layer's floating type, so that they are computed from the files, moved and sharded like all others.
As bytes, sharded training would lose them without a word.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn

from autolaunch_strategies.config import ConfigError

BLOCK = 64
"""Weights that share a scale."""


class FourBitLinear(nn.Linear):
    """What `layer` computes, with a weight of four bits.

    Args:
        layer: on any device, or recorded on meta; its weight is read and left as it is.
        quant_type: `nf4` or `fp4`.
    """

    def __init__(self, layer: nn.Linear, quant_type: str) -> None:
        from bitsandbytes.functional import quantize_4bit

        nn.Module.__init__(self)
        self.in_features, self.out_features, self.quant_type = layer.in_features, layer.out_features, quant_type
        weight = layer.weight.detach()
        packed, state = quantize_4bit(weight, blocksize=BLOCK, quant_type=quant_type, quant_storage=weight.dtype)
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.absmax = nn.Parameter(state.absmax.view(weight.dtype), requires_grad=False)
        # What these hold are no numbers of the model, see `count_parameters`.
        self.weight.packs, self.absmax.packs = weight.numel(), 0  # type: ignore[attr-defined]  # read by `count_parameters`
        self.bias = layer.bias
        self.training = layer.training

    def forward(self, input: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features], in the type of `input`, or that of autocast."""
        from bitsandbytes import matmul_4bit
        from bitsandbytes.functional import QuantState

        kind = input.device.type
        if torch.is_autocast_enabled(kind):
            input = input.to(torch.get_autocast_dtype(kind))
        shape = torch.Size((self.out_features, self.in_features))
        scales = self.absmax.view(torch.float32)
        state = QuantState(scales, shape, blocksize=BLOCK, quant_type=self.quant_type, dtype=input.dtype)
        return matmul_4bit(input, self.weight, state, bias=None if self.bias is None else self.bias.to(input.dtype))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FourBitLinear:
        """Leave types alone: what is stored are bits, of which a conversion of numbers would make others."""

        def moved(tensor: Tensor) -> Tensor:
            result = fn(tensor)
            return result if result.dtype == tensor.dtype else tensor.to(result.device)

        return super()._apply(moved, recurse)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, quant_type={self.quant_type}"


def quantise_linear_layers(model: nn.Module, quant_type: str, kept: Collection[str] = ()) -> dict[str, Tensor]:
    """Put `FourBitLinear` in the place of each linear layer of `model` but the one that gives logits.

    A layer whose weight another module has, too, stays as it is.

    Args:
        quant_type: `nf4` or `fp4`.
        kept: names of modules that stay as they are, with all that is in them.

    Returns:
        Name of each weight that is gone -> the weight.

    Raises:
        ConfigError: there is none, or one whose numbers do not fill the type that they are stored in.
    """
    uses: dict[int, int] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            uses[id(parameter)] = uses.get(id(parameter), 0) + 1
    replaced: dict[str, Tensor] = {}
    for name in linear_layers(model):
        layer = model.get_submodule(name)
        if type(layer) is not nn.Linear or uses[id(layer.weight)] > 1 or _is_within(name, kept):
            continue
        weight = layer.weight
        if weight.numel() % (2 * weight.dtype.itemsize):
            raise ConfigError(
                "adapter=qlora",
                f"{name} has {weight.numel()} weights, which with four bits each do not fill numbers of {weight.dtype}",
                "layers whose weights are a multiple of 8",
                "adapter=lora",
            )
        parent, _, key = name.rpartition(".")
        setattr(model.get_submodule(parent), key, FourBitLinear(layer, quant_type))
        replaced[f"{name}.weight"] = weight
    if not replaced:
        raise ConfigError(
            "adapter=qlora",
            f"{type(model).__name__} has no layer of torch.nn.Linear that could have four bits",
            "adapter=lora",
            "adapter=lora",
        )
    return replaced


def _is_within(name: str, modules: Collection[str]) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def linear_layers(model: nn.Module) -> list[str]:
    """The names of all linear layers but the one that gives logits."""
    from transformers.pytorch_utils import Conv1D

    ask: Any = getattr(model, "get_output_embeddings", None)
    head = None if ask is None else ask()
    head = getattr(model, "lm_head", None) if head is None else head
    modules = model.named_modules()
    return [name for name, module in modules if name and isinstance(module, nn.Linear | Conv1D) and module is not head]
