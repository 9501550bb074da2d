"""Column-wise and row-wise layers (Megatron-LM, arXiv 1909.08053), with Paddle's names and arguments."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from autolaunch_strategies.config import ConfigError
from autolaunch_strategies.tensor.styles.base import Region, Style, change_first_input, change_first_output
from autolaunch_strategies.tensor.views import plain


def _is_conv1d(module: nn.Module) -> bool:
    """`transformers`' Conv1D: a linear layer whose weight is [in, out]."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def column_dim(module: nn.Module, parameter: torch.Tensor) -> int:
    """The dim of a parameter that runs along the outputs of its module."""
    if parameter.dim() == 1:
        return 0
    if isinstance(module, nn.Linear):  # parameters beside the weight (LoRA) may be laid out either way
        return 1 if parameter.shape[1] == module.out_features != parameter.shape[0] else 0
    return 1


def row_dim(module: nn.Module, parameter: torch.Tensor) -> int:
    """The dim of a 2-D parameter that runs along the inputs of its module."""
    if isinstance(module, nn.Linear):
        return 0 if parameter.shape[0] == module.in_features != parameter.shape[1] else 1
    return 0


class ColWiseParallel(Style):
    """Shard a layer by its outputs: each rank computes some of the last dim of the output.

    Linear, Embedding, Conv1D, or one parameter that the rule names: 1-D parameters are sharded along their dim, 2-D
    ones along their outputs (of a module that is none of these: dim 1, as Paddle does, or `shard_dim`).

    Args:
        gather_output: make the output whole again.
        shard_dim: the dim along which a raw parameter is sharded.
    """

    def __init__(self, gather_output: bool = False, shard_dim: int | None = None) -> None:
        self.gather_output, self.shard_dim = gather_output, shard_dim

    def apply(self, region: Region, name: str, module: nn.Module, only: str | None) -> None:
        placed = []
        for parameter_name in _usual(module, only, ("weight", "bias")):
            parameter = module._parameters[parameter_name]
            assert parameter is not None
            if parameter.dim() not in (1, 2):
                raise ConfigError(
                    f"mp.plan: {name}.{parameter_name}: ColWiseParallel",
                    f"a parameter of {parameter.dim()} dims",
                    "parameters of 1 or 2 dims",
                )
            dim = self.shard_dim if self.shard_dim is not None else column_dim(module, parameter)
            if region.shard(module, parameter_name, Shard(dim)):
                placed.append(parameter_name)
        if isinstance(module, nn.Embedding | nn.Linear) or _is_conv1d(module):
            if not isinstance(module, nn.Embedding):
                change_first_input(module, lambda tensor: _whole(region, tensor))
        elif placed:
            change_first_input(module, lambda tensor: _whole(region, tensor))
        if self.gather_output:
            change_first_output(module, plain)


class RowWiseParallel(Style):
    """Shard a layer by its inputs: each rank uses some of the last dim of the input, and the results are added up.

    Linear, Conv1D and Embedding (by the vocabulary), or one 2-D parameter that the rule names. A bias is whole on every
    rank and added once.

    Args:
        is_input_parallel: the input is sharded already, by a column-wise layer before.
    """

    def __init__(self, is_input_parallel: bool = True) -> None:
        self.is_input_parallel = is_input_parallel

    def apply(self, region: Region, name: str, module: nn.Module, only: str | None) -> None:
        for parameter_name in _usual(module, only, ("weight",)):
            parameter = module._parameters[parameter_name]
            assert parameter is not None
            if parameter.dim() != 2:
                raise ConfigError(
                    f"mp.plan: {name}.{parameter_name}: RowWiseParallel",
                    f"a parameter of {parameter.dim()} dims",
                    "parameters of 2 dims",
                )
            region.shard(module, parameter_name, Shard(row_dim(module, parameter)))
        if not isinstance(module, nn.Embedding):
            change_first_input(module, lambda tensor: _sharded(region, tensor))
        returns_to_sequence = any(
            name == outer or name.startswith(f"{outer}.") for outer in region.sequence_parallel_within
        )
        if not returns_to_sequence:
            change_first_output(module, plain)


def _usual(module: nn.Module, only: str | None, names: tuple[str, ...]) -> list[str]:
    if only is not None:
        return [only]
    return [name for name in names if module._parameters.get(name) is not None]


def _whole(region: Region, tensor: torch.Tensor) -> DTensor:
    distributed = region.replicate(tensor)
    whole = distributed.placements[0].is_replicate()
    return distributed if whole else distributed.redistribute(placements=[Replicate()])


def _sharded(region: Region, tensor: torch.Tensor) -> DTensor:
    distributed = region.replicate(tensor)
    wanted: Any = Shard(tensor.dim() - 1)
    return distributed if distributed.placements[0] == wanted else distributed.redistribute(placements=[wanted])
