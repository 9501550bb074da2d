"""How a run ended, for whoever started it."""

from __future__ import annotations

from dataclasses import dataclass

from autolaunch.launch.failure import Failure


@dataclass(frozen=True)
class RunEnd:
    """The end of a run: what a person is told, and what the shell gets."""

    status: str
    """`finished`, `failed`, `interrupted` or `timed_out`."""
    exit_code: int
    """0 finished, 1 failed or timed out, 2 a wrong config, 130 Ctrl-C, 143 SIGTERM."""
    failure: Failure | None = None
    """The failure that came first, if a rank failed."""
    message: str = ""
    """What to show a person; empty if the run finished."""
