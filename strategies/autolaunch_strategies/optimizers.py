"""An optimizer that was made for a model before the model's parameters were divided."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from autolaunch_strategies._torch import local_index
from autolaunch_strategies.config import ConfigError

log = logging.getLogger(__name__)


def parameter_names(model: nn.Module) -> dict[nn.Parameter, str]:
    """One name of every parameter of `model`, to find what stands in its place later."""
    return {parameter: name for name, parameter in model.named_parameters()}


def check_optimizer(optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str]) -> None:
    """Check that `optimizer` can be parallelised together with the model whose parameters have these names.

    Raises:
        ConfigError: it holds parameters of something else, or treats all parameters as one vector (LBFGS).
    """
    where = f"optimizer={type(optimizer).__name__}"
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigError(where, "it joins all parameters into one vector", "any other optimizer")
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if parameter not in names:
                raise ConfigError(
                    where,
                    f"group {index} has a parameter of shape {tuple(parameter.shape)} that is not the model's",
                    "an optimizer over parameters of the model; put other modules into one model with it",
                )


@torch.no_grad()
def follow_parameters(optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str], model: nn.Module) -> None:
    """Have `optimizer` train the parameters that now stand under the names of the ones it was made with, in place.

    Groups, their options and their order stay, so schedulers bound to the optimizer go on working. State that exists is
    divided as the parameters are, with the values of the first rank. Collective.
    """
    standing = dict(model.named_parameters(remove_duplicate=False))
    for group in optimizer.param_groups:
        before = list(group["params"])
        group["params"][:] = [standing[names[parameter]] for parameter in before]
        for old, new in zip(before, group["params"], strict=True):
            if old in optimizer.state:
                state = optimizer.state.pop(old)
                optimizer.state[new] = {key: _divided(value, old, new) for key, value in state.items()}
    run_per_parameter(optimizer)


def run_per_parameter(optimizer: torch.optim.Optimizer) -> None:
    """Have groups that hold plain and sharded parameters updated one parameter after the other.

    torch's `foreach` and `fused` ways put a whole group into one call, which can't mix them. The numbers are the same.
    """
    for group in optimizer.param_groups:
        kinds = {parameter.device_mesh if isinstance(parameter, DTensor) else None for parameter in group["params"]}
        if len(kinds) < 2:
            continue
        for option in ("foreach", "fused"):
            if option in group:
                if group[option]:
                    log.warning(
                        "optimizer: %s=True is left out for a group with parameters sharded differently", option
                    )
                group[option] = False


def _divided(value: Any, old: torch.Tensor, new: torch.Tensor) -> Any:
    if not isinstance(value, torch.Tensor) or isinstance(value, DTensor) or value.numel() == 1:
        return value
    if dist.get_world_size() > 1:
        dist.broadcast(value, 0)
    if not isinstance(new, DTensor):
        return value
    if value.shape != old.shape:
        return DTensor.from_local(value, new.device_mesh, [Replicate()] * new.device_mesh.ndim, run_check=False)
    local = value[local_index(new)].clone(memory_format=torch.contiguous_format)
    return DTensor.from_local(
        local, new.device_mesh, new.placements, run_check=False, shape=new.shape, stride=new.stride()
    )
