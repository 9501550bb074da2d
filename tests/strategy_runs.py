"""Starts the cases of `strategy_cases.py` through torchrun or plain python, and compares what they wrote."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent
SCRIPT = TESTS / "strategy_cases.py"
ROOTS = [str(TESTS.parent / "launcher"), str(TESTS.parent / "strategies")]


def environment(**extra: str) -> dict[str, str]:
    """An environment without any other run's ranks in it."""
    strangers = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "REFERENCE")
    kept = {key: value for key, value in os.environ.items() if key not in strangers}
    path = os.pathsep.join([*ROOTS, kept.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return {**kept, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **extra}


def start(command: list[str], timeout: float = 240, **extra: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end in a session of its own; whatever of it is left after `timeout` seconds is killed."""
    with subprocess.Popen(
        command, env=environment(**extra), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    ) as process:  # fmt: skip
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            raise AssertionError(f"not done after {timeout} s:\n{output[-4000:]}") from None
    return subprocess.CompletedProcess(command, process.returncode, output)


def torchrun(ranks: int, *command: str) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *command]


class Results:
    """What each rank of one start wrote, by case."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def read(self, case: str, rank: int = 0) -> Any:
        """What the case returned on a rank. Fails with the case's own traceback if it raised."""
        written = json.loads((self.directory / f"{case}.{rank}.json").read_text())
        assert "error" not in written, written["traceback"]
        return written["result"]

    def message(self, case: str, rank: int = 0) -> str:
        """The message of the exception that the case raised on a rank."""
        written = json.loads((self.directory / f"{case}.{rank}.json").read_text())
        assert "error" in written, f"{case} raised nothing"
        return written["error"]


def run_cases(directory: Path, group: str, ranks: int, reference: bool = False, shelf: Path | None = None) -> Results:
    """Run a group of cases in one start of `ranks` processes."""
    directory.mkdir(parents=True)
    command = [str(SCRIPT), str(directory), group]
    command = torchrun(ranks, *command) if ranks > 1 else [sys.executable, *command]
    extra = {"REFERENCE": "1"} if reference else {}
    if shelf is not None:
        shelf.mkdir(exist_ok=True)
        extra["CHECKPOINTS"] = str(shelf)
    done = start(command, **extra)
    assert done.returncode == 0, done.stdout[-4000:]
    return Results(directory)


def differences(expected: Any, found: Any, tolerance: float, where: str = "") -> list[str]:
    """Where two JSON values differ: numbers by more than `tolerance` (relative above 1, absolute below)."""
    if isinstance(expected, dict) and isinstance(found, dict):
        both = [(f"{where}.{key}", expected[key], found[key]) for key in expected if key in found]
        lines = [f"{where}.{key} is only on one side" for key in expected.keys() ^ found.keys()]
    elif isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        both = [(f"{where}[{index}]", *pair) for index, pair in enumerate(zip(expected, found, strict=True))]
        lines = []
    elif isinstance(expected, float) and isinstance(found, float | int):
        close = math.isclose(expected, found, rel_tol=tolerance, abs_tol=tolerance)
        return [] if close else [f"{where}: {expected} and {found}"]
    else:
        return [] if expected == found else [f"{where}: {expected!r} and {found!r}"]
    return lines + [line for place, mine, theirs in both for line in differences(mine, theirs, tolerance, place)]
