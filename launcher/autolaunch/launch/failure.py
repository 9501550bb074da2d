"""What went wrong first.

When one rank fails, the others lose their connection to it and fail too, often sooner than it ends. So every rank
writes down its own failure in the moment it catches it, before it tears anything down, and the parent picks the one
that was not somebody else's consequence.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import signal
import socket
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autolaunch.job import write_beside
from autolaunch.launch.out_of_memory import advice
from autolaunch.launch.output_lost import output_lost
from autolaunch_strategies.config import ConfigError, ConfigErrors
from autolaunch_strategies.config.users_traceback import user_traceback

PEER_LOST = re.compile(
    r"connection closed by peer|connection reset by peer|broken pipe|socket timeout|remote worker (crashing|hanging)"
    r"|timed out waiting \d+ms for (recv|send) operation|wait timeout after \d+ms|connectfullmesh failed"
    r"|failed to recv|store.{0,40}tim(ed|eout)|client socket has timed out|ncclremoteerror|remote process exited"
    r"|closed by remote peer|ncclsystemerror|nccl communicator was aborted|collective operation timeout"
    r"|failed on (the last|another) pipeline stage",
    re.IGNORECASE,
)
"""What gloo, NCCL, torch's stores and pipelines say on a rank that is fine itself but waits for one that is not."""

_WAITED = re.compile(r"(?:timed out waiting|wait timeout after) (\d+)ms|Timeout\(ms\)=(\d+)", re.IGNORECASE)
_NATIVE_ABORT = re.compile(r"^Fatal Python error: Aborted$(?![\s\S]*^Current thread)", re.MULTILINE)
"""What `faulthandler` writes of an abort in a thread that never ran Python: one of gloo's or NCCL's."""

VERDICT_SECONDS = 1.0
"""How long the rank that caused it may take to show, when all that is known is that others lost contact with it."""

TAIL_LINES = 20


class RunFailed(RuntimeError):
    """A run that can't go on, told in full by its message: where in the code that was seen tells a person nothing."""


@dataclass(frozen=True)
class Failure:
    """The failure of one rank, as it saw it itself, or as the parent saw it if the rank had no time to speak."""

    rank: int
    world_size: int
    error: str
    """One line: the exception's type and message, or how the process ended."""
    details: str
    """The frames of the user's code in the traceback, or the end of the log; may be empty."""
    log: str
    """Path of the rank's log file."""
    host: str
    pid: int
    time_ns: int
    peer_lost: bool = False
    """The rank only lost contact with another."""
    wrong_config: bool = False
    """`error` is the whole message of a `ConfigError`: a person needs nothing else."""
    others: int = 0
    """How many more ranks failed."""
    advice: str = ""
    """Where memory ran out, and what takes less of it."""

    @property
    def exit_code(self) -> int:
        """What the shell gets: 2 for a wrong config, else 1."""
        return 2 if self.wrong_config else 1

    def render(self) -> str:
        """The text that a person sees."""
        if self.wrong_config:
            return self.error
        who = f"rank {self.rank} of {self.world_size}" if self.world_size > 1 else "the run"
        lines = [f"{who} failed: {self.error}"]
        lines += [self.details] if self.details else []
        lines += [self.advice] if self.advice else []
        lines += [f"log: {self.log}"]
        if self.peer_lost:
            lines.append("this rank only lost contact with another; no rank wrote down an error of its own")
        if self.others:
            lines.append(f"{self.others} more rank{'s' if self.others > 1 else ''} failed after it")
        return "\n".join(lines)


@dataclass(frozen=True)
class Exit:
    """How a worker process ended, as the parent saw it."""

    code: int
    """As `subprocess` counts: the negative number of a signal."""
    pid: int
    time_ns: int
    """A time at which it was still seen alive: errors of ranks that lost contact with it come later."""
    stopped: bool = False
    """The parent told it to end."""
    done: bool = False
    """It reported that its task was done."""
    log_start: int = 0
    """Size of the log before this run."""


def failure_file(directory: Path, rank: int) -> Path:
    """Where a rank writes its failure down."""
    return directory / f"failure_{rank}.json"


def log_file(directory: Path, rank: int) -> Path:
    """The log of a rank."""
    return directory / f"rank_{rank}.log"


def describe(
    error: BaseException, directory: Path, rank: int, world_size: int, config: Mapping[str, Any] | None = None
) -> Failure:
    """The failure that `error` is on this rank, now.

    Args:
        config: of the job, for what is said of memory.
    """
    wrong_config = isinstance(error, (ConfigError, ConfigErrors))
    notes = [str(note) for note in getattr(error, "__notes__", [])]
    lines = traceback.format_exception_only(error)
    lines = lines[: len(lines) - len("\n".join(notes).split("\n"))] if notes else lines
    told = wrong_config or isinstance(error, RunFailed)
    lost = None if wrong_config else output_lost(directory.parent, error)
    peer_lost = lost is None and is_peer_lost(error)
    if lost is not None:
        text = lost
    elif told:
        text = "\n".join([str(error), *notes])
    elif peer_lost:
        text = told_of_peers(str(error))
    else:
        text = "".join(lines[-1:]).strip().split("\n")[0]
    return Failure(
        rank=rank,
        world_size=world_size,
        error=text,
        details="" if told or lost else user_traceback(error),
        log=str(log_file(directory, rank)),
        host=socket.gethostname(),
        pid=os.getpid(),
        time_ns=time.time_ns(),
        peer_lost=peer_lost,
        wrong_config=wrong_config,
        advice="" if told or lost else advice(error, config),
    )


