"""Parameters that several stages hold, such as a tied embedding: one copy per holder, one sum of gradients."""

from __future__ import annotations

from collections import defaultdict

import torch
import torch.distributed as dist
from torch import nn

from autolaunch_strategies.data_parallel.gradients import PackedGradients, take_views
from autolaunch_strategies.pipeline.cut import Cutting
from autolaunch_strategies.pipeline.placement import group_rank
from autolaunch_strategies.pipeline.run import Pipeline


class SharedGradients:
    """Sums the gradients of shared parameters over the ranks that hold them.

    All of them add in the same order, so that the copies stay equal bit for bit.
    """

    def __init__(self, root: nn.Module, cutting: Cutting, pipeline: Pipeline) -> None:
        self.root, self.group, self.device = root, pipeline.group, pipeline.device
        self._sets: dict[tuple[int, ...], list[str]] = defaultdict(list)
        for name, stages in cutting.holders.items():
            ranks = {group_rank(pipeline.rank_of_stage, self.group.size(), stage) for stage in stages}
            if len(ranks) > 1 and self.group.rank() in ranks:
                self._sets[tuple(sorted(ranks))].append(name)

    def parameters(self) -> list[nn.Parameter]:
        """The parameters that other stages hold, too."""
        parameters = dict(self.root.named_parameters())
        return [parameters[name] for names in self._sets.values() for name in names]

    @torch.no_grad()
    def sum(self) -> None:
        """Replace the gradient of every shared parameter by the sum over its holders. Collective over the holders.

        A parameter that has a gradient nowhere keeps none.
        """
        if not self._sets:
            return
        parameters = dict(self.root.named_parameters())
        for ranks in sorted(self._sets):
            trained = [parameters[name] for name in self._sets[ranks] if parameters[name].requires_grad]
            kinds: dict[torch.dtype, list[nn.Parameter]] = defaultdict(list)
            for parameter in trained:
                kinds[parameter.dtype].append(parameter)
            for same in kinds.values():
                self._sum(ranks, same)

    def _sum(self, ranks: tuple[int, ...], parameters: list[nn.Parameter]) -> None:
        packed = PackedGradients(parameters, take_views(parameters), self.device)
        self._all_reduce(ranks, packed.flat)
        packed.unpack()

    def _all_reduce(self, ranks: tuple[int, ...], flat: torch.Tensor) -> None:
        if len(ranks) == self.group.size():
            dist.all_reduce(flat, group=self.group)
            return
        first, *others = ranks  # a group of its own for each set of holders would be one more for every replica
        if self.group.rank() != first:
            dist.send(flat, group=self.group, group_dst=first)
            dist.recv(flat, group=self.group, group_src=first)
            return
        arriving = torch.empty_like(flat)
        for rank in others:
            dist.recv(arriving, group=self.group, group_src=rank)
            flat += arriving
        for rank in others:
            dist.send(flat, group=self.group, group_dst=rank)
