"""Parameters, gradients and optimizer state on dp x mp: each rank's part, its bytes, checkpoints for other meshes."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import Commands, assert_same_curve
from tests.support.ranks import start, torchrun

ODD = {"hidden_size": 36, "head_dim": 10, "intermediate_size": 49, "vocab_size": 67, "num_layers": 2}
EVEN = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 64, "num_layers": 2, "num_kv_heads": 4}
COMMON = (
    *("data=synthetic", "data.seq_len=17", "data.batch_size=8", "data.vocab_size=64"),
    *(f"model.{size}={value}" for size, value in ODD.items()),
    *("trainer.accelerator=cpu", "trainer.max_steps=4", "trainer.gradient_clip_val=0.5"),
    *("checkpoint.every_n_steps=2", "checkpoint.keep_last=-1", "trainer.enable_progress_bar=false"),
)


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> Commands:
    return Commands(tmp_path_factory.mktemp("runs"), *COMMON)


ONE, FOUR = "mesh=1", "mesh=2x2 mp=seq_parallel dp=fsdp"


@pytest.mark.parametrize(
    ("first", "then"),
    [
        pytest.param(FOUR, "mesh=1x2 mp=tensor_parallel", id="2x2-to-1x2"),
        pytest.param(ONE, "mesh=2x2 mp=tensor_parallel dp=zero2", id="1x1-to-2x2", marks=pytest.mark.full),
        # Each of these mends or cuts along one axis only, as one of these does.
        pytest.param(FOUR, "mesh=1", id="2x2-to-1x1", marks=pytest.mark.every),
        pytest.param("mesh=4 dp=fsdp", FOUR, id="4x1-to-2x2", marks=pytest.mark.every),
    ],
)
def test_a_run_goes_on_on_another_mesh(command: Commands, first: str, then: str) -> None:
    whole, half = command(ONE), command(*first.split())
    assert_same_curve(half, whole)
    rest = command(*then.split(), f"ckpt_path={half.checkpoint_at(2)}")
    assert_same_curve(rest, whole, after=2)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.every)])
def test_parts_of_ranks(tmp_path: Path, ranks: int) -> None:
    done = start(torchrun(ranks, __file__, str(tmp_path)), timeout=120)
    assert done.returncode == 0, done.stdout[-4000:]
    for rank in range(ranks):
        results = json.loads((tmp_path / f"{rank}.json").read_text())
        assert results["layouts"] == []
        assert len(results["bytes"]) == (2 if ranks == 2 else 6)
        for case, (used, allowed) in results["bytes"].items():
            for what, size in used.items():
                assert 0 < size <= allowed[what], (case, what)


def run_rank(directory: Path) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    layouts: list[str] = []
    sizes = {}
    for dp, mp in ((1, ranks), (2, 2)) if ranks == 4 else ((1, 2),):
        for level in (0, 1, 2, 3) if dp > 1 else (3,):
            for plan in ("tensor_parallel", "seq_parallel"):
                layouts += wrong_parts(dp, mp, level, plan)
                if dp == 1 or plan == "seq_parallel":
                    sizes[f"{dp}x{mp} {plan} level {level}"] = bytes_of_a_step(dp, mp, level, plan)
    (directory / f"{dist.get_rank()}.json").write_text(json.dumps({"layouts": layouts, "bytes": sizes}))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


def applied(sizes: dict[str, int], dp: int, mp: int, level: int, plan: str) -> tuple[Any, Any, Any, Any]:
    """(whole model of one process, the same divided, what was done to it, the mesh)."""
    import torch

    from autolaunch.config.schema import LLAMA_PLANS
    from autolaunch.models.llama import Llama
    from autolaunch.models.llama_config import llama_config
    from autolaunch_strategies.apply.order import apply_parallelism
    from autolaunch_strategies.config import parallel_config
    from autolaunch_strategies.mesh.rank_mesh import RankMesh
    from autolaunch_strategies.model.construction import Construction
    from autolaunch_strategies.model.materialise import materialise

    config = parallel_config({"dp": dp, "mp": mp}, level, plan)
    mesh = RankMesh.build(config.mesh, *config.dp.split(dp), "cpu")
    models = []
    for _ in range(2):
        construction = Construction(5)
        with construction.recording():
            models.append(Llama(llama_config({"size": "debug", **sizes})))
        models.append(construction)
    whole, first, divided, second = models
    first.remember(whole)
    materialise(whole, torch.device("cpu"), first)
    done = apply_parallelism(divided, config, mesh, torch.device("cpu"), second, own_plan=LLAMA_PLANS[plan])
    return whole, divided, done, mesh


def wrong_parts(dp: int, mp: int, level: int, plan: str) -> list[str]:
    """Parameters whose part on this rank is not that of the whole: cut along mp first, then the rows along dp."""
    import torch
    from torch.distributed.tensor import DTensor

    whole, divided, _, mesh = applied(ODD, dp, mp, level, plan)
    row_wise, column_wise = ("o_proj", "down_proj"), ("embed_tokens", "q_proj", "k_proj", "v_proj", "gate_proj")
    column_wise += ("up_proj", "lm_head")
    wrong = []
    for (name, expected), found in zip(whole.named_parameters(), divided.parameters(), strict=True):
        part = expected.detach()
        module = name.split(".")[-2]
        if module in (*row_wise, *column_wise):
            parts = part.chunk(mp, dim=1 if module in row_wise else 0)
            part = parts[mesh.coordinate["mp"]]
        if level >= 1 and dp > 1:  # of levels 1 and 2, too, between steps
            parts = part.chunk(dp)
            rank = mesh.coordinate["dp"]
            part = parts[rank] if rank < len(parts) else part[:0]
        local = found.to_local() if isinstance(found, DTensor) else found
        if not torch.equal(local.detach(), part):
            wrong.append(f"{dp}x{mp} level {level} {plan}: {name}: {tuple(local.shape)}, not {tuple(part.shape)}")
    return wrong


def bytes_of_a_step(dp: int, mp: int, level: int, plan: str) -> tuple[dict[str, int], dict[str, int]]:
    """(bytes that this rank holds, bytes that it may hold) of parameters, gradients and optimizer state."""
    import torch
    from torch.distributed.tensor import DTensor
    from torch.nn import functional as F

    whole, divided, done, _ = applied(EVEN, dp, mp, level, plan)
    optimizer = torch.optim.Adam(divided.parameters(), lr=1e-3)
    tokens = torch.randint(0, 64, (2, 9))
    with done.model_parallel.running():
        loss = F.cross_entropy(divided(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    done.data_parallel.finish_backward()
    optimizer.step()

    def held(tensors: Any) -> int:
        local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
        storages = {item.untyped_storage().data_ptr(): item.untyped_storage().nbytes() for item in local if item.dim()}
        return sum(storages.values())

    planned = sum(p.nbytes for name, p in whole.named_parameters() if "norm" not in name)
    rest = sum(p.nbytes for p in whole.parameters()) - planned
    allowed = planned // mp + rest
    shares = {"parameters": dp if level == 3 else 1, "gradients": dp if level >= 2 else 1}
    state = [
        value for values in optimizer.state.values() for value in values.values() if isinstance(value, torch.Tensor)
    ]
    used = {
        "parameters": held(divided.parameters()),
        "gradients": held(p.grad for p in divided.parameters()),
        "optimizer state": held(state),
    }
    return used, {
        "parameters": allowed // shares["parameters"],
        "gradients": allowed // shares["gradients"],
        "optimizer state": 2 * allowed // (dp if level >= 1 else 1),
    }


if __name__ == "__main__":
    run_rank(Path(sys.argv[1]))
