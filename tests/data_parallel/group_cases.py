"""A model some of whose parameters stand on fewer ranks than the others, as experts do: cases for four ranks.

Run by `test_gradient_groups.py` through `tests.support.ranks.Group`.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd, reduce_scatter_tensor_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from autolaunch_strategies.config import DataParallel, parse_mesh
from autolaunch_strategies.data_parallel.gradients import gradient_norm, scale_gradients
from autolaunch_strategies.data_parallel.groups import GradientGroup
from autolaunch_strategies.data_parallel.sharding import apply_data_parallel
from autolaunch_strategies.mesh.rank_mesh import RankMesh
from autolaunch_strategies.model.blocks import find_blocks
from tests.support.cases import serve

RANKS, WIDTH, EXPERTS, ROWS = 4, 6, 4, 16


class Experts(nn.Module):
    """The sum of what experts make of each row. Over ranks each has some of them, and computes on all rows of all."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not isinstance(self.weight, DTensor):
            return torch.tanh(x @ self.weight).sum(dim=0)
        group = self.weight.device_mesh["ep"].get_group()
        rows = all_gather_tensor_autograd(x, 0, group)
        return reduce_scatter_tensor_autograd(torch.tanh(rows @ self.weight.to_local()).sum(dim=0), "sum", 0, group)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.experts = nn.Linear(WIDTH, WIDTH), Experts()
        self.gain = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.gain * self.experts(self.enter(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.experts, self.head = Experts(), nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(self.experts(x))


def spread_experts(model: Model, mesh: DeviceMesh) -> dict[str, GradientGroup]:
    """Give each rank of ep its experts; they are the same along efsdp."""
    for module in model.modules():
        if isinstance(module, Experts):
            module.weight = nn.Parameter(distribute_tensor(module.weight.detach(), mesh["ep"], [Shard(0)]))
    replicas = mesh["efsdp"]
    group = GradientGroup(replicas.get_group() if replicas.size() > 1 else None, RANKS, replicas)
    return {name: group for name, _ in model.named_parameters() if name.endswith("experts.weight")}


def loss_of(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    return model(rows).square().mean()


def whole(tensor: torch.Tensor) -> list[Any]:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).tolist()


def alone() -> dict[str, Any]:
    """Two steps of one process."""
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    norms, gradients = [], []
    for step in range(2):
        loss_of(model, data(step)).backward()
        norms.append(gradient_norm(model.parameters()).item())
        gradients.append({name: whole(parameter.grad) for name, parameter in model.named_parameters()})
        scale_gradients(model.parameters(), torch.tensor(norms[-1]), norms[-1] / 2)
        optimizer.step()
        optimizer.zero_grad()
    return {"norms": norms, "gradients": gradients, "weights": {n: whole(p) for n, p in model.named_parameters()}}


def data(step: int) -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))


def over_ranks(level: int, ep: int) -> dict[str, Any]:
    """The same two steps, each in two parts, with experts over `ep` ranks and all else over all."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    mesh = RankMesh.build(parse_mesh(str(RANKS)), 1, RANKS, "cpu")
    model = Model()
    groups = spread_experts(model, init_device_mesh("cpu", (RANKS // ep, ep), mesh_dim_names=("efsdp", "ep")))
    applied = apply_data_parallel(model, find_blocks(model), mesh, DataParallel(sharding_level=level), groups)
    applied.begin()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    norms, gradients = [], []
    for step in range(2):
        first, second = data(step).chunk(RANKS)[mesh.rank].chunk(2)
        with applied.accumulating():
            (loss_of(model, first) / 2).backward()
            applied.finish_backward()
        (loss_of(model, second) / 2).backward()
        applied.finish_backward()
        norm = gradient_norm(model.parameters())
        norms.append(norm.item())
        gradients.append({name: whole(parameter.grad) for name, parameter in model.named_parameters()})
        scale_gradients(model.parameters(), norm, norms[-1] / 2)
        optimizer.step()
        applied.end_step()
        optimizer.zero_grad()
    return {"norms": norms, "gradients": gradients, "weights": {n: whole(p) for n, p in model.named_parameters()}}


CASES = [(level, ep) for level in range(4) for ep in (2, 4)]
GROUPS = {
    "alone": {"alone": alone},
    "over_ranks": {f"level{level}_ep{ep}": functools.partial(over_ranks, level, ep) for level, ep in CASES},
}

if __name__ == "__main__":
    serve(GROUPS)
