"""Starts the cases of `pipeline_cases.py`: one start of N processes for a whole group of cases."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from strategy_runs import TESTS, differences, environment, torchrun

SCRIPT = TESTS / "pipeline_cases.py"
MOST_STARTS = 40


class Results:
    """What each rank wrote, by case."""

    def __init__(self, directory: Path, log: str) -> None:
        self.directory, self.log = directory, log

    def read(self, case: str, rank: int = 0) -> Any:
        """What the case returned on a rank. Fails with the case's own traceback if it raised."""
        written = {file.name: json.loads(file.read_text()) for file in sorted(self.directory.glob(f"{case}.*.json"))}
        raised = [f"{name}:\n{item['traceback']}" for name, item in written.items() if "error" in item]
        assert not raised, "\n".join(raised)
        assert f"{case}.{rank}.json" in written, f"{case} has no result on rank {rank}:\n{self.log[-3000:]}"
        return written[f"{case}.{rank}.json"]["result"]


def run_cases(directory: Path, group: str, ranks: int, shelf: Path | None = None, timeout: float = 500) -> Results:
    """Run a group of cases on `ranks` processes.

    A case that raises ends its start, since ranks may stand at different places: the others go on in a new one.

    Args:
        shelf: where groups find each other's checkpoints.
        timeout: of one start, in seconds.
    """
    directory.mkdir(parents=True)
    command = [str(SCRIPT), str(directory), group]
    command = torchrun(ranks, *command) if ranks > 1 else [sys.executable, *command]
    log, begun = "", directory / "begun"
    begun.touch()
    for _ in range(MOST_STARTS):
        before = begun.read_text().split()
        done, output = _start(command, timeout, {"SHELF": str(shelf or directory), "ENDED": " ".join(before)})
        log += output
        if done == 0:
            return Results(directory, log)
        if begun.read_text().split() == before:  # it did not even come to a case
            break
    raise AssertionError(log[-6000:])


def _start(command: list[str], timeout: float, extra: dict[str, str]) -> tuple[int | None, str]:
    """(exit status, or None after `timeout` seconds; output); nothing of it is left afterwards."""
    with subprocess.Popen(
        command, env=environment(**extra), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    ) as process:  # fmt: skip
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            return None, output
    return process.returncode, output


def problems(expected: Results, found: Results, case: str, other: str, ranks: int, tolerance: float) -> list[str]:
    """Where a case on `ranks` ranks differs from the one process: what all ranks know, and what only rank 0 does."""
    one = expected.read(case)
    lines = []
    for rank in range(ranks):
        result = found.read(other, rank)
        for part in ("everywhere", "first") if rank == 0 else ("everywhere",):
            lines += [
                f"rank {rank} {line}" for line in differences(one.get(part), result.get(part), tolerance, f" {part}")
            ]
    return lines
