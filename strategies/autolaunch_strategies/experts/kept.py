"""What a block has exchanged in its forward pass, for when it is computed again: then nothing travels a second time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")

_NOW: list[Kept] = []
"""Of the blocks whose forward runs now, the innermost last."""


class Kept:
    """Of one forward pass of one block.

    Args:
        rows: keep the rows that have travelled, too, and not only how many went where. They are as many as a block's
            tokens times the experts of each, twice.
    """

    def __init__(self, rows: bool) -> None:
        self.rows = rows
        self._values: list[Any] = []
        self._next: Iterator[Any] | None = None

    @contextmanager
    def first(self) -> Iterator[None]:
        """Within it the block runs for the first time."""
        with self._now(None):
            yield

    @contextmanager
    def again(self) -> Iterator[None]:
        """Within it the block runs as it has before."""
        with self._now(iter(self._values)):
            yield

    @contextmanager
    def _now(self, values: Iterator[Any] | None) -> Iterator[None]:
        self._next = values
        _NOW.append(self)
        try:
            yield
        finally:
            _NOW.pop()

    def value(self, make: Callable[[], T]) -> T:
        """What `make` returns, or has returned at this place before."""
        if self._next is None:
            self._values.append(make())
            return self._values[-1]
        return next(self._next)


def kept(make: Callable[[], T], rows: bool = False) -> T:
    """What `make` returns, kept by the block that runs now; `rows` if it is rows that have travelled."""
    if not _NOW or (rows and not _NOW[-1].rows):
        return make()
    return _NOW[-1].value(make)
