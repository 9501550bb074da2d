"""What stands between two regions: a tensor of which each rank of the cp axis holds some positions of the sequence.

Code between regions is the model's own. It sees the shapes of the whole sequence, and what it calls is computed on the
positions of this rank where each stands for itself, and on the gathered tensor otherwise (`functions`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

from autolaunch_strategies.mesh.layout import Layout
from autolaunch_strategies.sharded_sequence.collectives import gather_parts
from autolaunch_strategies.torch_private.modes import outside_of_modes, without_torch_functions


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
        """All positions of a sequence that is sharded as `layout` says; ranks that hold padding hold fewer."""
        return _all_positions(layout)

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
        return _counts(self)

    def of_rank(self, rank: int, device: torch.device | str = "cpu") -> torch.Tensor:
        """The entries that `rank` holds, [count] int64, ascending."""
        return _kept_entries(self, rank, torch.device(device))

    def narrowed(self, start: int, stop: int) -> Positions:
        """The positions of `tensor.narrow(dim, start, stop - start)`: entries [start, stop) of the sequence dim."""
        assert 0 <= start <= stop <= self.size
        if self.rows == 1:
            first, last = self.start + start, self.start + stop
            return replace(self, start=first, stop=last, first=0, last=stop - start)
        return replace(self, first=self.first + start, last=self.first + stop)

    def flattened(self, outer: int) -> Positions:
        """The positions after `outer` dims in front were flattened into the sequence dim, which has to be complete."""
        assert self.rows is not None
        rows = outer * self.rows
        return replace(self, outer=rows, last=rows * (self.stop - self.start))

    def one_row(self) -> Positions:
        """The positions of a single row, where several were flattened into the sequence dim."""
        assert self.rows is not None
        return replace(self, outer=1, last=self.stop - self.start)

    def held_before(self, entry: int, rank: int) -> int:
        """How many entries smaller than `entry` the rank holds."""
        return int(torch.searchsorted(self.of_rank(rank), entry))

    def order(self, device: torch.device) -> torch.Tensor | None:
        """Where each entry stands among those of all ranks one after the other, [size]; None: already in order."""
        return _order(self, device)


@lru_cache(maxsize=1024)
def _all_positions(layout: Layout) -> Positions:
    return Positions(layout, 0, layout.size, 1, 0, layout.size)


@lru_cache(maxsize=64)
def _first_of_run(positions: Positions, rank: int) -> int | None:
    """The first entry that `rank` holds, if what it holds is one piece; else None."""
    with outside_of_modes():
        held = positions.of_rank(rank)
        count = len(held)
        return None if count and int(held[-1] - held[0]) + 1 != count else int(held[0]) if count else 0


@lru_cache(maxsize=64)
def _kept_entries(positions: Positions, rank: int, device: torch.device) -> torch.Tensor:
    with outside_of_modes():
        return _entries(positions, rank).to(device)


@lru_cache(maxsize=256)
def _counts(positions: Positions) -> tuple[int, ...]:
    rows = positions.rows
    if rows is not None and rows > 1:
        return tuple(rows * count for count in positions.one_row().counts)
    with outside_of_modes():
        return tuple(len(_entries(positions, rank)) for rank in range(positions.layout.ranks))


@lru_cache(maxsize=16)
def _order(positions: Positions, device: torch.device) -> torch.Tensor | None:
    with outside_of_modes():
        order = torch.cat([_entries(positions, rank) for rank in range(positions.layout.ranks)]).argsort()
        return None if bool((order.diff() == 1).all()) else order.to(device)


def _entries(positions: Positions, rank: int) -> torch.Tensor:
    held = positions.layout.positions(rank).clone()  # may have been made in inference mode
    held = held[(held >= positions.start) & (held < positions.stop)] - positions.start
    if positions.outer > 1:
        rows = torch.arange(positions.outer) * (positions.stop - positions.start)
        held = (rows[:, None] + held).flatten()
    return held[(held >= positions.first) & (held < positions.last)] - positions.first


class SequenceShard(torch.Tensor):
    """A tensor [.., size, ..] of the shape that the whole has, of which this rank holds [.., count, ..] in `local`.

    Autograd knows `local` only. What leaves torch (values, files) is taken from the whole tensor, which all ranks of
    the group have to ask for together.
    """

    _local: torch.Tensor
    sequence_dim: int
    """Which dim is sharded (>= 0); `dim()` is what it is for every tensor: their number."""
    positions: Positions
    """Which entries each rank holds."""
    group: dist.ProcessGroup
    """The ranks over which the dim is sharded."""
    computes: ClassVar[Callable[[Any, Any, Any], Any]]
    """What a torch function of such tensors gives: (function, args, kwargs) -> result. `functions` puts it here."""
    sizes: tuple[int, ...]
    """The shape of the whole, for code that does not want to go through torch functions."""

    @staticmethod
    def of(local: torch.Tensor, dim: int, positions: Positions, group: dist.ProcessGroup) -> SequenceShard:
        """A shard of what this rank holds, a plain tensor or a DTensor over the mp mesh.

        Args:
            local: [.., positions.counts[rank], ..], without padding.
            dim: the sequence dim (>= 0).
        """
        shape = list(local.shape)
        assert shape[dim] == positions.counts[group.rank()], (shape, dim, positions)
        shape[dim] = positions.size
        shard = torch.Tensor._make_wrapper_subclass(SequenceShard, shape, dtype=local.dtype, device=local.device)
        shard._local, shard.sequence_dim, shard.positions, shard.group = local, dim, positions, group
        shard.sizes = tuple(shape)
        shard.watch()
        return shard

    @property
    def local(self) -> torch.Tensor:
        """The entries of this rank, [.., positions.counts[rank], ..]: a plain tensor, or a DTensor over the mp mesh.

        Raises:
            RuntimeError: the shard came out of a `torch.autograd.Function`, so that no gradient would reach it.
        """
        with without_torch_functions():
            node = self.grad_fn
        if node is not None:
            raise RuntimeError(f"{node.name()} {_UNSEEN}")
        return self._local

    def watch(self) -> None:
        """Let a gradient that reaches this tensor, and not `local`, be an error. Called when `local` needs one."""
        with without_torch_functions():
            if self._local.requires_grad and self._backward_hooks is None:
                self.requires_grad_()
                self.register_hook(_lost)

    def whole(self) -> torch.Tensor:
        """The whole tensor, the same on every rank, plain or a DTensor as `local` is. Differentiable."""
        positions, dim, local = self.positions, self.sequence_dim, self.local
        order = positions.order(local.device)

        def gather(part: torch.Tensor) -> torch.Tensor:
            together = gather_parts(part, dim, positions.counts, self.group)
            return together if order is None else together.index_select(dim, order)

        return on_parts(local, gather, dim, positions.size)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]  # torch names its keyword
        count, dim = self._local.shape[self.sequence_dim], self.sequence_dim
        return (
            f"SequenceShard(shape={list(self.sizes)}, dtype={self._local.dtype}, device={self._local.device}, "
            f"{count} of {self.positions.size} along dim {dim} here)"
        )

    def __format__(self, specification: str) -> str:
        return repr(self)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return cls.computes(func, args, kwargs or {})

    # A function that does nothing is what `torch.Tensor` has there.
    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]  # stub
        raise RuntimeError(f"{func} {_UNSEEN}")


_UNSEEN = (
    "got a tensor of which each rank holds a part of the sequence (cp), and not by the way of torch functions, which "
    "would compute it part by part. A torch.autograd.Function, or what is called from C++, needs `tensor.whole()`, or "
    "to run in a module of its own that is one of the sharded ones."
)


def _lost(_: torch.Tensor) -> None:
    raise RuntimeError(f"A torch.autograd.Function {_UNSEEN}")


def cut(whole: torch.Tensor, dim: int, positions: Positions, group: dist.ProcessGroup) -> torch.Tensor:
    """What this rank holds of a whole tensor [.., positions.size, ..]: [.., count, ..], plain or a DTensor as `whole`.

    Differentiable: the gradient is zero for entries of other ranks.
    """
    assert whole.shape[dim] == positions.size
    rank = group.rank()
    count, first = positions.counts[rank], _first_of_run(positions, rank)
    if first is not None:
        # A copy, contiguous, as other ranks have: models view, and change in place.
        return on_parts(
            whole,
            lambda tensor: tensor.narrow(dim, first, count).clone(memory_format=torch.contiguous_format),
            dim,
            count,
        )
    index = positions.of_rank(rank, whole.device)
    return on_parts(whole, lambda tensor: tensor.index_select(dim, index), dim, count)


def repeated_to(local: torch.Tensor, dim: int, length: int) -> torch.Tensor:
    """`local` with its last entry along `dim` repeated until there are `length` of them."""
    missing = length - local.shape[dim]
    if missing == 0:
        return local
    if local.shape[dim] == 0:  # zeros that hang together with it: every rank takes part in its backward pass
        return torch.cat([local.sum(dim, keepdim=True).to(local.dtype)] * missing, dim)
    last = local.narrow(dim, local.shape[dim] - 1, 1)
    return torch.cat([local, *[last] * missing], dim)


def on_parts(
    tensor: torch.Tensor,
    change: Callable[[torch.Tensor], torch.Tensor],
    dim: int | None = None,
    size: int | None = None,
) -> torch.Tensor:
    """`change` of a plain tensor, or of each mp rank's part of a DTensor.

    Args:
        tensor: one of which a DTensor is first made one without addends, and whole along `dim`.
        change: what works on any part; it may give `dim` the length `size`.
        dim: >= 0; None: the shape stays.
        size: the length of `dim` afterwards.
    """
    if not isinstance(tensor, DTensor):
        return change(tensor)
    mesh, shape = tensor.device_mesh, list(tensor.shape)
    placements = [
        Replicate()
        if item.is_partial() or (dim is not None and item in (Shard(dim), Shard(dim - len(shape))))
        else item
        for item in tensor.placements
    ]
    if dim is not None and size is not None:
        shape[dim] = size
    changed = change(tensor.redistribute(placements=placements).to_local()).contiguous()
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(changed, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)
