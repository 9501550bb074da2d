"""How many tokens each expert gets, over all ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from autolaunch_strategies.config import SHARDING_AXES
from autolaunch_strategies.data_parallel.loader import Counted
from autolaunch_strategies.experts.find import Mixture, countable_mixtures
from autolaunch_strategies.mesh.rank_mesh import RankMesh
from autolaunch_strategies.tensor.expert_arguments import is_index
from autolaunch_strategies.tensor.views import plain
from autolaunch_strategies.torch_private.backward import is_differentiating
from autolaunch_strategies.tracing.state import is_trial


class ExpertLoad:
    """Counts in forward passes of training for which experts tokens are, each time once, be it computed again.

    Args:
        model: before anything is applied to it: its mixtures are the same on all ranks.
    """

    def __init__(self, model: nn.Module) -> None:
        self.mixtures = countable_mixtures(model)
        self.counted = Counted()
        """Asked whether this rank's batch counts; by default every one does."""
        self._totals: dict[str, torch.Tensor] = {}
        """Layers of this stage -> how many tokens each expert has got on this rank, from the beginning."""
        self._reported: dict[str, torch.Tensor] = {}
        for mixture in self.mixtures:
            mixture.module.register_forward_pre_hook(_counting(self._totals, mixture, self.counted), with_kwargs=True)

    @torch.no_grad()
    def tokens(self, before: dict[str, torch.Tensor], mesh: RankMesh) -> dict[str, torch.Tensor]:
        """Layers of this stage -> tokens of each expert [experts] over all ranks, float32, since the last call.

        Collective over the ranks of the stage.

        Args:
            before: what the one who asks has been told so far, empty at first; it is brought up to date.
        """
        if not self._totals:
            return {}
        new = {name: total - before.get(name, 0) for name, total in self._totals.items()}
        before.update((name, total.clone()) for name, total in self._totals.items())
        everywhere = torch.cat(list(new.values())).float()
        if (ranks := mesh.group(*SHARDING_AXES)) is not None:
            dist.all_reduce(everywhere, group=ranks)
        return dict(zip(new, everywhere.split([len(counts) for counts in new.values()]), strict=True))

    @torch.no_grad()
    def worst(self, mesh: RankMesh, device: torch.device) -> tuple[str, float] | None:
        """(the layer whose load is the least even, tokens of its busiest expert over those of the mean one).

        Of everything since the last call; None if nothing has been counted. Collective over the mesh.
        """
        if not self.mixtures:
            return None
        tokens = self.tokens(self._reported, mesh)
        uneven = torch.zeros(len(self.mixtures), device=device)
        for place, mixture in enumerate(self.mixtures):
            if (counts := tokens.get(mixture.name)) is not None:  # else it is of another stage
                uneven[place] = counts.max() / counts.mean().clamp(min=1e-9)
        if (stages := mesh.group("pp")) is not None:
            dist.all_reduce(uneven, op=dist.ReduceOp.MAX, group=stages)
        values = uneven.tolist()
        place = values.index(max(values))
        return (self.mixtures[place].name, values[place]) if values[place] else None


def _counting(counts: dict[str, torch.Tensor], mixture: Mixture, is_counted: Counted) -> Any:
    @torch.no_grad()
    def count(module: nn.Module, args: Any, kwargs: Any) -> None:
        if not module.training or is_differentiating() or is_trial():
            return
        # Only this is made plain: tokens may be on several ranks, and stay there.
        index = plain(next(filter(is_index, (*args, *kwargs.values()))))
        if isinstance(index, FakeTensor) or index.is_meta:
            return
        chosen = index.flatten()
        if mixture.name not in counts:
            counts[mixture.name] = torch.zeros(mixture.experts, dtype=torch.int64, device=chosen.device)
        counts[mixture.name].scatter_add_(0, chosen, torch.full_like(chosen, is_counted()))

    return count
