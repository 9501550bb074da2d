"""Experts of a mixture divided among the ranks of mp, which all have the same tokens."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from autolaunch_strategies.config import ConfigError
from autolaunch_strategies.tensor.expert_arguments import ExpertArguments
from autolaunch_strategies.tensor.own_experts import made_by_own
from autolaunch_strategies.tensor.styles.base import Region, Style
from autolaunch_strategies.tensor.views import plain
from autolaunch_strategies.tensor.weighted_experts import are_only_multiplied
from autolaunch_strategies.torch_private.tracing import has_no_values


class DivideExperts(Style):
    """Shard parameters [experts, ...] by experts: each rank computes with its own ones, and the results are added up.

    For a module with the attribute `num_experts` that is called with (hidden [T, D], index [T, K], weights [T, K]), as
    the experts of `transformers` are. Right for every layout of what one expert has, since none is cut.
    """

    def sharded_dims(self, module: nn.Module, only: str | None, ranks: int) -> Mapping[str, int]:
        return {key: 0 for key, _ in module.named_parameters(recurse=False)}

    def apply(self, region: Region, name: str, module: nn.Module, only: str | None) -> None:
        experts = module.__dict__.get("num_experts", 0)
        sizes = {len(parameter) for parameter in module.parameters(recurse=False) if parameter.dim()}
        if only is not None or sizes != {experts}:
            raise ConfigError(
                f"mp.plan: {name}: DivideExperts",
                f"{type(module).__name__} is no module with `num_experts` and parameters [experts, ...] alone",
                "modules that hold the experts of a mixture",
            )
        if are_only_multiplied(module, region.model) is False:
            raise ConfigError(
                f"mp.plan: {name}: DivideExperts",
                f"{type(module).__name__} does more with weights than multiply the results of experts by them, or adds "
                "something without a weight",
                "GatherWhenUsed",
                f"'mp.plan={{{name}: GatherWhenUsed}}'",
            )
        for key in self.sharded_dims(module, only, region.mesh.size()):
            region.shard(module, key, Shard(0))
        _Divided(module, experts, region.mesh)


class _Divided:
    """Takes the place of the forward of a module of which each rank has some of the experts."""

    def __init__(self, module: nn.Module, experts: int, mesh: DeviceMesh) -> None:
        each = -(-experts // mesh.size())  # as `Shard` has them
        self.first = each * mesh.get_local_rank()
        self.own = min(each, experts - self.first)
        self.module, self.experts, self.mesh = module, experts, mesh
        forward = module.forward
        self._arguments = ExpertArguments(forward)
        module.forward = functools.wraps(forward)(self)

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        hidden, index, weights, place = self._arguments.read(args, kwargs)
        forward = functools.partial(self._arguments.call, place=place)
        shape, (tokens, chosen) = hidden.shape, index.shape
        rows = _used_in_parts(hidden.reshape(tokens, -1), self.mesh)
        shares = _used_in_parts(weights, self.mesh).flatten()
        numbers = index.flatten() - self.first
        places = self._own_places(numbers)
        made = made_by_own(self.module, forward, self.own, rows[places // chosen], numbers[places], weights)
        weighted = made * shares[places].unsqueeze(-1)
        mixed = weighted.new_zeros((tokens * chosen, rows.shape[1])).index_copy(0, places, weighted)
        return _total(mixed.view(tokens, chosen, -1).sum(dim=1).to(rows.dtype), self.mesh).reshape(shape)

    def _own_places(self, numbers: torch.Tensor) -> torch.Tensor:
        """Which of numbers [T x K], counted from the first expert of this rank, are of experts that it has."""
        if has_no_values(numbers):  # every expert is given as many
            return torch.arange(round(len(numbers) * self.own / self.experts), device=numbers.device)
        return ((numbers >= 0) & (numbers < self.own)).nonzero().squeeze(1)  # the host waits here


def _used_in_parts(tensor: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """What all ranks have and each uses for another part: its gradient is the sum of theirs."""
    replica: Any = DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)
    return replica.to_local(grad_placements=[Partial()])


def _total(part: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    total: torch.Tensor = plain(DTensor.from_local(part, mesh, [Partial()], run_check=False))
    return total
