"""What parameters are while a module is tried out: none so small that it hides what is computed before it.

Many models begin with a branch multiplied by zero (a norm's weight, a gate, a LoRA matrix) or by 1e-5 (a layer scale).
Others begin with small weights, which make what passes through them smaller, and products of such numbers (gated
convolutions) far smaller. Whether positions meet in that branch could not be told from what the module returns.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autolaunch_strategies.torch_private.modes import outside_of_modes
from autolaunch_strategies.torch_private.tracing import has_no_values

SMALL = 1e-2
"""Parameters of which no number is larger are replaced."""
LEAST_GAIN = 0.5
"""Weights that make numbers smaller than that are scaled to keep their size."""


@contextmanager
def no_small_parameters(module: nn.Module) -> Iterator[None]:
    """Within it, small parameters of `module` and its parts are others, once they are used.

    Numbers from 0.05 to 0.15 in size stand for those of parameters near zero; weights, of two dims or more, are as
    large as in a layer that returns numbers of the size that it is given. They are the same on every rank that holds
    the same part of a parameter. They are replaced when the module that has them is called, since `fully_shard` has
    gathered them then, and no parameter is written into.
    """
    generator = torch.Generator().manual_seed(0)
    replaced: list[tuple[nn.Module, str, Any, nn.Parameter]] = []

    def replace(part: nn.Module, _: Any) -> None:
        for name, parameter in part._parameters.items():
            if parameter is None or not parameter.is_floating_point() or parameter.itemsize < 2:
                continue
            if has_no_values(_local(parameter)):
                continue
            with torch.no_grad(), outside_of_modes():
                values = _larger(parameter, generator)
            if values is not None:
                larger = nn.Parameter(values, requires_grad=parameter.requires_grad)
                part._parameters[name] = larger
                replaced.append((part, name, parameter, larger))

    hooks = [part.register_forward_pre_hook(replace) for part in module.modules()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for part, name, parameter, larger in reversed(replaced):
            if part._parameters[name] is larger:  # not if whoever gathers it has put another one there
                part._parameters[name] = parameter


def _larger(parameter: torch.Tensor, generator: torch.Generator) -> torch.Tensor | None:
    """Numbers in the place of those of `parameter`, laid out as it is; None if it is not small."""
    local = _local(parameter).detach()
    if local.numel() == 0:
        return None
    values = local
    if bool(local.abs().max() <= SMALL):
        signed = torch.rand(local.shape, generator=generator) - 0.5
        values = (0.2 * signed + 0.05 * signed.sign()).to(local)
    if local.dim() > 1:
        gain = float(values.float().square().mean().sqrt()) * math.sqrt(math.prod(parameter.shape[1:]))
        if gain < LEAST_GAIN:
            values = values / gain
    if values is local:
        return None
    if not isinstance(parameter, DTensor):
        return values
    return DTensor.from_local(
        values,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _local(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
