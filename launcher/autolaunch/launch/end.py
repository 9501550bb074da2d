"""How a run ended, for whoever started it."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from autolaunch.launch.failure import Failure

STOP_SIGNAL = signal.SIGHUP
"""How the parent ends a worker. Lightning puts a handler of its own on SIGTERM, which a rank that hangs never gets to
run; a signal whose action is the kernel's ends it wherever it is."""


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
