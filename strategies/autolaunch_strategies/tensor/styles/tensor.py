"""Column-wise and row-wise layers (Megatron-LM, arXiv 1909.08053), with Paddle's names and arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from autolaunch_strategies.config import ConfigError
from autolaunch_strategies.plan.layers import column_dim, is_convolution, is_linear, row_dim
from autolaunch_strategies.tensor.styles.base import (
    Region,
    Style,
    change_first_input,
    change_first_output,
    gather_while_it_runs,
)
from autolaunch_strategies.tensor.views import plain


class ColWiseParallel(Style):
    """Shard a layer by its outputs: each rank computes some of the last dim of the output.

    Linear, Embedding, Conv1D, a convolution (by its channels), or one parameter that the rule names: 1-D parameters are
    sharded along their dim, others along their outputs (of a module that is none of these: dim 1, as Paddle does, or
    `shard_dim`).

    Args:
        gather_output: make the output whole again.
        shard_dim: the dim along which a raw parameter is sharded.
    """

    def __init__(self, gather_output: bool = False, shard_dim: int | None = None) -> None:
        self.gather_output, self.shard_dim = gather_output, shard_dim

    def sharded_dims(self, module: nn.Module, only: str | None, ranks: int) -> Mapping[str, int]:
        return {
            key: column_dim(module, parameter) if self.shard_dim is None else self.shard_dim
            for key, parameter in _usual(module, only, ("weight", "bias")).items()
        }

    def apply(self, region: Region, name: str, module: nn.Module, only: str | None) -> None:
        for parameter_name, parameter in _usual(module, only, ("weight", "bias")).items():
            if parameter.dim() not in (1, 2) and not is_convolution(module):
                raise ConfigError(
                    f"mp.plan: {name}.{parameter_name}: ColWiseParallel",
                    f"a parameter of {parameter.dim()} dims",
                    "parameters of 1 or 2 dims",
                )
        placed = []
        for parameter_name, dim in self.sharded_dims(module, only, region.mesh.size()).items():
            if region.shard(module, parameter_name, Shard(dim)):
                placed.append(parameter_name)
        needs_whole_input = is_linear(module) or bool(placed)
        if needs_whole_input and not isinstance(module, nn.Embedding) and not is_convolution(module):
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

    def sharded_dims(self, module: nn.Module, only: str | None, ranks: int) -> Mapping[str, int]:
        return {key: row_dim(module, parameter) for key, parameter in _usual(module, only, ("weight",)).items()}

    def apply(self, region: Region, name: str, module: nn.Module, only: str | None) -> None:
        for parameter_name, parameter in _usual(module, only, ("weight",)).items():
            if parameter.dim() != 2:
                raise ConfigError(
                    f"mp.plan: {name}.{parameter_name}: RowWiseParallel",
                    f"a parameter of {parameter.dim()} dims",
                    "parameters of 2 dims",
                )
        for parameter_name, dim in self.sharded_dims(module, only, region.mesh.size()).items():
            region.shard(module, parameter_name, Shard(dim))
        if not isinstance(module, nn.Embedding):
            change_first_input(module, lambda tensor: _sharded(region, tensor))
        returns_to_sequence = any(
            name == outer or name.startswith(f"{outer}.") for outer in region.sequence_parallel_within
        )
        if not returns_to_sequence:
            change_first_output(module, plain)


class GatherWhenUsed(Style):
    """Shard parameters that nothing is known of, and have them whole while their module runs.

    Saves the memory of parameters, gradients and optimizer state; every rank does all of the work.

    Args:
        parameters: names in the module, of its own parameters or of those below it (``out_proj.weight``). None: all
            with two dims or more.
    """

    def __init__(self, parameters: Sequence[str] | None = None) -> None:
        self.parameters = parameters

    def sharded_dims(self, module: nn.Module, only: str | None, ranks: int) -> Mapping[str, int]:
        matrices = {key: parameter for key, parameter in module.named_parameters() if parameter.dim() > 1}
        chosen = list(matrices) if self.parameters is None else self.parameters
        return {key: _roomiest_dim(module.get_parameter(key).shape, ranks) for key in ([only] if only else chosen)}

    def apply(self, region: Region, name: str, module: nn.Module, only: str | None) -> None:
        try:
            dims = self.sharded_dims(module, only, region.mesh.size())
        except AttributeError as error:
            known = ", ".join(key for key, _ in module.named_parameters())
            raise ConfigError(f"mp.plan: {name}: GatherWhenUsed: parameters", str(error), known) from None
        placed = []
        for path, dim in dims.items():
            owner, _, own = path.rpartition(".")
            holder = module.get_submodule(owner)
            if region.shard(holder, own, Shard(dim)):
                placed.append((holder, own))
        if placed:
            gather_while_it_runs(module, placed)


def _roomiest_dim(shape: Sequence[int], ranks: int) -> int:
    """The first dim that divides among `ranks`, or the largest."""
    even = [dim for dim, size in enumerate(shape) if size % ranks == 0]
    return even[0] if even else max(range(len(shape)), key=lambda dim: shape[dim])


def _usual(module: nn.Module, only: str | None, names: tuple[str, ...]) -> dict[str, nn.Parameter]:
    """The parameter that a rule names, or those of `names` that the module has."""
    own = module._parameters
    return {key: value for key in (names if only is None else (only,)) if (value := own.get(key)) is not None}


def _whole(region: Region, tensor: torch.Tensor) -> DTensor:
    distributed = region.replicate(tensor)
    whole = distributed.placements[0].is_replicate()
    return distributed if whole else distributed.redistribute(placements=[Replicate()])


def _sharded(region: Region, tensor: torch.Tensor) -> DTensor:
    distributed = region.replicate(tensor)
    wanted: Any = Shard(tensor.dim() - 1)
    return distributed if distributed.placements[0] == wanted else distributed.redistribute(placements=[wanted])
