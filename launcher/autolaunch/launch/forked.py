"""A job of one rank in a fork of this process, which sees how it ends.

A crash in C code, `os._exit` or the kernel's want of memory take a process away before it can say anything; then this
one speaks. The fork has the terminal and standard input, so that debuggers work as ever, and costs no start-up: nothing
heavy has been imported yet.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NoReturn

from autolaunch.job import ResolvedJob
from autolaunch.launch.containment import die_with_parent
from autolaunch.launch.end import RunEnd
from autolaunch.launch.failure import Exit, first_failure, log_file
from autolaunch.launch.signals import asking_to_end

_SI_KERNEL = 0x80
"""Who sent a signal: the terminal, which sends it to both processes."""

_report: int | None = None
"""In the fork: where it says how the run ended."""


def can_fork() -> bool:
    """Whether a fork would be a whole copy of this process: no other threads, and its output not gathered in memory.

    The planner may have used torch in this process: neither its threads nor what it holds of a GPU outlive a fork.
    """
    torch = sys.modules.get("torch")
    if sys.platform != "linux" or (torch is not None and torch.version.cuda is not None):
        return False
    try:
        return len(list(Path("/proc/self/task").iterdir())) == 1 and sys.stdout.fileno() == 1
    except (AttributeError, OSError):  # of a notebook or a test
        return False


def run_forked(work: Callable[[], RunEnd], job: ResolvedJob, leave: Callable[[int], NoReturn]) -> RunEnd:
    """Do `work` in a fork, and return how it ended, be it without a word.

    Args:
        work: what to do; it writes to the log of rank 0.
        job: the job that it does.
        leave: how the fork ends.
    """
    log = log_file(job.logs, 0)
    log_start = log.stat().st_size if log.exists() else 0
    forwarded = asking_to_end()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    report = os.memfd_create("end")
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {*forwarded, signal.SIGCHLD})
    try:
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            _be_the_fork(work, report, mask, parent, leave)
        received: list[int] = []
        while (code := _ended(pid)) is None:
            sent = signal.sigwaitinfo({*forwarded, signal.SIGCHLD})
            if sent.si_signo != signal.SIGCHLD:
                received.append(sent.si_signo)
                if sent.si_code != _SI_KERNEL:
                    os.kill(pid, sent.si_signo)
        return _read(report) or _without_a_word(code, pid, received, job, log_start)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.close(report)


def _be_the_fork(
    work: Callable[[], RunEnd], report: int, mask: Iterable[int], parent: int, leave: Callable[[int], NoReturn]
) -> NoReturn:
    global _report
    _report = report
    die_with_parent(parent)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    try:
        end = work()
    except KeyboardInterrupt:
        end = RunEnd("interrupted", 130, message="interrupted")
    tell_parent(end)
    leave(0)


def tell_parent(end: RunEnd) -> bool:
    """Say in the fork, from any thread, how the run ended: the first word counts. False if this process is no fork."""
    if _report is not None:
        os.write(_report, pickle.dumps(end))
    return _report is not None


def _ended(pid: int) -> int | None:
    """The exit code of a child as `subprocess` counts, None while it runs."""
    ended, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None


def _read(report: int) -> RunEnd | None:
    data = os.pread(report, os.fstat(report).st_size, 0)
    end = pickle.loads(data) if data else None  # of our own fork
    assert end is None or isinstance(end, RunEnd)
    return end


def _without_a_word(code: int, pid: int, received: list[int], job: ResolvedJob, log_start: int) -> RunEnd:
    if received:
        signum = received[-1]
        name = "Ctrl-C" if signum == signal.SIGINT else signal.Signals(signum).name
        return RunEnd("interrupted", 128 + signum, message=f"stopped by {name}")
    with contextlib.suppress(OSError):
        failure = first_failure(job.logs, {0: Exit(code, pid, time.time_ns(), log_start=log_start)}, 1)
        assert failure is not None, "it did not end as it should, and nothing failed"
        return RunEnd("failed", failure.exit_code, failure, failure.render())
    return RunEnd("failed", 1, message=f"the run left with exit code {code} before its task was done")
