"""Two to eight GPUs through the real command: meshes over NCCL, and what ends a run whose ranks do not all go on."""

from __future__ import annotations

import time
from math import prod
from pathlib import Path

import pytest
import torch

from tests.cli.test_hangs import HANGS
from tests.launch.test_out_of_memory import FAIL, MEMORY
from tests.support.commands import Commands, Run, assert_same_curve

pytestmark = pytest.mark.timeout(900)
TINY = (
    *("model=llama", "data=synthetic", "model.num_layers=4", "model.hidden_size=64", "model.intermediate_size=128"),
    *("model.num_heads=4", "model.num_kv_heads=2", "data.seq_len=64", "data.batch_size=8", "precision=32-true"),
    *("trainer.enable_progress_bar=false", "checkpoint.enabled=false"),
)
MESHES = [
    "mesh=2 dp=fsdp", "mesh=2 dp=ddp", "mesh=2 dp=zero2", "mesh=1x2 mp=tensor_parallel", "mesh=1x2 mp=seq_parallel",
    "mesh=1x1x2 pp=exact", "mesh=1x1x2 pp=1f1b", "mesh=1x1x2 pp=interleaved_1f1b", "mesh=1x1x2 pp=zbv_zero_bubble",
    "mesh=1x1x2 pp=dualpipev", "mesh=cp2 cp=ring", "mesh=cp2 cp=gather", "mesh=cp2 cp=ulysses",
    "mesh=2x2 mp=seq_parallel", "mesh=2x1x2 pp=1f1b", "mesh=1x1x4 pp=1f1b", "mesh=1x2x2 mp=seq_parallel pp=1f1b",
    "mesh=cp4 cp=ring", "mesh=4 dp=hsdp dp.replicate=2", "mesh=2x2x2 mp=seq_parallel pp=1f1b",
]  # fmt: skip
"""The first of them on the CPU, too, where the tests of every axis try the others."""


def size_of(keys: str) -> int:
    """How many ranks a mesh has."""
    shape = keys.split()[0].removeprefix("mesh=").removeprefix("cp")
    return prod(map(int, shape.split("x")))


def need(device: str, count: int) -> None:
    if device == "cuda" and torch.cuda.device_count() < count:
        pytest.skip(f"{count} GPUs are needed, {torch.cuda.device_count()} are here")


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory, device: str) -> Commands:
    directory = tmp_path_factory.mktemp("several")
    (directory / "hangs.py").write_text(HANGS)
    kind = "gpu" if device == "cuda" else device
    return Commands(directory, *TINY, f"trainer.accelerator={kind}", timeout=300, TORCH_ALLOW_TF32_CUBLAS_OVERRIDE="0")


def run(command: Commands, device: str, *keys: str, code: int = 0) -> Run:
    """An ended command: on GPUs in processes of their own, since CUDA must not come from a fork."""
    return command(*keys, code=code, cold=device == "cuda")


@pytest.mark.parametrize(
    ("device", "keys"),
    [("cuda", keys) for keys in MESHES] + [pytest.param("cpu", MESHES[0], marks=pytest.mark.full)],
    scope="module",
)
def test_a_mesh_trains_as_one_device_does(command: Commands, device: str, keys: str) -> None:
    need(device, size_of(keys))
    assert_same_curve(
        run(command, device, *keys.split(), "trainer.max_steps=5"),
        run(command, device, "mesh=1", "trainer.max_steps=5"),
    )


def test_a_rank_that_is_killed_ends_the_run(command: Commands, device: str) -> None:
    need(device, 2)
    begins = time.monotonic()
    hangs = "callbacks.hangs={_target_: hangs.Hangs, rank: 1, how: killed}"
    ended = run(command, device, "mesh=2", "trainer.max_steps=8", hangs, code=1)
    assert ended.summary["status"] == "failed" and "rank 1" in ended.screen
    assert time.monotonic() - begins < 120


def test_a_rank_that_stands_still_is_named(command: Commands, device: str) -> None:
    need(device, 2)
    begins = time.monotonic()
    limits = ("launch.hang_timeout=8", "launch.stop_timeout=2", "trainer.max_steps=8")
    hangs = "callbacks.hangs={_target_: hangs.Hangs, rank: 1, how: sleeps}"
    ended = run(command, device, "mesh=2", *limits, hangs, code=1)
    assert "rank 1 of 2 has not moved for" in ended.screen
    assert time.monotonic() - begins < 180


def test_a_rank_without_memory_ends_the_run_of_all(tmp_path: Path, device: str) -> None:
    need(device, 2)
    job = [item for item in FAIL if "accelerator" not in item]
    kind = "gpu" if device == "cuda" else device
    command = Commands(tmp_path, *job, f"trainer.accelerator={kind}", timeout=300, OUT_OF_MEMORY="1:backward")
    begins = time.monotonic()
    ended = command("mesh=2", "launch.collective_timeout=600", code=1, cold=device == "cuda")
    assert time.monotonic() - begins < 120
    assert f"rank 1 of 2 failed: {MEMORY}" in ended.screen
