"""Exchanges along the cp axis that take part in autograd, each with its exact adjoint.

Every rank computes the same loss, and what is differentiated is the mean of these: the gradient of something that all
ranks use is the sum of what they send back, the gradient of something that one rank uses is what that one sends. There
is no factor anywhere. The adjoints are differentiable themselves.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F

from autolaunch_strategies.torch_private.collectives import all_gather_single, reduce_scatter_single


@dataclass
class Traffic:
    """What this process has exchanged along cp in forward passes, of its own sequences and those of others."""

    times: int = 0
    """How often parts were gathered."""
    received: int = 0
    """Bytes of those of other ranks."""
    sums: int = 0
    """How often parts were summed."""
    cuts: int = 0
    """How many whole tensors met a shard in an operator, which used this rank's part of them."""
    repeated: frozenset[str] = frozenset()
    """Names of functions that every rank has computed of gathered tensors."""

    def copy(self) -> Traffic:
        """As it stands now."""
        return replace(self)

    def restore(self, before: Traffic) -> None:
        """Forget what has been counted since `before` was copied."""
        self.times, self.received, self.sums = before.times, before.received, before.sums
        self.cuts, self.repeated = before.cuts, before.repeated


TRAFFIC = Traffic()


def gather_parts(tensor: torch.Tensor, dim: int, counts: tuple[int, ...], group: dist.ProcessGroup) -> torch.Tensor:
    """The parts of all ranks of `group`, one after the other along `dim`; backward: a reduce-scatter (sum).

    Args:
        tensor: this rank's part [.., counts[rank], ..], plain.
        dim: along which the parts are put together (>= 0).
        counts: how many entries each rank has, in the order of ranks. Parts are sent as long as the longest.

    Returns:
        [.., sum(counts), ..], contiguous, the same on every rank.
    """
    gathered: torch.Tensor = _Gather.apply(tensor, dim, counts, group)
    return gathered


def scatter_sum(tensor: torch.Tensor, dim: int, counts: tuple[int, ...], group: dist.ProcessGroup) -> torch.Tensor:
    """This rank's part [.., counts[rank], ..] of the sum over ranks of [.., sum(counts), ..]; backward: a gather."""
    part: torch.Tensor = _Scatter.apply(tensor, dim, counts, group)
    return part


def sum_over(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The sum over the ranks of `group`, the same shape and on every rank; backward: again the sum over ranks."""
    total: torch.Tensor = _Sum.apply(tensor, group)
    return total


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any, tensor: torch.Tensor, dim: int, counts: tuple[int, ...], group: dist.ProcessGroup
    ) -> torch.Tensor:
        context.how = dim, counts, group
        part = _lengthened(tensor, dim, max(counts)).contiguous()
        sent = part if part.dtype in _SENT_AS_THEY_ARE else part.view(torch.uint8)
        parts = sent.new_empty((len(counts) * sent.shape[0], *sent.shape[1:]))
        if parts.numel():
            all_gather_single(parts, sent, group)
            TRAFFIC.times += 1
            TRAFFIC.received += (len(counts) - 1) * sent.nbytes
        parts = parts.view(part.dtype).view(len(counts), *part.shape)
        return torch.cat([parts[rank].narrow(dim, 0, count) for rank, count in enumerate(counts)], dim)

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        return scatter_sum(gradients[0], *context.how), None, None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any, tensor: torch.Tensor, dim: int, counts: tuple[int, ...], group: dist.ProcessGroup
    ) -> torch.Tensor:
        context.how = dim, counts, group
        longest = max(counts)
        parts = torch.stack([_lengthened(part, dim, longest) for part in tensor.split(counts, dim)])
        own = torch.empty_like(parts[0])
        if own.numel():
            reduce_scatter_single(own, parts.flatten(0, 1), group)
        return own.narrow(dim, 0, counts[group.rank()])

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        return gather_parts(gradients[0], *context.how), None, None, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        context.group = group
        total = tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        TRAFFIC.sums += 1
        return total

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        return sum_over(gradients[0], context.group), None


_SENT_AS_THEY_ARE = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32)
"""What every backend knows; other numbers travel as bytes."""


def _lengthened(tensor: torch.Tensor, dim: int, length: int) -> torch.Tensor:
    missing = length - tensor.shape[dim]
    return tensor if not missing else F.pad(tensor, (0, 0) * (tensor.dim() - 1 - dim) + (0, missing))
