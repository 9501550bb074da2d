"""Work in forks of this process: what it has imported is theirs, and they send it what they find out."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from autolaunch_strategies.torch_private.backward import works_in_forks

_MOST = 16
"""Forks that work at once: each may take half a GiB."""
_OBJECTS_BEFORE_COLLECTING = 50_000
"""What a step makes mostly stays, or goes by itself: looking for garbage as often as usual takes a tenth of it."""
_SET_PARENT_DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG of prctl(2)."""


class Caller:
    """Who has a worker work, as the worker sees it."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def tell(self, said: Any) -> None:
        """Send something that survives pickling; nobody answers."""
        self._connection.send(said)

    def ask(self, question: Any) -> Any:
        """Send a question and wait for its answer; None if there is none."""
        self._connection.send(question)
        return self._connection.recv()


class Here(Caller):
    """The caller of a worker in its own process: it hears everything at the end, and so has no answers."""

    def __init__(self, sent: deque[Any]) -> None:
        self._sent = sent

    def tell(self, said: Any) -> None:
        self._sent.append(said)

    def ask(self, question: Any) -> Any:
        return None


Work = Callable[[Caller], None]


class Fork:
    """A fork that does `work`.

    Args:
        silent: whether what it writes to the terminal is dropped.
    """

    def __init__(self, work: Work, silent: bool = False) -> None:
        self.connection, ours = multiprocessing.Pipe()
        # Not a daemon: those may have no processes of their own, and a batch may come from some.
        self._process = multiprocessing.get_context("fork").Process(
            target=_run_in_fork, args=(work, ours, self.connection, silent, os.getpid())
        )
        self._process.start()
        ours.close()

    def answer(self, answer: Any) -> None:
        """Answer what it asked."""
        with contextlib.suppress(OSError):  # it has ended, which is heard next
            self.connection.send(answer)

    def end(self) -> None:
        """Stop it if it still works."""
        self._process.kill()
        self._process.join()
        self.connection.close()

    @property
    def exit_code(self) -> int | None:
        """How it ended, of one that has closed its connection."""
        self._process.join()
        return self._process.exitcode


class InProcess:
    """Does `work` at once and in this process, where it can't be forked."""

    def __init__(self, work: Work) -> None:
        self.sent: deque[Any] = deque()
        work(Here(self.sent))

    def end(self) -> None:
        """Nothing is left to stop."""


def can_fork() -> bool:
    """Whether a fork of this process could work on.

    Neither what a driver holds of a GPU outlives it, nor other threads, of Python or of autograd, and locks that these
    hold stay held.
    """
    alone = threading.active_count() == 1 and not multiprocessing.current_process().daemon
    return sys.platform == "linux" and alone and not torch.cuda.is_initialized() and works_in_forks()


def most_at_once() -> int:
    """How many workers may work at once: more than there are processors, which the last few would not all have."""
    return min(2 * len(os.sched_getaffinity(0)), _MOST) if can_fork() else 1


def start(work: Work, silent: bool = False) -> Fork | InProcess:
    """Have `work` done."""
    return Fork(work, silent) if can_fork() else InProcess(work)


def messages(workers: Iterable[Fork | InProcess]) -> Iterator[tuple[Fork | InProcess, Any]]:
    """What was sent since, at least one thing: (by whom, what); None of one that has ended."""
    forks: dict[Any, Fork] = {}
    for worker in list(workers):  # whoever gets one may end its sender
        if isinstance(worker, InProcess):
            while worker.sent:
                yield worker, worker.sent.popleft()
        else:
            forks[worker.connection] = worker
    for connection in wait(list(forks)) if forks else ():
        assert isinstance(connection, Connection)
        yield forks[connection], _received(connection)


def result_of(worker: Fork | InProcess) -> Any:
    """What a worker sends that sends one thing, however long it takes; None if it ends without."""
    result = next(message for _, message in messages([worker]))
    worker.end()
    return result


def _received(connection: Connection) -> Any:
    try:
        return connection.recv()
    except (EOFError, OSError):  # it has ended, between two messages or within one
        return None


def _run_in_fork(work: Work, ours: Connection, theirs: Connection, silent: bool, parent: int) -> None:
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended before
        return
    theirs.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it, too, and ends its forks
    torch.set_num_threads(1)  # those that were started before do not outlive a fork
    gc.freeze()
    gc.set_threshold(_OBJECTS_BEFORE_COLLECTING)
    if silent:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
    work(Caller(ours))
