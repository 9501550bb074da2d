"""Rows that travel between ranks and take part in autograd, each exchange with its exact adjoint."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from autolaunch_strategies.experts.kept import kept
from autolaunch_strategies.torch_private.collectives import all_gather_single


def exchange(rows: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    """Send `sent[rank]` rows of [sum(sent), ...] to each rank: [sum(received), ...], in the order of ranks.

    Backward sends gradients the other way. Every rank takes part in both, be it without rows.
    """
    arrived: torch.Tensor = _Exchange.apply(rows, sent, received, group)
    return arrived


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any, rows: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
    ) -> torch.Tensor:
        context.how = received, sent, group

        def arrive() -> torch.Tensor:
            arrived = rows.new_empty((sum(received), *rows.shape[1:]))
            dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
            return arrived

        return kept(arrive, rows=True).detach()  # what is kept stays no part of a graph

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> Any:
        return exchange(gradients[0], *context.how), None, None, None


def own_share(rows: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """This rank's part of rows [T, ...] that all ranks of `group` have; backward: the gradients of all parts."""
    share: torch.Tensor = _Share.apply(rows, group)
    return share


def all_shares(share: torch.Tensor, total: int, group: dist.ProcessGroup) -> torch.Tensor:
    """The parts of all ranks, [total, ...], on each of them; backward: this rank's part of a gradient that all have."""
    rows: torch.Tensor = _Shares.apply(share, total, group)
    return rows


def used_in_parts(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """What all ranks of `group` have and each uses for other rows: its gradient is the sum of theirs."""
    used: torch.Tensor = _UsedInParts.apply(tensor, group)
    return used


class _UsedInParts(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        context.group = group
        return tensor.view_as(tensor)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(context: Any, *gradients: torch.Tensor) -> Any:
        total = gradients[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=context.group)
        return total, None


class _Share(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, rows: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        context.how = len(rows), group
        return rows.tensor_split(group.size())[group.rank()].clone()

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> Any:
        return all_shares(gradients[0], *context.how), None


class _Shares(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, share: torch.Tensor, total: int, group: dist.ProcessGroup) -> torch.Tensor:
        context.group = group
        ranks = group.size()
        sizes = [total // ranks + (rank < total % ranks) for rank in range(ranks)]  # as `tensor_split` has them
        sent = share.new_zeros((max(sizes), *share.shape[1:]))
        sent[: len(share)] = share
        parts = share.new_empty((ranks * max(sizes), *share.shape[1:]))
        all_gather_single(parts, sent, group)
        return torch.cat([part[:size] for part, size in zip(parts.chunk(ranks), sizes, strict=True)])

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> Any:
        return own_share(gradients[0], context.group), None, None
