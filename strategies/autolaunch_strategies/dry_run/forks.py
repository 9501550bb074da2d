"""Work in forks of this process: what it has imported is theirs, and they tell it what they find out."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

Tell = Callable[[Any], None]
Work = Callable[[Tell], None]


class Fork:
    """A fork that does `work`. What it tells has to survive pickling.

    Args:
        speaks: whether it may write to the terminal.
    """

    def __init__(self, work: Work, speaks: bool = True) -> None:
        self.told, tells = multiprocessing.Pipe(duplex=False)
        # Not a daemon: those may have no processes of their own, and a batch may come from some.
        self._process = multiprocessing.get_context("fork").Process(target=_be_the_fork, args=(work, tells, speaks))
        self._process.start()
        tells.close()

    def end(self) -> None:
        """Stop it if it still works."""
        self._process.kill()
        self._process.join()
        self.told.close()

    @property
    def exit_code(self) -> int | None:
        """Of one that has ended."""
        self._process.join()
        return self._process.exitcode


class Here:
    """Does `work` at once and in this process, where there are no forks."""

    def __init__(self, work: Work) -> None:
        self.told: deque[Any] = deque()
        work(self.told.append)

    def end(self) -> None:
        """It has."""


def can_fork() -> bool:
    """Whether a process that has imported torch can be forked: elsewhere system libraries don't outlive it."""
    return sys.platform == "linux"


def processors() -> int:
    """How many forks work at once."""
    return len(os.sched_getaffinity(0)) if can_fork() else 1


def start(work: Work, speaks: bool = True) -> Fork | Here:
    """Have `work` done."""
    return Fork(work, speaks) if can_fork() else Here(work)


def tidings(workers: Iterable[Fork | Here]) -> Iterator[tuple[Fork | Here, Any]]:
    """What was told since, at least one thing: (by whom, what); of one that has ended without a last word, None."""
    forks: dict[Any, Fork] = {}
    for worker in list(workers):  # who is told of one may end it
        if isinstance(worker, Here):
            while worker.told:
                yield worker, worker.told.popleft()
        else:
            forks[worker.told] = worker
    for connection in wait(list(forks)) if forks else ():
        assert isinstance(connection, Connection)
        yield forks[connection], _received(connection)


def last_word(worker: Fork | Here) -> Any:
    """What a worker that says one thing has said, however long it takes; None if it has ended without."""
    said = next(news for _, news in tidings([worker]))
    worker.end()
    return said


def _received(connection: Connection) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*LeafSpec", FutureWarning)  # torch's own, as it unpickles a tree
        try:
            return connection.recv()
        except EOFError:
            return None


def _be_the_fork(work: Work, tells: Connection, speaks: bool) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who began it ends it
    torch.set_num_threads(1)  # those that were started before do not outlive a fork
    if not speaks:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
    work(tells.send)
