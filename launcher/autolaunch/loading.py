"""Importing what a run needs, without Python looking for garbage meanwhile."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """Import large libraries faster: they make a million objects, none of them garbage, and the collector would look at
    all of them again and again (0.9 of 3.2 s of processor time for torch and Lightning)."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
