"""Cases of the zoo with `mp=auto`: each trains a model for three steps.

The group `none` is one plain process that has nothing of ours but the initial weights; the others are meshes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from autolaunch_strategies.apply.order import apply_parallelism
from autolaunch_strategies.config import ParallelConfig, parallel_config, parse_mesh
from autolaunch_strategies.data_parallel.gradients import gradient_norm, scale_gradients
from autolaunch_strategies.mesh.rank_mesh import RankMesh
from autolaunch_strategies.model.construction import Construction
from autolaunch_strategies.model.materialise import materialise
from autolaunch_strategies.tensor.views import plain
from tests.support.cases import no_compiler, serve
from tests.support.zoo import NAMES, batch, loss, make

STEPS = 3


class Warnings(logging.Handler):
    """What the engine warned about."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def built(name: str) -> tuple[nn.Module, Construction]:
    construction = Construction(seed=3)
    with construction.recording():
        model = make(name)
    return model, construction


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


Batches = list[dict[str, torch.Tensor]]
LossOf = Callable[[nn.Module, dict[str, torch.Tensor]], torch.Tensor]


def trained_plain(made: tuple[nn.Module, Construction], batches: Batches, loss_of: LossOf, lr: float) -> dict[str, Any]:
    """Losses, gradient norms and weights of one process that has nothing of ours but the initial weights."""
    model, construction = made
    construction.remember(model)
    materialise(model, torch.device("cpu"), construction)
    steps = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    losses, norms = [], []
    for data in batches:
        steps.zero_grad()
        value = loss_of(model, data)
        value.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        steps.step()
        losses.append(float(value))
    return {"losses": losses, "norms": norms, "weights": {key: whole(p) for key, p in model.named_parameters()}}


def trained_on(
    config: ParallelConfig, made: tuple[nn.Module, Construction], batches: Batches, loss_of: LossOf, lr: float
) -> dict[str, Any]:
    """The same on a mesh; and `held`, the share of the parameters, and `rules`, the account of mp."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    ranks = RankMesh.build(config.mesh, *config.dp.split(config.mesh.dp), "cpu")
    model, construction = made
    count = sum(parameter.numel() for parameter in model.parameters())
    applied = apply_parallelism(model, config, ranks, torch.device("cpu"), construction)
    held = torch.tensor(sum(whole_part(parameter) for parameter in model.parameters()))
    if config.dp.sharding_level == 3 and (replicas := ranks.group("dp")) is not None:
        dist.all_reduce(held, group=replicas)  # which share unevenly what does not divide
    steps = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    losses, norms = [], []
    for data in batches:
        own = {key: value.chunk(config.mesh.dp)[ranks.coordinate["dp"]] for key, value in data.items()}
        steps.zero_grad()
        with applied.running():
            value = plain(loss_of(model, own))
            value.backward()
        applied.data_parallel.finish_backward()
        norm = gradient_norm(model.parameters())
        scale_gradients(model.parameters(), norm, 0.5)
        steps.step()
        mean = value.detach().clone()
        dist.all_reduce(mean)
        losses.append(float(mean) / dist.get_world_size())
        norms.append(float(norm))
    return {
        "losses": losses,
        "norms": norms,
        "weights": {key: whole(parameter) for key, parameter in model.named_parameters()},
        "held": int(held) / count,
        "rules": applied.account["mp"],
        "compile": applied.now()["compile"],
    }


def whole_part(parameter: torch.Tensor) -> int:
    """How many numbers of a parameter this rank holds."""
    return (parameter.to_local() if isinstance(parameter, DTensor) else parameter).numel()


def batches(name: str) -> Batches:
    generator = torch.Generator().manual_seed(0)
    return [batch(name, generator) for _ in range(STEPS)]


def train_plain(name: str) -> dict[str, Any]:
    return trained_plain(built(name), batches(name), partial(loss, name), 0.1)


def on_mesh(name: str, mesh: str, way: str) -> dict[str, Any]:
    said = Warnings()
    logger = logging.getLogger("autolaunch_strategies")
    logger.addHandler(said)
    _, *more = way.split("-")
    try:
        config = parallel_config(
            parse_mesh(mesh),
            3,
            {"sequence_parallel": way.startswith("sp")},
            compile="compiled" in more,
            recompute=next((key for key in more if key != "compiled"), "none"),
        )
        result = trained_on(config, built(name), batches(name), partial(loss, name), 0.1)
    finally:
        logger.removeHandler(said)
    return result | {"warnings": list(said.said)}


WAYS = ("tp", "sp", "tp-compiled", "sp-compiled", "tp-compiled-selective", "sp-compiled-full")
"""Whether sequences are sharded, too; whether blocks are compiled, and computed again in the backward pass."""

GROUPS: dict[str, dict[str, Any]] = {
    "none": {name: partial(train_plain, name) for name in NAMES},
    **{
        mesh: {f"{name}-{way}": partial(on_mesh, name, mesh, way) for name in NAMES for way in WAYS}
        for mesh in ("1x2", "2x2")
    },
}

if __name__ == "__main__":
    with no_compiler():
        serve(GROUPS, tensors=True)
