"""What stands between two regions: a tensor of which each rank of the cp axis holds some positions of the sequence.

Code between regions is the model's own. It sees the shapes of the whole sequence, and what it calls is computed on the
positions of this rank where each stands for itself, and on the gathered tensor otherwise (`sequence_functions`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

from autolaunch_strategies._torch import outside_of_modes
from autolaunch_strategies.context.collectives import gather_parts
from autolaunch_strategies.context.layout import Layout


@dataclass(frozen=True)
class Positions:
    """Which entries of a dim each rank holds, in ascending order; none of them is padding.

    The dim is a part of the sequence, [start, stop), repeated for each of `outer` rows (a batch flattened into the
    sequence: entry = row · (stop - start) + position), and of that the entries [first, last).
    """

    layout: Layout
    start: int
    stop: int
    outer: int
    first: int
    last: int

    @classmethod
    def of_layout(cls, layout: Layout) -> Positions:
        """All positions of a sequence that is divided as `layout` says; ranks that hold padding hold fewer."""
        return cls(layout, 0, layout.size, 1, 0, layout.size)

    @property
    def size(self) -> int:
        """Length of the dim, of all ranks together."""
        return self.last - self.first

    @property
    def rows(self) -> int | None:
        """How often the sequence is repeated along the dim; None if not all of it is there."""
        return self.outer if self.size == self.outer * (self.stop - self.start) else None

    @property
    def counts(self) -> tuple[int, ...]:
        """How many entries each rank holds."""
        return tuple(len(self.of_rank(rank)) for rank in range(self.layout.ranks))

    def of_rank(self, rank: int, device: torch.device | str = "cpu") -> torch.Tensor:
        """The entries that `rank` holds, [count] int64, ascending."""
        return _entries(self, rank, torch.device(device))

    def narrowed(self, start: int, stop: int) -> Positions:
        """Of the entries [start, stop) of the dim."""
        assert 0 <= start <= stop <= self.size
        if self.rows == 1:
            first, last = self.start + start, self.start + stop
            return replace(self, start=first, stop=last, first=0, last=stop - start)
        return replace(self, first=self.first + start, last=self.first + stop)

    def flattened(self, outer: int) -> Positions:
        """Of a dim in which `outer` of this one stand one after the other; all of the sequence has to be there."""
        assert self.rows is not None
        rows = outer * self.rows
        return replace(self, outer=rows, last=rows * (self.stop - self.start))

    def one_row(self) -> Positions:
        """Of one of the rows that stand one after the other."""
        assert self.rows is not None
        return replace(self, outer=1, last=self.stop - self.start)

    def held_before(self, entry: int, rank: int) -> int:
        """How many entries smaller than `entry` the rank holds."""
        return int(torch.searchsorted(self.of_rank(rank), entry))

    def order(self, device: torch.device) -> torch.Tensor | None:
        """Where each entry stands among those of all ranks one after the other, [size]; None: already in order."""
        return _order(self, device)


@lru_cache(maxsize=1024)
def _entries(positions: Positions, rank: int, device: torch.device) -> torch.Tensor:
    with outside_of_modes():
        if device.type != "cpu":
            return positions.of_rank(rank).to(device)
        held = positions.layout.positions(rank).clone()
        held = held[(held >= positions.start) & (held < positions.stop)] - positions.start
        if positions.outer > 1:
            rows = torch.arange(positions.outer) * (positions.stop - positions.start)
            held = (rows[:, None] + held).flatten()
        return held[(held >= positions.first) & (held < positions.last)] - positions.first


@lru_cache(maxsize=256)
def _order(positions: Positions, device: torch.device) -> torch.Tensor | None:
    with outside_of_modes():
        order = torch.cat([positions.of_rank(rank) for rank in range(positions.layout.ranks)]).argsort()
        return None if bool((order.diff() == 1).all()) else order.to(device)


class SequenceShard(torch.Tensor):
    """A tensor [.., size, ..] of the shape that the whole has, of which this rank holds [.., count, ..] in `local`.

    Autograd knows `local` only. What leaves torch (values, files) is taken from the whole tensor, which all ranks of
    the group have to ask for together.
    """

    local: torch.Tensor
    """The entries of this rank: a plain tensor, or a DTensor over the mp mesh."""
    dim_of_sequence: int
    """Which dim is divided (>= 0); `dim()` is what it is for every tensor: their number."""
    positions: Positions
    """Which entries each rank holds."""
    group: dist.ProcessGroup
    """The ranks among which the dim is divided."""

    @staticmethod
    def of(local: torch.Tensor, dim: int, positions: Positions, group: dist.ProcessGroup) -> SequenceShard:
        """A shard of what this rank holds, [.., len(positions.of_rank(rank)), ..] with the entries along `dim` >= 0."""
        shape = list(local.shape)
        assert shape[dim] == len(positions.of_rank(group.rank())), (shape, dim, positions)
        shape[dim] = positions.size
        shard = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            SequenceShard, shape, dtype=local.dtype, device=local.device, requires_grad=local.requires_grad
        )
        shard.local, shard.dim_of_sequence, shard.positions, shard.group = local, dim, positions, group
        return shard

    def whole(self) -> torch.Tensor:
        """The whole tensor, the same on every rank, plain or a DTensor as `local` is. Differentiable."""
        positions, dim = self.positions, self.dim_of_sequence
        order = positions.order(self.local.device)

        def gather(part: torch.Tensor) -> torch.Tensor:
            together = gather_parts(part, dim, positions.counts, self.group)
            return together if order is None else together.index_select(dim, order)

        return _along(self.local, dim, positions.size, gather)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        shape = list(self.local.shape)
        shape[self.dim_of_sequence] = self.positions.size
        return (
            f"SequenceShard(shape={shape}, dtype={self.local.dtype}, device={self.local.device}, "
            f"{self.local.shape[self.dim_of_sequence]} of {self.positions.size} along dim {self.dim_of_sequence})"
        )

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from autolaunch_strategies.context.sequence_functions import run

        return run(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(
            f"{func} got a tensor of which each rank holds a part of the sequence, on a way that torch functions do "
            "not take (a torch.autograd.Function, or an operator called from C++). Give it `tensor.whole()`."
        )


def cut(whole: torch.Tensor, dim: int, positions: Positions, group: dist.ProcessGroup) -> torch.Tensor:
    """What this rank holds of a whole tensor [.., positions.size, ..]: [.., count, ..], plain or a DTensor as `whole`.

    Differentiable: the gradient is zero for entries of other ranks.
    """
    assert whole.shape[dim] == positions.size
    rank = group.rank()
    held = positions.of_rank(rank)
    count = len(held)
    if count == 0 or int(held[-1] - held[0]) + 1 == count:
        first = int(held[0]) if count else 0
        return _along(whole, dim, count, lambda tensor: tensor.narrow(dim, first, count))
    index = positions.of_rank(rank, whole.device)
    return _along(whole, dim, count, lambda tensor: tensor.index_select(dim, index))


def _along(tensor: torch.Tensor, dim: int, size: int, change: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """`change`, which gives `dim` the length `size`, of a plain tensor or of each rank's part of a DTensor."""
    if not isinstance(tensor, DTensor):
        return change(tensor)
    mesh = tensor.device_mesh
    placements = [
        item if item.is_shard() and item != Shard(dim) and item != Shard(dim - tensor.dim()) else Replicate()
        for item in tensor.placements
    ]
    shape = torch.Size((*tensor.shape[:dim], size, *tensor.shape[dim + 1 :]))
    changed = change(tensor.redistribute(placements=placements).to_local())
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(changed.contiguous(), mesh, placements, run_check=False, shape=shape, stride=stride)
