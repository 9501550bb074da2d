"""How many tokens each expert gets, over all ranks."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from autolaunch_strategies.config import SHARDING_AXES
from autolaunch_strategies.experts.find import Mixture, countable_mixtures
from autolaunch_strategies.mesh.rank_mesh import RankMesh
from autolaunch_strategies.tensor.views import plain
from autolaunch_strategies.torch_private.backward import is_differentiating


class ExpertLoad:
    """Counts in forward passes of training for which experts tokens are, each time once, be it computed again.

    Args:
        model: before anything is applied to it: its mixtures are the same on all ranks.
    """

    def __init__(self, model: nn.Module) -> None:
        self._mixtures = countable_mixtures(model)
        self._counts: dict[str, torch.Tensor] = {}
        for mixture in self._mixtures:
            index = list(inspect.signature(type(mixture.module).forward).parameters)[2]
            mixture.module.register_forward_pre_hook(_counting(self._counts, mixture, index), with_kwargs=True)

    @torch.no_grad()
    def worst(self, mesh: RankMesh, device: torch.device) -> tuple[str, float] | None:
        """(the layer whose load is the least even, tokens of its busiest expert over those of the mean one).

        Of everything since the last call; None if nothing has been counted. Collective over the mesh.
        """
        if not self._mixtures:
            return None
        uneven = torch.zeros(len(self._mixtures), device=device)
        ranks, stages = mesh.group(*SHARDING_AXES), mesh.group("pp")
        for place, mixture in enumerate(self._mixtures):
            counts = self._counts.get(mixture.name)
            if counts is None:  # of another stage
                continue
            total = counts.float()
            if ranks is not None:
                dist.all_reduce(total, group=ranks)
            uneven[place] = total.max() / total.mean().clamp(min=1e-9)
        if stages is not None:
            dist.all_reduce(uneven, op=dist.ReduceOp.MAX, group=stages)
        self._counts.clear()
        values = uneven.tolist()
        place = values.index(max(values))
        return (self._mixtures[place].name, values[place]) if values[place] else None


def _counting(counts: dict[str, torch.Tensor], mixture: Mixture, argument: str) -> Any:
    @torch.no_grad()
    def count(module: nn.Module, args: Any, kwargs: Any) -> None:
        if not module.training or is_differentiating():
            return
        index = plain(args[1] if len(args) > 1 else kwargs[argument])
        if isinstance(index, FakeTensor) or index.is_meta:
            return
        chosen = index.flatten()
        if mixture.name not in counts:
            counts[mixture.name] = torch.zeros(mixture.experts, dtype=torch.int64, device=chosen.device)
        counts[mixture.name].scatter_add_(0, chosen, torch.ones_like(chosen))

    return count