def write_failure(failure: Failure, directory: Path) -> None:
    """Write a rank's own failure down: complete or not at all; not where nothing can be written any more."""
    with contextlib.suppress(OSError):
        write_beside(failure_file(directory, failure.rank), json.dumps(dataclasses.asdict(failure), indent=1))


def is_peer_lost(error: BaseException) -> bool:
    """Whether `error` is the consequence of another rank's end.

    The first error of the chain decides: what is raised while a rank cleans up after an error of its own does not.
    """
    seen: set[int] = set()
    while id(error) not in seen:
        seen.add(id(error))
        error = error.__cause__ or error.__context__ or error
    # A broken connection of the user's own, such as that of a download, is an OSError.
    ours = isinstance(error, RuntimeError) and not isinstance(error, OSError)
    return ours and PEER_LOST.search(str(error)) is not None


def told_of_peers(message: str) -> str:
    """What an error means that says no more than that another rank did not answer, with a place in gloo or NCCL."""
    if match := _WAITED.search(message):
        seconds = int(match[1] or match[2]) / 1000
        return (
            f"another rank did not come to a collective within {seconds:g} s "
            "(launch.collective_timeout; of the first step launch.first_step_timeout)"
        )
    if "pipeline stage" in message:
        return message.splitlines()[0]
    return "lost contact with another rank in a collective: its process has ended, or the network between them failed"


def first_failure(directory: Path, exits: Mapping[int, Exit], world_size: int) -> Failure | None:
    """The failure that the others follow from, or None if nothing failed.

    Args:
        directory: where the ranks wrote their failures.
        exits: how those ranks ended that have ended.
        world_size: how many ranks there are.
    """
    failures = []
    for rank in range(world_size):
        file = failure_file(directory, rank)
        if file.exists():
            failures.append(Failure(**json.loads(file.read_text(encoding="utf-8"))))
        elif rank in exits and not exits[rank].stopped and not (exits[rank].code == 0 and exits[rank].done):
            failures.append(_silent(directory, rank, world_size, exits[rank]))
    if not failures:
        return None
    first = min(failures, key=lambda failure: (failure.peer_lost, failure.time_ns))
    return dataclasses.replace(first, others=len(failures) - 1)


def _silent(directory: Path, rank: int, world_size: int, end: Exit) -> Failure:
    log = log_file(directory, rank)
    lines = tail(log, end.log_start)
    error, peer_lost = _ending(end.code), False
    lost = output_lost(directory.parent) if end.code > 0 else None
    if lost is not None:
        error = lost
    elif end.code == -signal.SIGABRT:
        text = _written_since(log, end.log_start)
        # NCCL's watchdog ends the process of a rank that waited in vain.
        peer_lost = PEER_LOST.search(text) is not None
        if peer_lost:
            error = told_of_peers(text)
        elif _NATIVE_ABORT.search(text):
            error = (
                "its process was aborted by a thread that is not Python's, most likely of gloo or NCCL: a collective "
                "met another one, as when only some ranks run it"
            )
    return Failure(
        rank=rank,
        world_size=world_size,
        error=error,
        details=f"the end of its log:\n{lines}" if lines and not lost else "",
        log=str(log),
        host=socket.gethostname(),
        pid=end.pid,
        time_ns=end.time_ns,
        peer_lost=peer_lost,
    )


def _ending(code: int) -> str:
    if code >= 0:
        return f"it left with exit code {code} before its task was done"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")


def tail(path: Path, start: int = 0) -> str:
    """The last lines of what a log has after its first `start` bytes, or its last crash; empty if there is no log."""
    # After the stacks of a fatal error, a line of several thousand characters.
    text = _written_since(path, start).rstrip()
    lines = [line for line in text.splitlines() if not line.startswith("Extension modules: ")]
    crashes = [number for number, line in enumerate(lines) if line.startswith("Fatal Python error")]
    if crashes:  # where it was stands first, and who called it below
        return "\n".join(lines[crashes[-1] :][:TAIL_LINES])
    return "\n".join(lines[-TAIL_LINES:])


def _written_since(path: Path, start: int) -> str:
    """The end of a log, of what was written after its first `start` bytes, 64 KiB at most."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(start, size - 65536))
            return file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""


def show(failure: Failure) -> None:
    """Print a failure to stderr, for ranks whose parent is not ours."""
    print(failure.render(), file=sys.stderr, flush=True)
