"""That long preparations of data get on, for whoever watches this process. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable

_listeners: list[Callable[[], None]] = []


def listen(listener: Callable[[], None]) -> None:
    """Call `listener`, and no other, whenever a preparation has got somewhere."""
    _listeners[:] = [listener]


def moved() -> None:
    """Say that a preparation has got somewhere."""
    for listener in _listeners:
        listener()
