"""Signals that end a run: noted when they come, acted on by whoever waits for the run."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any


def asking_to_end() -> list[int]:
    """Ctrl-C, SIGTERM, SIGUSR1, and SIGHUP unless it is ignored, as `nohup` has it."""
    signals = [signal.SIGINT.value, signal.SIGTERM.value, signal.SIGUSR1.value]
    return signals if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else [*signals, signal.SIGHUP.value]


class Signals:
    """What asks a run to end, while it lasts: counted here, acted on by the loop that watches the ranks.

    One within another tells that one, too: what came in one of several starts of a run counts for all of them.
    """

    def __init__(self) -> None:
        self.received: list[int] = []
        self._outer: Signals | None = None

    @contextlib.contextmanager
    def caught(self) -> Iterator[Signals]:
        """Count them until the end of the `with` block; does nothing outside of the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        before: dict[int, Any] = {}
        try:
            for signum in asking_to_end():
                before[signum] = signal.signal(signum, self._note)
            outer = getattr(before[signal.SIGINT.value], "__self__", None)
            self._outer = outer if isinstance(outer, Signals) else None
            yield self
        finally:
            for signum, handler in before.items():
                signal.signal(signum, handler)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self.received.append(signum)
        if self._outer is not None:
            self._outer._note(signum, frame)
