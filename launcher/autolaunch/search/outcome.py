"""How a trial ended, read from the directory that it wrote: the process that ran it may be on another machine, or gone.

Torch-free.
"""

from __future__ import annotations

import csv
import json
import math
import re
from pathlib import Path
from typing import Any

from autolaunch.jobs.ends import END_FILE
from autolaunch.launch.out_of_memory import OUT_OF_MEMORY as ALLOCATORS_SAY
from autolaunch_strategies.planner.trials import (
    CRASH,
    HANG,
    LOST,
    MEASURED,
    MISCONFIGURED,
    NOT_A_NUMBER,
    OUT_OF_MEMORY,
    TOO_SLOW,
    WARM_UP,
    Outcome,
)

MEMORY = re.compile(rf"{ALLOCATORS_SAY}|killed by SIGKILL", re.IGNORECASE)
"""What allocators say, and how the kernel ends a process that takes too much; in the line that names the failure."""

CHAINED = re.compile(r"^(torch\.(cuda\.)?OutOfMemoryError|MemoryError)\b", re.MULTILINE)
"""The same as the cause of another exception, in a traceback."""

STILL_MOVING = 3.0
"""Times its longest step that a run may have been silent for when its time was over, to count as slow and not hung."""


def read_outcome(directory: Path, steps: int, launcher_error: str = "") -> Outcome:
    """What the trial in this directory says of its candidate.

    Args:
        directory: the trial's own.
        steps: how many optimizer steps were to be timed, besides the warm-up.
        launcher_error: what the launcher raised, if it did; it counts only where the directory holds no answer.
    """
    end = _json(directory / END_FILE)
    summary = _json(directory / "summary.json")
    rows = _rows(directory / "metrics.csv")
    seconds = tuple(row["step_time_s"] for row in rows if row["step"] > WARM_UP and row["step_time_s"] is not None)
    memory = summary.get("peak_memory_bytes")
    status = end.get("status")
    bad = next((row for row in rows if row["loss"] is not None and not math.isfinite(row["loss"])), None)
    diverged = f"the loss of step {bad['step']} is {bad['loss']}" if bad else ""
    if status is None:
        # A job that was cut off by its queue may have done all that it was asked for.
        if summary.get("status") != "finished":
            return Outcome(LOST, launcher_error or "the process that ran it ended without a word")
    elif status == "misconfigured" or end.get("exit_code") == 2:
        return Outcome(MISCONFIGURED, _first_line(end.get("message", "")) or "the launcher refuses this configuration")
    elif status == "timed_out":
        reason = _first_line(end.get("message", "")) or "it ran into its time limit"
        silent = (directory / END_FILE).stat().st_mtime - _written(directory / "metrics.csv")
        moving = bool(seconds) and len(seconds) < steps and silent < STILL_MOVING * max(seconds)
        return Outcome(TOO_SLOW, reason, seconds) if moving else Outcome(HANG, reason)
    elif status != "finished":
        message = str(end.get("message", ""))
        reason = _first_line(message) or str(summary.get("error") or status)
        full = MEMORY.search(reason) or CHAINED.search(message)
        if full or status == "interrupted" or not diverged:  # what diverges fails, too
            kind = OUT_OF_MEMORY if full else LOST if status == "interrupted" else CRASH
            return Outcome(kind, reason, memory_bytes=memory)
    if diverged:
        return Outcome(NOT_A_NUMBER, diverged, memory_bytes=memory)
    if not seconds:
        done = summary.get("steps")
        return Outcome(CRASH, f"it finished, but after {done} steps: more than {WARM_UP} are needed for a time")
    tokens = [row["tokens"] for row in rows if row["tokens"] is not None]
    per_step = (tokens[-1] - tokens[0]) / (len(tokens) - 1) if len(tokens) > 1 else None
    per_second = per_step / (sum(seconds) / len(seconds)) if per_step else None
    return Outcome(MEASURED, "", seconds, per_second, memory)


def _rows(path: Path) -> list[dict[str, Any]]:
    """Step, loss, tokens and seconds of every whole row; a number that is absent is None."""
    rows = []
    if path.is_file():
        with path.open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                # A process that was killed while writing leaves half a row behind.
                if row.get("step", "").isdecimal() and None not in row.values():
                    numbers = {name: float(row[name]) if row[name] else None for name in ("loss", "step_time_s")}
                    tokens = int(row["tokens"]) if row["tokens"] else None
                    rows.append({"step": int(row["step"]), "tokens": tokens, **numbers})
    return rows


def _json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        return {}
    return values if isinstance(values, dict) else {}


def _written(path: Path) -> float:
    return path.stat().st_mtime if path.is_file() else 0.0


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else ""
