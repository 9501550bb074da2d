"""Which devices a run on this machine can use, without importing torch."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

VISIBLE = "CUDA_VISIBLE_DEVICES"
"""The environment variable that says which GPUs a process may see."""

PROBE_SECONDS = 120.0
"""How long a GPU may take to answer; most of it is the import of torch."""


def visible_devices(accelerator: str) -> tuple[str, int | None]:
    """The kind of device that `trainer.accelerator` means here, and how many of them there are.

    Args:
        accelerator: `auto` (GPUs if there are any, else the CPU), `cpu`, `gpu` or `cuda`.

    Returns:
        `("gpu", count)`, where the count may be 0, or `("cpu", None)`: any number of ranks can share a CPU.
    """
    if accelerator == "cpu":
        return "cpu", None
    count = _gpus()
    if accelerator == "auto" and count == 0:
        return "cpu", None
    return "gpu", count


def _gpus() -> int:
    return len(visible_gpus())


def visible_gpus() -> list[str]:
    """The GPUs that a process started now would see, as `CUDA_VISIBLE_DEVICES` names them."""
    if "+cpu" in metadata.version("torch"):
        return []
    chosen = os.environ.get(VISIBLE)
    if chosen is None:
        nodes = [node for node in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", node.name)]
        return [str(number) for number in range(len(nodes))]
    # CUDA stops reading at the first entry that names no device.
    names = (entry.strip() for entry in chosen.split(","))
    return list(itertools.takewhile(lambda name: re.fullmatch(r"\d+|(GPU|MIG)-.+", name), names))


def gpus_that_answer(gpus: Sequence[str]) -> list[str]:
    """Those of some GPUs on which a new process can compute something, in their order.

    Each is asked by a process of its own: one that hangs, or takes its process with it, says nothing of the others.

    Args:
        gpus: names, as `visible_gpus` gives them.
    """
    probes = [
        subprocess.Popen(
            [sys.executable, "-c", "import torch; assert torch.ones(8, device='cuda').sum().item() == 8"],
            env={**os.environ, VISIBLE: gpu},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for gpu in gpus
    ]
    end = time.monotonic() + PROBE_SECONDS
    answering = []
    for gpu, probe in zip(gpus, probes, strict=True):
        try:
            if probe.wait(max(0.0, end - time.monotonic())) == 0:
                answering.append(gpu)
        except subprocess.TimeoutExpired:
            probe.kill()  # not waited for: a process that hangs in its driver cannot be killed
    return answering
