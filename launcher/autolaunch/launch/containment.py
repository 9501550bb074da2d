"""Nothing that a trial has started may live on: it would take time and memory from the next one."""

from __future__ import annotations

import contextlib
import os
import signal
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

VARIABLE = "AUTOLAUNCH_TRIAL"
"""In the environment of all processes of a trial, also of those that have left their session and their parent."""

END_SECONDS = 5.0


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
