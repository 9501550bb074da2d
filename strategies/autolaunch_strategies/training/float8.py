"""Linear layers that multiply in float8, by torchao: in place, so that parameters keep their names and hooks stay."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

import torch
from torch import nn

from autolaunch_strategies.config import ConfigError, check_torchao
from autolaunch_strategies.experts.find import find_routers
from autolaunch_strategies.model.blocks import Block
from autolaunch_strategies.model.linear_weights import CastsWeight

MULTIPLE = 16
"""Of which both sizes of a matrix must be multiples."""


def float8_layers(blocks: Iterable[Block]) -> tuple[dict[str, nn.Linear], dict[str, str]]:
    """(linear layers of blocks that can multiply in float8, why the others can't), by name.

    Embeddings and heads stand outside of the blocks and stay what they are; so do routers and stacked experts.

    Raises:
        ConfigError: torchao is not installed, or there is no such layer.
    """
    check_torchao()
    layers: dict[str, nn.Linear] = {}
    others: dict[str, str] = {}
    for block in blocks:
        routers = find_routers(block.module)
        for name, module in block.module.named_modules(prefix=block.name):
            if not isinstance(module, nn.Linear):
                continue
            reason = "a router" if module in routers else _unfit(module)
            if reason is None:
                layers[name] = module
            else:
                others[name] = reason
    if not layers:
        why = "; ".join(f"{name}: {reason}" for name, reason in list(others.items())[:3])
        raise ConfigError(
            "precision=float8",
            "no linear layer of a block can multiply in float8" + (f" ({why})" if why else ""),
            f"blocks with trained layers of torch.nn.Linear whose sizes are multiples of {MULTIPLE}",
            "precision=bf16-mixed",
        )
    return layers, others


def convert(layers: Mapping[str, nn.Linear], recipe: str, device: torch.device) -> None:
    """Let layers multiply in float8 from now on; their parameters may be on meta, and stay what they are.

    Raises:
        ConfigError: the device has no float8.
    """
    if device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 9):
        raise ConfigError(
            "precision=float8",
            f"{torch.cuda.get_device_name(device)} can't multiply in float8",
            "GPUs of compute capability 8.9 or more (L4, H100, ...)",
            "precision=bf16-mixed",
        )
    from torchao.float8 import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear

    # Gradients of weights are sums over tokens, of which there may be any number.
    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), pad_inner_dim=True)
    kind = _in_type_of_autocast(Float8Linear)
    for layer in layers.values():
        converted = Float8Linear.from_float(layer, config=config)
        layer.__class__ = kind
        for name, value in vars(converted).items():
            vars(layer).setdefault(name, value)


def check_shards(layers: Mapping[str, nn.Linear]) -> None:
    """Refuse layers of which a rank along mp holds a part that can't be multiplied in float8.

    Raises:
        ConfigError: there is one.
    """
    for name, layer in layers.items():
        local: torch.Tensor = getattr(layer.weight, "to_local", lambda layer=layer: layer.weight)()
        if any(size % MULTIPLE for size in local.shape):
            raise ConfigError(
                "precision=float8",
                f"along mp a rank holds {' x '.join(map(str, local.shape))} of {name}, and float8 needs "
                f"multiples of {MULTIPLE}",
                "fewer ranks along mp, or precision=bf16-mixed",
                "precision=bf16-mixed",
            )


def _unfit(layer: nn.Linear) -> str | None:
    """Why a layer can't multiply in float8."""
    if type(layer) is not nn.Linear:
        return f"a {type(layer).__name__}, which multiplies in its own way"
    if layer.in_features % MULTIPLE or layer.out_features % MULTIPLE:
        return f"its sizes, {layer.in_features} and {layer.out_features}, are not multiples of {MULTIPLE}"
    if not layer.weight.requires_grad:
        return "it is frozen, and torchao would compute the gradient of its weight all the same"
    return None


def _in_type_of_autocast(base: type[nn.Linear]) -> type[nn.Linear]:
    """torchao's layer that takes input and weight in the type of autocast, as `nn.Linear` does.

    torchao's own asks for CUDA's autocast alone and casts the input. With the weight, too, a weight that is gathered in
    bf16 gives the numbers of one that is whole.
    """
    from torchao.float8.float8_linear import matmul_with_hp_or_float8_args

    class Float8(CastsWeight, base):  # type: ignore[misc, valid-type]  # a base that is known once torchao is imported
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            kind, weight = input.device.type, self.weight
            if torch.is_autocast_enabled(kind):
                dtype = torch.get_autocast_dtype(kind)
                input, weight = input.to(dtype), weight.to(dtype)
            output = matmul_with_hp_or_float8_args.apply(input, weight.t(), self.linear_mm_config, self.config)
            return output if self.bias is None else output + self.bias.to(output.dtype)

    return Float8
