"""A function in the place of another one, for as long as the module is not copied."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Replacement:
    """A function in place of another one; copies and pickles contain that one."""

    def __init__(self, function: Callable[..., Any], original: Any) -> None:
        self.function, self.original = function, original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return itself, (self.original,)


def itself(item: Any) -> Any:
    return item


@contextmanager
def replaced(owner: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Within it a method of `owner` is another function."""
    attributes = vars(owner)
    own = attributes.get(name)
    attributes[name] = Replacement(function, getattr(owner, name))
    try:
        yield
    finally:
        if own is None:
            del attributes[name]
        else:
            attributes[name] = own
