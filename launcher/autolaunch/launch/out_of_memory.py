"""What is said of a device that ran out of memory: in which part of a step, and which keys take less."""

from __future__ import annotations

import re
import traceback
from collections.abc import Mapping
from typing import Any

OUT_OF_MEMORY = (
    r"OutOfMemory|out of memory|can't allocate memory|cannot allocate memory|CUBLAS_STATUS_ALLOC_FAILED|MemoryError"
)
"""What allocators say, whatever the case of its letters; in the line that names a failure."""

_SAID = re.compile(OUT_OF_MEMORY, re.IGNORECASE)

_PHASES = {
    ("lightning/strategy.py", "_parallelize"): "while the model got its place on the device",
    ("lightning/strategy.py", "training_step"): "in the forward pass of a training step",
    ("pipeline/run.py", "_backward"): "in the backward pass of a training step",
    ("lightning/strategy.py", "backward"): "in the backward pass of a training step",
    ("lightning/strategy.py", "optimizer_step"): "in the step of the optimizer",
    ("lightning/strategy.py", "save_checkpoint"): "while a checkpoint was written",
    ("lightning/strategy.py", "load_checkpoint"): "while a checkpoint was loaded",
    ("lightning/strategy.py", "validation_step"): "in a validation step",
    ("lightning/strategy.py", "test_step"): "in a test step",
    ("lightning/strategy.py", "predict_step"): "in a prediction",
}
"""(end of the file, function) -> the part of a run; the innermost frame of these counts."""

_OF_STATE = ("while the model got its place on the device", "in the step of the optimizer")
"""Where it is not activations that take the memory."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device, or the host, has no memory left."""
    return isinstance(error, MemoryError) or _SAID.search(f"{type(error).__name__}: {error}") is not None


def advice(error: BaseException, config: Mapping[str, Any] | None) -> str:
    """In which part of the run memory ran out, and the lines that take less; empty if `error` is another one.

    Args:
        config: of the job; without it no lines are given.
    """
    if not is_out_of_memory(error):
        return ""
    phase = phase_of(error)
    lines = [] if config is None else _lines(config, phase)
    text = f"out of memory {phase}".rstrip()
    if lines:
        width = max(len(line) for line, _ in lines)
        text += "; what takes less, one or several of:"
        text += "".join(f"\n  {line:{width}}  {why}" for line, why in lines)
    return text


def phase_of(error: BaseException) -> str:
    """In which part of a run `error` was raised, in words; empty if it was in none of them."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        for (file, function), phase in _PHASES.items():
            if frame.name == function and frame.filename.endswith(f"autolaunch_strategies/{file}"):
                return phase
    return ""


def _lines(config: Mapping[str, Any], phase: str) -> list[tuple[str, str]]:
    mesh, dp, data = config["mesh"], config["dp"], config["data"]
    lines = []
    if phase not in _OF_STATE:
        if config["task"] == "fit" and config["recompute"] in ("none", "selective", "budget", "offload"):
            lines.append(("recompute=full", "activations are computed again, a block at a time"))
        twice = 2 * data.get("microbatches", 0)
        if twice and data.get("batch_size", 0) % (mesh["dp"] * twice) == 0:
            lines.append((f"data.microbatches={twice}", "half as many samples at a time, the same optimizer step"))
    if mesh["dp"] * mesh["cp"] > 1 and dp["sharding_level"] < 3:
        lines.append(("dp=fsdp", "each rank along dp holds its part of parameters, gradients and optimizer state"))
    elif not dp["cpu_offload"] and dp["sharding_level"] > 0 and config["task"] == "fit":
        lines.append(("dp.cpu_offload=true", "parameters, gradients and optimizer state in host memory; slower"))
    lines.append(("mesh=...", "more devices, or more of them along mp, pp or cp; `autolaunch plan` shows the memory"))
    return lines
