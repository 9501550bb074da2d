"""Whole parameters of the experts of this rank, of the parts that every rank has of all experts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor


def dim_to_shard(parameter: torch.Tensor, ranks: int) -> int | None:
    """The first dim that so many ranks can share evenly; None if there is none."""
    return next((dim for dim, size in enumerate(parameter.shape) if size and size % ranks == 0), None)


def shard_each(experts: nn.Module, mesh: DeviceMesh) -> Iterator[nn.Parameter]:
    """Give each rank of `mesh` a part of every parameter of every expert, in place."""
    for owner in experts.modules():
        for name, parameter in list(owner.named_parameters(recurse=False)):
            dim = dim_to_shard(parameter, mesh.size())
            assert dim is not None, "a mixture with such parameters is refused"
            sharded = nn.Parameter(
                distribute_tensor(parameter.detach(), mesh, [Shard(dim)], src_data_rank=None),
                requires_grad=parameter.requires_grad,
            )
            sharded.__dict__.update(parameter.__dict__)
            owner._parameters[name] = sharded
            yield sharded


def whole_experts(
    experts: Sequence[nn.Module], used: list[bool], group: dist.ProcessGroup
) -> list[dict[str, torch.Tensor]]:
    """The whole parameters of each of this rank's experts, by name. Collective, in backward, too.

    Args:
        experts: all of them, of one kind, of which each rank of `group` has as many, with DTensors as parameters.
        used: whether any row is for them, of this rank's. Parameters of those that none is for get no gradient.
    """
    names = [name for name, _ in experts[0].named_parameters()]
    parameters: list[Any] = [dict(expert.named_parameters())[name] for expert in experts for name in names]
    assert all(isinstance(parameter, DTensor) for parameter in parameters)
    dims = [parameter.placements[0].dim for parameter in parameters[: len(names)]]
    whole = _Whole.apply(group, used, dims, *(parameter.to_local() for parameter in parameters))
    return [
        dict(zip(names, whole[first : first + len(names)], strict=True)) for first in range(0, len(whole), len(names))
    ]


class _Whole(torch.autograd.Function):
    """One exchange of parts of parameters, and one of parts of their gradients.

    Parts come expert by expert, each with its parameters in order, so that what a rank gets stands together.
    """

    @staticmethod
    def forward(
        context: Any, group: dist.ProcessGroup, used: list[bool], dims: list[int], *parts: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        context.how = group, used, dims, [part.shape for part in parts[: len(dims)]]
        ranks, sizes = group.size(), [part.numel() for part in parts[: len(dims)]]
        sent = torch.cat([part.flatten() for part in parts])
        arrived = torch.empty_like(sent)
        dist.all_to_all_single(arrived, sent, group=group)
        whole = []
        for expert in arrived.view(ranks, len(used), -1).unbind(dim=1):  # [ranks, numbers of one part]
            for numbers, shape, dim in zip(expert.split(sizes, dim=1), context.how[3], dims, strict=True):
                whole.append(torch.cat(numbers.reshape(ranks, *shape).unbind(), dim=dim))
        return tuple(whole)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(context: Any, *gradients: torch.Tensor) -> Any:
        group, used, dims, shapes = context.how
        ranks, count = group.size(), len(dims)
        is_trained = context.needs_input_grad[3:]
        sent = []
        for number, is_used in enumerate(used):
            of_one = slice(number * count, (number + 1) * count)
            pieces = [
                torch.stack(gradient.chunk(ranks, dim)).view(ranks, -1)
                for gradient, dim in zip(gradients[of_one], dims, strict=True)
            ]
            sent.append(torch.cat([*pieces, pieces[0].new_full((ranks, 1), float(is_used))], dim=1))
        leaving = torch.stack(sent, dim=1)  # [ranks, experts of one, numbers of one part and whether there are any]
        arrived = torch.empty_like(leaving)
        dist.all_to_all_single(arrived, leaving, group=group)
        experts = arrived.flatten(0, 1)
        any_rows = experts[:, -1].tolist()  # the host waits: what has no gradient is not stepped
        sizes = [shape.numel() for shape in shapes]
        parts: list[torch.Tensor | None] = []
        for number, has_rows in enumerate(any_rows):
            pieces = experts[number, :-1].split(sizes)
            for place, (piece, shape) in enumerate(zip(pieces, shapes, strict=True)):
                trained = has_rows and is_trained[number * count + place]
                parts.append(piece.view(shape).clone() if trained else None)
        return None, None, None, *parts
