"""Sequence parallelism: between blocks each rank holds some of the positions (arXiv 2205.05198); Paddle's names."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import Shard

from autolaunch_strategies.sharded_sequence.shard import SequenceShard
from autolaunch_strategies.tensor.styles.base import Region, Style, change_first_input, change_first_output


def _begin(region: Region, tensor: torch.Tensor, transpose: bool) -> torch.Tensor:
    """[b, s, h] to its positions of this rank: [b, s/n, h], or [s/n, b, h] if `transpose`."""
    if isinstance(tensor, SequenceShard):
        return _of_part(tensor, _begin(region, tensor.local, transpose), transpose)
    sharded = region.replicate(tensor)
    if transpose:
        sharded = sharded.redistribute(placements=[Shard(1)])
        return sharded.transpose(0, 1)
    return sharded.redistribute(placements=[Shard(1)])


def _end(region: Region, tensor: torch.Tensor, transpose: bool) -> torch.Tensor:
    """The inverse of `_begin`, whole and plain."""
    if isinstance(tensor, SequenceShard):
        return _of_part(tensor, _end(region, tensor.local, transpose), transpose)
    return region.replicate.whole(tensor.transpose(0, 1) if transpose else tensor)


def _of_part(shard: SequenceShard, part: torch.Tensor, transposed: bool) -> SequenceShard:
    """A shard along cp of the same positions, of which each rank along mp holds as much as `part` says."""
    dim = shard.sequence_dim
    return SequenceShard.of(part, 1 - dim if transposed and dim < 2 else dim, shard.positions, shard.group)


class SequenceParallelBegin(Style):
    """From this module's output on, each rank holds some of the positions.

    Args:
        need_transpose: turn [b, s, h] into [s, b, h] for the region.
    """

    def __init__(self, need_transpose: bool = True) -> None:
        self.need_transpose = need_transpose

    def apply(self, region: Region, name: str, module: nn.Module, only: str | None) -> None:
        region.sequence_parallel_within.add(name)
        change_first_output(module, lambda tensor: _begin(region, tensor, self.need_transpose))


class SequenceParallelEnd(Style):
    """From this module's input on, every rank holds all positions again.

    Args:
        need_transpose: turn [s, b, h] back into [b, s, h].
    """

    def __init__(self, need_transpose: bool = True) -> None:
        self.need_transpose = need_transpose

    def apply(self, region: Region, name: str, module: nn.Module, only: str | None) -> None:
        change_first_input(module, lambda tensor: _end(region, tensor, self.need_transpose))


class SequenceParallelEnable(Style):
    """Only within this module each rank holds some of the positions; input and output are whole [b, s, h]."""

    def apply(self, region: Region, name: str, module: nn.Module, only: str | None) -> None:
        change_first_input(module, lambda tensor: _begin(region, tensor, True))
        change_first_output(module, lambda tensor: _end(region, tensor, True))


class SequenceParallelDisable(Style):
    """Within this module of a sequence parallel region every rank holds all positions.

    Args:
        need_transpose: the region is [s, b, h] and the module wants [b, s, h].
    """

    def __init__(self, need_transpose: bool = True) -> None:
        self.need_transpose = need_transpose

    def apply(self, region: Region, name: str, module: nn.Module, only: str | None) -> None:
        region.sequence_parallel_within.add(name)
        change_first_input(module, lambda tensor: _end(region, tensor, self.need_transpose))
        change_first_output(module, lambda tensor: _begin(region, tensor, self.need_transpose))
