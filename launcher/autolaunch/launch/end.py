"""How a run ended, for whoever started it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from dataclasses import dataclass
from pathlib import Path

from autolaunch.job import write_beside
from autolaunch.launch.failure import Failure
from autolaunch_strategies.config import as_typed

STOP_SIGNAL = signal.SIGHUP
"""How the parent ends a worker. Lightning puts a handler of its own on SIGTERM, which a rank that hangs never gets to
run; a signal whose action is the kernel's ends it wherever it is."""

STACK_SIGNAL = signal.SIGUSR2
"""How the parent asks a worker where it is. Not SIGUSR1, with which Slurm says that a job is about to be preempted."""

PREEMPTED = os.EX_TEMPFAIL
"""75, the exit code of a run that a signal ended after it had saved: started again with `ckpt_path=last` it goes on."""


@dataclass(frozen=True)
class Stop:
    """A signal ended training between two steps."""

    signum: int
    step: int
    """Optimizer steps that were done."""
    checkpoint: str | None
    """What was written of it."""

    @property
    def exit_code(self) -> int:
        """What the shell gets; Ctrl-C is a person's, who knows what to do next."""
        return PREEMPTED if self.checkpoint is not None and self.signum != signal.SIGINT else 128 + self.signum

    def render(self, output_dir: Path) -> str:
        """The text that a person sees."""
        name = "Ctrl-C" if self.signum == signal.SIGINT else signal.Signals(self.signum).name
        if self.checkpoint is None:
            return f"stopped by {name} after step {self.step}; no checkpoint was written"
        return (
            f"stopped by {name} after step {self.step}; saved in {self.checkpoint}\n"
            f"to go on: the same command with {as_typed('output_dir', output_dir)} ckpt_path=last"
        )


def write_stop(stop: Stop, directory: Path) -> None:
    """Write down, on the first rank, that a signal ended training."""
    write_beside(stop_file(directory), json.dumps(vars(stop)))


def read_stop(directory: Path) -> Stop | None:
    """What `write_stop` wrote; None if it did not."""
    try:
        return Stop(**json.loads(stop_file(directory).read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None


def stop_file(directory: Path) -> Path:
    """Where the first rank writes that a signal ended training."""
    return directory / "stopped.json"


def correct_summary(output_dir: Path, status: str, error: str, *, of_the_run: bool = False) -> None:
    """Have `summary.json` not say `finished`, because what came after it was written ended with an exit code.

    Args:
        of_the_run: `error` is what a person is told of the whole run: more than the first rank knew of a failure.
    """
    path = output_dir / "summary.json"
    with contextlib.suppress(OSError, ValueError):
        summary = json.loads(path.read_text(encoding="utf-8"))
        if summary["status"] == "finished" or (of_the_run and summary["status"] == "failed"):
            status = "interrupted" if status == "interrupted" else "failed"
            write_beside(path, json.dumps({**summary, "status": status, "error": error}, indent=2) + "\n")


@dataclass(frozen=True)
class RunEnd:
    """The end of a run: what a person is told, and what the shell gets."""

    status: str
    """`finished`, `failed`, `interrupted` or `timed_out`; `written` or `submitted` where it has yet to end."""
    exit_code: int
    """0 finished, 1 failed or timed out, 2 a wrong config, 75 ended by a signal and saved, 130 Ctrl-C, 143 SIGTERM."""
    failure: Failure | None = None
    """The failure that came first, if a rank failed."""
    message: str = ""
    """What to show a person; empty if the run finished."""
