"""Which devices a run on this machine can use, without importing torch."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

VISIBLE = "CUDA_VISIBLE_DEVICES"
"""The environment variable that says which GPUs a process may see."""

VISIBLE_ROCM = "HIP_VISIBLE_DEVICES"

ROOT = Path("/")
"""Below which the files of devices are."""

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
    """The GPUs that a process started now would see, as `visible_variable()` names them."""
    version = metadata.version("torch")
    if "+cpu" in version:
        return []
    chosen = os.environ.get(visible_variable())
    if chosen is None:
        return [str(number) for number in range(_rocm_gpus() if "+rocm" in version else _nvidia_gpus())]
    # CUDA stops reading at the first entry that names no device.
    names = (entry.strip() for entry in chosen.split(","))
    return list(itertools.takewhile(lambda name: re.fullmatch(r"\d+|(GPU|MIG)-.+", name), names))


def visible_variable() -> str:
    """The environment variable that chooses among the GPUs: ROCm's own where it is set, which goes before CUDA's."""
    return VISIBLE_ROCM if VISIBLE_ROCM in os.environ else VISIBLE


def _nvidia_gpus() -> int:
    nodes = [node for node in (ROOT / "dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", node.name)]
    if nodes or not (ROOT / "dev/dxg").exists():
        return len(nodes)
    try:  # under WSL one device stands for all, and the driver counts them
        answer = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in answer.stdout.splitlines())


def _rocm_gpus() -> int:
    if not (ROOT / "dev/kfd").exists():
        return 0
    if (kept := os.environ.get("ROCR_VISIBLE_DEVICES")) is not None:  # what it leaves is numbered anew
        return len([entry for entry in kept.split(",") if entry.strip()])
    nodes = (ROOT / "sys/class/kfd/kfd/topology/nodes").glob("*/gpu_id")
    return sum(node.read_text().strip() != "0" for node in nodes)  # 0: a CPU


def gpu_environment(logs: Path, environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Variables that a run on GPUs sets before it imports torch, without those that the user has set in any spelling.

    Segments of memory that grow keep batches of changing sizes from breaking it to pieces; what NCCL did last is
    written beside the logs when a collective takes too long.

    Args:
        logs: where the logs of the run are.
        environ: the environment; None: of this process.
    """
    present = os.environ if environ is None else environ
    usual = {
        ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"): "expandable_segments:True",
        ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"): "2000",
        ("TORCH_NCCL_DUMP_ON_TIMEOUT",): "1",
        ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"): str(logs / "nccl_trace_rank_"),
    }
    return {names[0]: value for names, value in usual.items() if not any(name in present for name in names)}


def gpus_that_answer(gpus: Sequence[str]) -> list[str]:
    """Those of some GPUs on which a new process can compute something, in their order.

    Each is asked by a process of its own: one that hangs, or takes its process with it, says nothing of the others.

    Args:
        gpus: names, as `visible_gpus` gives them.
    """
    probes = [
        subprocess.Popen(
            [sys.executable, "-c", "import torch; assert torch.ones(8, device='cuda').sum().item() == 8"],
            env={**os.environ, visible_variable(): gpu},
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
