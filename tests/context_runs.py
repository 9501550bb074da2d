"""Starts the cases of `context_cases.py`: one start of N processes for a whole group of cases."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from context_cases import RANKS
from pipeline_runs import MOST_STARTS, Results, _start
from strategy_runs import TESTS, torchrun

SCRIPT = TESTS / "context_cases.py"


def run_group(directory: Path, group: str, shelf: Path, cases: Iterable[str] = (), timeout: float = 400) -> Results:
    """Run a group of cases on as many processes as it takes.

    A case that raises ends its start, since ranks may stand at different places: the others go on in a new one.

    Args:
        shelf: where groups find each other's checkpoints.
        cases: only these of the group; all of them if empty.
        timeout: of one start, in seconds.
    """
    directory.mkdir(parents=True)
    command = [str(SCRIPT), str(directory), group, *cases]
    command = torchrun(RANKS[group], *command) if RANKS[group] > 1 else [sys.executable, *command]
    log, begun = "", directory / "begun"
    begun.touch()
    for _ in range(MOST_STARTS):
        before = begun.read_text().split()
        done, output = _start(command, timeout, {"SHELF": str(shelf), "ENDED": " ".join(before)})
        log += output
        if done == 0:
            return Results(directory, log)
        if begun.read_text().split() == before:  # it did not even come to a case
            break
    raise AssertionError(log[-6000:])
