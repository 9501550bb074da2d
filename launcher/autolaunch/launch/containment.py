"""Nothing lives on: ranks end with their parent, and what a trial has started would take time from the next one."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

VARIABLE = "AUTOLAUNCH_TRIAL"
"""In the environment of all processes of a trial, also of those that have left their session and their parent."""

END_SECONDS = 5.0
PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process, and those it forks, when the one that started it is gone."""
    if sys.platform != "linux":
        return
    prctl = ctypes.CDLL(None).prctl

    def die_with_starter() -> None:
        prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)

    die_with_starter()
    if os.getppid() != parent:  # it went before the kernel was told
        os._exit(1)

    # The kernel means the thread that forked: a child of a short-lived thread is left alone.
    by_main_thread: list[bool] = []

    def before_fork() -> None:
        by_main_thread[:] = [threading.current_thread() is threading.main_thread()]

    def after_fork() -> None:
        if by_main_thread == [True]:
            die_with_starter()

    os.register_at_fork(before=before_fork, after_in_child=after_fork)


@contextlib.contextmanager
def contained() -> Iterator[None]:
    """Mark every process that is started in here, and kill at the end what is left of them (on Linux)."""
    mark = uuid.uuid4().hex
    os.environ[VARIABLE] = mark
    try:
        yield
    finally:
        del os.environ[VARIABLE]
        end = time.monotonic() + END_SECONDS
        # Several times: what is forked while this looks is found the next time.
        while (pids := _marked(mark)) and time.monotonic() < end:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)


def _marked(mark: str) -> list[int]:
    text = f"{VARIABLE}={mark}".encode()
    pids = []
    for entry in Path("/proc").glob("[0-9]*"):
        # Others' processes cannot be read, and some are gone by now; of a zombie the environment is empty.
        with contextlib.suppress(OSError):
            if text in (entry / "environ").read_bytes().split(b"\0"):
                pids.append(int(entry.name))
    return pids
