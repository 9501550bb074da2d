"""A device that runs out of memory ends the run of all ranks within seconds, and says where and what to change."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from autolaunch.launch.out_of_memory import advice
from tests.support.commands import Commands

FAIL = ["model=custom", "model._target_=tests.launch.full_model.model", "data=synthetic", "data.vocab_size=64"]
FAIL += ["data.seq_len=32", "data.batch_size=8", "trainer.max_steps=3", "trainer.accelerator=cpu"]
MEMORY = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"


@pytest.mark.full
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("where", "mesh", "phase", "write"),
    [
        pytest.param(
            "forward", ["mesh=cp2"], "forward pass of a training step", "dp.cpu_offload=true", id="trial-of-cp"
        ),
        pytest.param(
            "backward", ["mesh=dp2xmp2", "dp=zero1"], "backward pass of a training step", "dp=fsdp", id="backward"
        ),
    ],
)
def test_all_ranks_end_when_one_has_no_memory(
    tmp_path: Path, where: str, mesh: list[str], phase: str, write: str
) -> None:
    command = Commands(tmp_path, *FAIL, OUT_OF_MEMORY=f"1:{where}")
    begins = time.monotonic()
    run = command(*mesh, "launch.collective_timeout=600", code=1)
    assert time.monotonic() - begins < 60
    assert f"rank 1 of {4 if 'mp' in mesh[0] else 2} failed: {MEMORY}" in run.screen
    assert f"out of memory in the {phase}; what takes less, one or several of:" in run.screen
    for line in ("recompute=full ", "data.microbatches=2 ", f"{write} ", "mesh=... "):
        assert f"\n  {line}" in run.screen


def test_only_what_helps_is_said() -> None:
    config = {
        "mesh": {"dp": 2, "cp": 1}, "task": "fit", "recompute": "full",
        "dp": {"sharding_level": 3, "cpu_offload": True},
        "data": {"batch_size": 8, "microbatches": 4},
    }  # fmt: skip
    assert advice(ValueError("wrong"), config) == ""
    said = advice(torch.OutOfMemoryError("CUDA out of memory"), config)
    assert [line.split()[0] for line in said.splitlines()[1:]] == ["mesh=..."]
    for error in (MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")):
        assert advice(error, None) == "out of memory"
