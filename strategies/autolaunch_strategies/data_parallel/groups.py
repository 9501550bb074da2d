"""Over which ranks the gradients of a parameter are averaged, and its state is sharded."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autolaunch_strategies.config import SHARDING_AXES
from autolaunch_strategies.mesh.rank_mesh import RankMesh


@dataclass(frozen=True)
class GradientGroup:
    """Ranks that hold the same parameters and compute their gradients from different data."""

    ranks: dist.ProcessGroup | None
    """All of them; None if this rank is the only one."""
    divisor: int
    """The sum of their gradients over this is the gradient: how many parts of the batch are in the sum. More than there
    are ranks where a rank's gradients come from data of other ranks, too, as those of experts do."""
    mesh: DeviceMesh | None = None
    """What state is sharded over: 1-D, or 2-D with replicas first; None where every rank holds all of it."""

    @classmethod
    def of_mesh(cls, mesh: RankMesh, sharded: bool) -> GradientGroup:
        """All ranks along dp and cp: the group of every parameter that has no other."""
        ranks = mesh.group(*SHARDING_AXES)
        return cls(ranks, 1 if ranks is None else ranks.size(), mesh.sharding_mesh() if sharded else None)

    @property
    def size(self) -> int:
        """How many they are."""
        return 1 if self.ranks is None else self.ranks.size()

    @property
    def share(self) -> float:
        """Of a rank's gradient, so that the mean over the ranks of the group is the gradient."""
        return self.size / self.divisor

    @property
    def averages(self) -> bool:
        """Whether there is anything to do for a gradient."""
        return self.ranks is not None or self.divisor > 1
