"""Which devices a run on this machine can use, without importing torch."""

from __future__ import annotations

import os
import re
from importlib import metadata
from pathlib import Path


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
    if "+cpu" in metadata.version("torch"):
        return 0
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return sum(1 for node in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", node.name))
    count = 0
    for entry in chosen.split(","):
        # CUDA stops reading at the first entry that names no device.
        if not re.fullmatch(r"\d+|(GPU|MIG)-.+", entry.strip()):
            break
        count += 1
    return count
