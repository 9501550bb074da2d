"""What travels between the ranks of the cp axis: parts of sequences gathered, passed round a ring, swapped for heads.

What goes to one rank at one time travels as one message: its tensors, flattened, one after the other.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist

from autolaunch_strategies.mesh.layout import Layout, layout_of
from autolaunch_strategies.torch_private.collectives import group_called, start_all_gather, start_passing
from autolaunch_strategies.torch_private.modes import outside_of_modes
from autolaunch_strategies.torch_private.operators import define_operator


def pack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """One flat tensor with the numbers of all of them (same dtype); each is copied once, whatever its strides."""
    flat = tensors[0].new_empty(sum(tensor.numel() for tensor in tensors))
    for part, tensor in zip(unpack(flat, [tensor.shape for tensor in tensors]), tensors, strict=True):
        assert tensor.dtype == flat.dtype
        part.copy_(tensor)
    return flat


def unpack(flat: torch.Tensor, shapes: Sequence[torch.Size]) -> list[torch.Tensor]:
    """The tensors that were packed, as views."""
    parts = flat.split_with_sizes([shape.numel() for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


# --- gathered ----------------------------------------------------------------------------------------------------


class Gathering:
    """Tensors of all ranks on their way to each; work done between making this and `wait` costs no time."""

    def __init__(self, tensors: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
        self._shapes, self._ranks = [tensor.shape for tensor in tensors], group.size()
        self._sent = pack(tensors)
        self._received = self._sent.new_empty(self._ranks * self._sent.numel())
        self._work = start_all_gather(self._received, self._sent, group)

    def wait(self) -> list[list[torch.Tensor]]:
        """For each tensor those of all ranks, by rank: views of what arrived."""
        self._work.wait()
        by_rank = [unpack(flat, self._shapes) for flat in self._received.chunk(self._ranks)]
        return [list(parts) for parts in zip(*by_rank, strict=True)]


def in_order(parts: Sequence[torch.Tensor], layout: Layout, dim: int) -> torch.Tensor:
    """The whole sequence along `dim`, without padding, from the parts that the ranks hold, by rank."""
    half = layout.local // 2
    whole = torch.cat([parts[rank].narrow(dim, part * half, half) for rank, part in _halves(layout)], dim)
    return whole.narrow(dim, 0, layout.size)


def sum_at_owners(
    wholes: Sequence[torch.Tensor], group: dist.ProcessGroup, layout: Layout, dim: int
) -> list[torch.Tensor]:
    """The sum over all ranks of this rank's part along `dim` of each whole: the adjoint of gathering them.

    Terms travel in the dtype that they have and are added in fp32 (fp64 for fp64), which is what comes back. Rows of
    padding are 0.
    """
    shapes = [torch.Size((*whole.shape[:dim], layout.local, *whole.shape[dim + 1 :])) for whole in wholes]
    numbers = sum(math.prod(shape) for shape in shapes)
    make = wholes[0].new_zeros if layout.is_padded else wholes[0].new_empty
    sent = make(layout.ranks * numbers)
    parts = [unpack(flat, shapes) for flat in sent.chunk(layout.ranks)]
    half = layout.local // 2
    for start, (rank, which) in zip(itertools.count(0, half), _halves(layout)):
        length = min(half, layout.size - start)
        for index, whole in enumerate(wholes):
            if length > 0:
                parts[rank][index].narrow(dim, which * half, length).copy_(whole.narrow(dim, start, length))
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    total = received.view(layout.ranks, -1).sum(0, dtype=torch.promote_types(sent.dtype, torch.float32))
    return unpack(total, shapes)


class GatherInOrder(torch.autograd.Function):
    """(group, layout, dim, *parts) -> the whole of each tensor, differentiable; for all ranks to call alike."""

    @staticmethod
    def forward(
        ctx: Any, group: dist.ProcessGroup, layout: Layout, dim: int, *parts: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.how = group.group_name, [layout.size, layout.ranks, layout.ulysses], dim
        return tuple(torch.ops.autolaunch.gather_in_order(parts, *ctx.how))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        summed = torch.ops.autolaunch.sum_at_owners(grads, *ctx.how)
        return None, None, None, *(total.to(grad.dtype) for total, grad in zip(summed, grads, strict=True))


def _gather_in_order(parts: list[torch.Tensor], group: str, layout: list[int], dim: int) -> list[torch.Tensor]:
    boolean = parts[0].dtype == torch.bool  # which not every backend sends
    sent = [part.view(torch.uint8) if boolean else part for part in parts]
    arrived = Gathering(sent, group_called(group)).wait()
    wholes = [in_order(pieces, layout_of(*layout), dim).contiguous() for pieces in arrived]
    return [whole.view(torch.bool) if boolean else whole for whole in wholes]


def _sum_at_owners(wholes: list[torch.Tensor], group: str, layout: list[int], dim: int) -> list[torch.Tensor]:
    sums = sum_at_owners(wholes, group_called(group), layout_of(*layout), dim)
    return sums if len(sums) == 1 else [part.clone() for part in sums]  # an operator's results share no memory


def _with_length(tensor: torch.Tensor, dim: int, length: int, dtype: torch.dtype) -> torch.Tensor:
    return tensor.new_empty((*tensor.shape[:dim], length, *tensor.shape[dim + 1 :]), dtype=dtype)


define_operator(
    "gather_in_order(Tensor[] parts, str group, int[] layout, int dim) -> Tensor[]",
    _gather_in_order,
    lambda parts, group, layout, dim: [_with_length(part, dim, layout_of(*layout).size, part.dtype) for part in parts],
)
define_operator(
    "sum_at_owners(Tensor[] wholes, str group, int[] layout, int dim) -> Tensor[]",
    _sum_at_owners,
    lambda wholes, group, layout, dim: [
        _with_length(whole, dim, layout_of(*layout).local, torch.promote_types(wholes[0].dtype, torch.float32))
        for whole in wholes
    ],
)


@lru_cache(maxsize=256)
def _halves(layout: Layout) -> tuple[tuple[int, int], ...]:
    """Both halves of what each rank holds, as (rank, 0 or 1), in the order of their positions (`Layout`)."""
    half = layout.local // 2
    with outside_of_modes():  # what is kept are values, whatever runs when it is first asked for
        starts = {
            (rank, part): layout.padded_positions(rank)[part * half].item()
            for rank in range(layout.ranks)
            for part in (0, 1)
        }
    return tuple(sorted(starts, key=lambda piece: starts[piece]))


# --- round a ring ------------------------------------------------------------------------------------------------


class Passing:
    """`sent` on its way to the next place of a ring, and `received` from the one before.

    Until `wait`, `sent` must stay as it is, and `received` is not there yet. Every place has to start its passings in
    the same order.
    """

    def __init__(self, sent: torch.Tensor, received: torch.Tensor, group: dist.ProcessGroup, kind: int) -> None:
        place, places = group.rank(), group.size()
        self.received = received
        self._sent = sent
        self._works = start_passing(sent, (place + 1) % places, received, (place - 1) % places, group, kind)

    def wait(self) -> torch.Tensor:
        """What was received."""
        for work in self._works:
            work.wait()
        return self.received


# --- sequence for heads ------------------------------------------------------------------------------------------


def sequence_to_heads(group: dist.ProcessGroup, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Tensors [b, heads, s_local, d] as [b, heads/n, n·s_local, d] of each, for n ranks of the group; differentiable.

    Rank r of the group gets the r-th part of the heads; sequences are put together in the order of ranks.
    """
    swapped: tuple[torch.Tensor, ...] = _Swapped.apply(group, 1, 2, *tensors)
    return swapped


