"""What a step does on a GPU: it waits for nothing, updates in one pass, and takes its loss of many classes in parts."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from autolaunch_strategies.tensor.vocabulary_loss import vocabulary_cross_entropy
from autolaunch_strategies.training.optimizers import prefer_fused
from tests.launch.test_out_of_memory import FAIL, MEMORY
from tests.lightning.host_sync_cases import STEPS, WARM, fit
from tests.support.one_rank import without_process_group
from tests.support.ranks import start


class RefusesToWait(pl.Callback):
    """Lets CUDA raise an error where the host waits for it, in the steps behind the warm ones."""

    def __init__(self, device: str) -> None:
        self.device, self.steps = device, 0

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        watched = WARM <= trainer.global_step < WARM + STEPS
        self.steps += WARM < trainer.global_step <= WARM + STEPS
        if self.device == "cuda":
            torch.cuda.set_sync_debug_mode("error" if watched else "default")


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_steady_step_waits_for_the_device_nowhere(precision: str, device: str) -> None:
    without_process_group()
    watches = RefusesToWait(device)
    try:
        fit(watches, "gpu" if device == "cuda" else device, precision=precision)
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    assert watches.steps >= STEPS


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_a_fused_update_is_that_of_each_operation_by_itself(kind: type[torch.optim.Adam], device: str) -> None:
    def train(fused: bool) -> list[torch.Tensor]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(64, 128), nn.LayerNorm(128), nn.Linear(128, 64)).to(device)
        optimizer = kind(model.parameters(), lr=1e-2, weight_decay=0.1, foreach=None if fused else True)
        prefer_fused(optimizer)
        assert bool(optimizer.param_groups[0]["fused"]) is fused
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.randn(16, 64).to(device)).square().mean().backward()
            optimizer.step()
        return [parameter.detach() for parameter in model.parameters()]

    for one, another in zip(train(True), train(False), strict=True):
        torch.testing.assert_close(one, another, rtol=1e-5, atol=1e-6)


@pytest.fixture
def alone(device: str) -> Iterator[dist.ProcessGroup]:
    """The group of this process; ended, since others make their own."""
    without_process_group()
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_the_loss_of_128_thousand_classes_is_torchs_own_in_less_memory(alone: dist.ProcessGroup, device: str) -> None:
    rows, classes = (512 if device == "cuda" else 8), 131_072
    torch.manual_seed(1)
    given = torch.randn(rows, classes, dtype=torch.bfloat16).to(device)
    target = torch.randint(0, classes, (rows,)).to(device)
    target[::7] = -100
    leaf = given.double().requires_grad_()
    expected = F.cross_entropy(leaf, target)
    (expected_grad,) = torch.autograd.grad(expected, leaf)
    del leaf

    def measured(own: bool) -> tuple[torch.Tensor, torch.Tensor, int]:
        logits = given.clone().requires_grad_()
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() if device == "cuda" else 0
        with torch.autocast(device, torch.bfloat16):
            loss = vocabulary_cross_entropy(logits, target, alone, classes) if own else F.cross_entropy(logits, target)
        loss.backward()
        assert logits.grad is not None
        peak = torch.cuda.max_memory_allocated() - before if device == "cuda" else 0
        return loss.detach(), logits.grad, peak

    loss, grad, peak = measured(True)
    torch.testing.assert_close(loss.double(), expected.detach(), rtol=1e-5, atol=0)
    torch.testing.assert_close(grad.double(), expected_grad, rtol=1e-2, atol=1e-7)
    if device == "cuda":
        assert peak < measured(False)[2]


def test_a_run_without_memory_ends_in_seconds_and_says_what_takes_less(tmp_path: Path, device: str) -> None:
    kind = "gpu" if device == "cuda" else device
    job = [item for item in FAIL if "accelerator" not in item]
    command = [
        sys.executable,
        "-m",
        "autolaunch",
        *job,
        f"trainer.accelerator={kind}",
        "mesh=1",
        f"output_dir={tmp_path}",
    ]
    begins = time.monotonic()
    done = start(command, cold=True, OUT_OF_MEMORY="0:backward")
    assert done.returncode == 1 and time.monotonic() - begins < 90
    assert MEMORY in done.stdout and "\n  recompute=full " in done.stdout
