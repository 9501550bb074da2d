"""Cases of the zoo in stages: loss and gradients of one step; a case is `<family>:<pp>`, a group a mesh."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from autolaunch_strategies.apply.order import apply_parallelism
from autolaunch_strategies.config import ConfigError, parallel_config, parse_mesh
from autolaunch_strategies.loop.staged import forward_backward_of
from autolaunch_strategies.mesh.rank_mesh import RankMesh
from autolaunch_strategies.tensor.views import plain
from tests.support.cases import serve
from tests.support.zoo import CHANGED, MORE, NAMES, batch_of, gradients, made, step_of

CPU = torch.device("cpu")


def run(name: str, mesh: str, pp: str) -> dict[str, Any]:
    alone = made(name)
    loss = step_of(name, alone)(batch_of(name))
    loss.backward()
    config = parallel_config(parse_mesh(mesh), 0, {"sequence_parallel": True}, pp)
    ranks = RankMesh.build(config.mesh, *config.dp.split(config.mesh.dp), "cpu")
    model = made(name)
    applied = apply_parallelism(model, config, ranks, CPU)
    share = config.mesh.dp, ranks.coordinate["dp"]
    data = {key: value.chunk(share[0])[share[1]] for key, value in batch_of(name).items()}
    forward_backward = forward_backward_of(model, applied.pipeline, applied.data_parallel)
    with applied.model_parallel.running():
        found = forward_backward(lambda data: plain(step_of(name, model)(data)), data)
    dist.all_reduce(found)
    return {
        "expected": (loss.detach(), gradients(alone)),
        "found": (found / dist.get_world_size(), gradients(model)),
        "stages": applied.account["pp"]["stages"],
    }


def told_or(function: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What a function returns, or what it was refused with."""
    try:
        return function()
    except ConfigError as error:
        return {"refused": str(error)}


def case(mesh: str, name: str, pp: str) -> dict[str, Any]:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return told_or(lambda: run(name, mesh, pp))


DEEP = ("llama_4", "gpt2_4", "qwen3_moe_4")
"""Families with as many blocks as schedules of several stages need."""

EXACT = [name for name in (*NAMES, *MORE, *CHANGED) if name not in DEEP]
MESHES: dict[str, tuple[str, int, list[str]]] = {
    "pp2": (
        "1x1x2",
        2,
        [f"{name}:exact" for name in EXACT]
        + [f"{name}:{pp}" for name in DEEP for pp in ("1f1b", "interleaved_1f1b", "zbv_zero_bubble")],
    ),
    "mp2pp2": (
        "1x2x2",
        4,
        ["llama_4:exact", "gpt2_4:exact", "gemma2:exact", "qwen3_moe_router_logits:exact", "t5:exact", "llama_4:1f1b"],
    ),
}
"""Name of a group -> mesh, ranks, cases."""

GROUPS = {
    group: {name: partial(case, mesh, *name.split(":")) for name in cases} for group, (mesh, _, cases) in MESHES.items()
}

if __name__ == "__main__":
    serve(GROUPS, tensors=True)
