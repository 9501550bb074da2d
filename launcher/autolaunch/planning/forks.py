"""A fork of this process that answers one question, with what it imports while this process does something else."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any, NoReturn

from autolaunch.instantiate import let_imports_see_the_working_directory
from autolaunch.launch.containment import die_with_parent
from autolaunch.launch.place import place
from autolaunch_strategies.config import ConfigError, ConfigErrors

THREADS_OF_NUMPY = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
"""Variables that numpy's libraries read as they are imported. The planner's products are small: with a thread on each
processor it took 2.5 s of them in place of 1.5, also from the process that composes the config meanwhile."""


def works_beside() -> bool:
    """Whether a fork has a processor of its own, and no other thread holds locks that stay held in it."""
    alone = threading.active_count() == 1 and place().kind == "alone"
    return alone and sys.platform == "linux" and len(os.sched_getaffinity(0)) > 1


class Fork:
    """A fork of this process that answers one question.

    Args:
        serve: what it does: called with what waits for the question, it returns the answer, which is not None.
    """

    def __init__(self, serve: Callable[[Callable[[], Any]], Any]) -> None:
        theirs_to_read, ours_to_write = os.pipe()
        ours_to_read, theirs_to_write = os.pipe()
        parent, self._process = os.getpid(), os.fork()
        if self._process == 0:
            os.close(ours_to_write)
            os.close(ours_to_read)
            _serve(serve, theirs_to_read, theirs_to_write, parent)
        os.close(theirs_to_read)
        os.close(theirs_to_write)
        self._to, self._of = os.fdopen(ours_to_write, "wb"), os.fdopen(ours_to_read, "rb")

    def asked(self, question: Any) -> bool:
        """Ask it; whether it could be asked."""
        with contextlib.suppress(Exception), self._to:
            pickle.dump(question, self._to)
            return True
        self.end()
        return False

    def answer(self) -> Any:
        """What it says, once it does; None if it fails.

        Raises:
            ConfigError, ConfigErrors: those that it met.
        """
        answer = None
        with contextlib.suppress(Exception):
            answer = pickle.load(self._of)
        self.end()
        if isinstance(answer, ConfigError | ConfigErrors):
            raise answer
        return answer

    def end(self) -> None:
        """End it, whatever it does. What is left of it goes once the process that made it has called this."""
        for pipe in (self._to, self._of):
            with contextlib.suppress(OSError):  # the rest of a question is written now, perhaps to nobody
                pipe.close()
        with contextlib.suppress(OSError):
            os.kill(self._process, signal.SIGKILL)
            os.waitpid(self._process, 0)


def _serve(serve: Callable[[Callable[[], Any]], Any], to_read: int, to_write: int, parent: int) -> NoReturn:
    """In the fork: get ready, read a question, write the answer, and end; also when its parent does."""

    def question() -> Any:
        with os.fdopen(to_read, "rb") as of:
            return pickle.load(of)

    try:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # the parent says that it was ended
        die_with_parent(parent)
        gc.disable()
        let_imports_see_the_working_directory()
        for threads in THREADS_OF_NUMPY:
            os.environ.setdefault(threads, "1")
        try:
            answer = serve(question)
        except (ConfigError, ConfigErrors) as error:
            answer = error
        sys.stdout.flush()
        with os.fdopen(to_write, "wb") as to:
            pickle.dump(answer, to)
    finally:  # also without an answer: then the parent plans, and tells what goes wrong
        os._exit(0)
