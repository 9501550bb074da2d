"""Cases for the tests of `parallelize` with a pipeline: `torchrun ... parallelize_pp_cases.py <directory> <group>`.

Every case trains the same thing on one process (this one, plain) and on the mesh, and compares. Every rank writes
`<case>.<rank>.json` there. The first case that raises ends its start, since the ranks may stand at different places.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from parallelize_cases import PADDLE_SEQUENCE, RANK, START, TENSOR, assert_same_weights, batches, full, llama
from torch import nn
from torch.nn import functional as F

from autolaunch_strategies import ProcessMesh, SplitPoint, clip_grad_norm_, parallelize

GROUPS: dict[str, dict[str, Callable[[], Any]]] = {}


def case(group: str, function: Callable[[], Any], name: str = "") -> None:
    GROUPS.setdefault(group, {})[name or function.__name__] = function


def cases(group: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    def add(function: Callable[[], Any]) -> Callable[[], Any]:
        case(group, function)
        return function

    return add


def mesh_of(dp: int = 1, mp: int = 1, pp: int = 1) -> ProcessMesh:
    """As in Paddle's examples: pp is the innermost axis."""
    return ProcessMesh(torch.arange(dp * mp * pp).view(dp, mp, pp).tolist(), ["dp", "mp", "pp"])


def token_loss(model: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tokens: F.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten())


def train_alone(model: nn.Module, optimizer: Any, data: list[torch.Tensor], parts: int) -> list[list[float]]:
    """[sum of losses, norm of all gradients] of every step, each of `parts` backward passes."""
    told, step = [], token_loss(model)
    for tokens in data:
        total = 0.0
        for part in tokens.chunk(parts):
            loss = step(part)
            loss.backward()
            total += loss.item()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        told.append([total, norm.item()])
    return told


def train_in_stages(
    model: Any, optimizer: Any, data: list[torch.Tensor], parts: int, mesh: ProcessMesh
) -> list[list[float]]:
    told, step = [], token_loss(model)
    dp, place = mesh.axis_size("dp"), mesh.coordinate(RANK)["dp"]
    for tokens in data:
        total = torch.zeros(())
        for part in tokens.chunk(parts):
            loss = model.forward_backward(step, part.chunk(dp)[place])
            assert loss.shape == () and loss.dtype == torch.float32 and not loss.requires_grad
            total += loss
        norm = clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        told.append([total.item() / mesh.size, norm.item()])
    return told


def parity(
    build: Callable[[], nn.Module],
    dp: int = 1,
    mp: int = 1,
    pp: int = 2,
    level: int = 0,
    plan: Any = None,
    parts: int = 1,
    tolerance: float = 1e-4,
    optimizer_first: bool = True,
    **pp_config: Any,
) -> None:
    torch.manual_seed(3)
    reference = build()
    START.clear()
    START.update({name: parameter.detach().clone() for name, parameter in reference.named_parameters()})
    model, data, mesh = copy.deepcopy(reference), batches(3), mesh_of(dp, mp, pp)
    expected = train_alone(reference, torch.optim.AdamW(reference.parameters(), 1e-2), data, parts)
    config: dict[str, Any] = {"dp_config": {"sharding_level": level}}
    if pp_config:
        config["pp_config"] = pp_config
    if plan:
        config["mp_config"] = {"parallelize_plan": plan}
    if optimizer_first:
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        assert parallelize(model, optimizer, mesh, config) == (model, optimizer)
    else:
        parallelize(model, None, mesh, config)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    found = train_in_stages(model, optimizer, data, parts, mesh)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-5, atol=1e-5)
    assert_same_weights(model, reference, tolerance)
    everywhere: list[Any] = [None] * dist.get_world_size()
    mine = [name for name, _ in model.named_parameters()]
    dist.all_gather_object(everywhere, mine)
    assert {name for names in everywhere for name in names} == set(dict(reference.named_parameters()))
    assert all(len(names) < len(list(reference.parameters())) for names in everywhere)
    assert set(model.state_dict()) == set(mine) | ({"lm_head.weight"} & set(model.state_dict()))


def parity_case(group: str, name: str, build: Callable[[], nn.Module] = llama, **more: Any) -> None:
    case(group, lambda: parity(build, **more), name)


def layers(count: int, **more: Any) -> Callable[[], nn.Module]:
    return lambda: llama(num_layers=count, **more)


parity_case("two", "N9_pp2_3_layers", layers(3))
parity_case("two", "N9_pp2_4_layers", layers(4), optimizer_first=False)
parity_case("two", "N12_tied", layers(3, tie_embeddings=True), microbatches=2)
parity_case("two", "accumulation_tied", layers(3, tie_embeddings=True), parts=2)
parity_case("two", "1f1b", layers(4), loss="microbatch", schedule="1f1b", microbatches=4)
parity_case(
    "two", "1f1b_accumulation_tied", layers(4, tie_embeddings=True), loss="microbatch", schedule="1f1b", parts=2
)
parity_case("two", "zbv", layers(4), loss="microbatch", schedule="zbv_zero_bubble")
parity_case("two", "split_spec_prefix", layers(3), split_spec="model.layers")
parity_case("two", "split_spec_list", layers(4), split_spec=["model.layers.0", "model.layers.2"])
parity_case("two", "split_spec_points", layers(4), split_spec={"model.layers.1": SplitPoint.BEGINNING})
for level in range(4):
    parity_case(
        "four",
        f"dp2_pp2_level{level}",
        layers(3, tie_embeddings=level % 2 == 1),
        dp=2,
        level=level,
        parts=1 + level // 2,
    )
    parity_case(
        "four",
        f"dp2_pp2_level{level}_1f1b",
        layers(2),
        dp=2,
        level=level,
        loss="microbatch",
        schedule="1f1b",
        parts=2 - level // 2,
    )
parity_case("four", "mp2_pp2", layers(2), mp=2, plan=TENSOR)
parity_case("four", "mp2_pp2_1f1b", layers(3), mp=2, plan=TENSOR, loss="microbatch", schedule="1f1b")
parity_case("four", "mp2_pp2_tied", layers(3, tie_embeddings=True), mp=2, plan=TENSOR, parts=2)
for level in (1, 3):
    parity_case(
        "eight",
        f"N10_dp2_mp2_pp2_level{level}",
        layers(4),
        dp=2,
        mp=2,
        level=level,
        plan=PADDLE_SEQUENCE,
        split_spec="model.layers",
    )


def main(directory: Path, group: str) -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    dist.init_process_group("gloo")
    chosen = sys.argv[3:]
    for name, function in GROUPS[group].items():
        if chosen and name not in chosen:
            continue
        written = None
        try:
            written = {"result": function()}
        except Exception as error:
            written = {"error": str(error), "traceback": traceback.format_exc()}
        (directory / f"{name}.{RANK}.json").write_text(json.dumps(written))
        if "error" in written:
            print(written["traceback"], flush=True)
            os._exit(1)
    sys.stdout.flush()
    dist.barrier()
    os._exit(0)  # gloo aborts if meshes outlive the process group


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
