"""How much memory this process has needed at most."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import torch


def peak_memory_bytes() -> int:
    """Peak memory of this process in bytes: of the GPU's allocator if it uses a GPU, else resident host memory."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return int(torch.cuda.max_memory_allocated())
    return _peak_resident_bytes()


def _peak_resident_bytes() -> int:
    # Linux carries ru_maxrss across exec, so that a worker would report its parent's peak; VmHWM starts anew.
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