def heads_to_sequence(group: dist.ProcessGroup, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor [b, heads/n, n·s_local, d] as [b, heads, s_local, d]: the inverse of `sequence_to_heads`."""
    swapped: tuple[torch.Tensor, ...] = _Swapped.apply(group, 2, 1, tensor)
    return swapped[0]


class _Swapped(torch.autograd.Function):
    """(group, split, join, *tensors) -> as `_swap`; the gradients go the way back."""

    @staticmethod
    def forward(
        ctx: Any, group: dist.ProcessGroup, split: int, join: int, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.of = group, split, join
        return tuple(torch.ops.autolaunch.swap_dims(tensors, group.group_name, split, join))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        group, split, join = ctx.of
        return None, None, None, *torch.ops.autolaunch.swap_dims(grads, group.group_name, join, split)


def _swap(tensors: list[torch.Tensor], name: str, split: int, join: int) -> list[torch.Tensor]:
    """Send the r-th part along `split` of each tensor to rank r; what comes is put together along `join`."""
    group = group_called(name)
    ranks = group.size()
    parts = [tensor.chunk(ranks, split) for tensor in tensors]
    sent = pack([part[rank] for rank in range(ranks) for part in parts])
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    shapes = [part[0].shape for part in parts]
    arrived = [unpack(flat, shapes) for flat in received.chunk(ranks)]
    return [torch.cat(pieces, join) for pieces in zip(*arrived, strict=True)]


def _swapped_shapes(tensors: list[torch.Tensor], name: str, split: int, join: int) -> list[torch.Tensor]:
    shapes, ranks = [list(tensor.shape) for tensor in tensors], group_called(name).size()
    for shape in shapes:
        shape[split] //= ranks
        shape[join] *= ranks
    return [tensor.new_empty(shape) for tensor, shape in zip(tensors, shapes, strict=True)]


define_operator("swap_dims(Tensor[] tensors, str group, int split, int join) -> Tensor[]", _swap, _swapped_shapes)
