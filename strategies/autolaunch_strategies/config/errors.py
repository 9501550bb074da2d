"""What is wrong with a config, said with what is allowed and the line to write."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ConfigError(ValueError):
    """One thing that is wrong with a config, and what to write instead.

    Args:
        where: the key and the value as the person would write them, e.g. ``mesh=2x0``.
        problem: what is wrong, in one sentence without a full stop.
        allowed: what is allowed (may be empty).
        write: the line to write (may be empty).
    """

    def __init__(self, where: str, problem: str = "", allowed: str = "", write: str = "") -> None:
        self.where, self.problem, self.allowed, self.write = where, problem, allowed, write
        super().__init__(where, problem, allowed, write)  # all of it, so that it survives pickling

    def __str__(self) -> str:
        lines = [f"{self.where}: {self.problem}" if self.problem else self.where]
        if self.allowed:
            lines.append(f"  allowed: {self.allowed}")
        if self.write:
            lines.append(f"  write:   {self.write}")
        return "\n".join(lines)


class ConfigErrors(ValueError):
    """Several `ConfigError`s found in one look; `str()` is all of them, one after the other."""

    def __init__(self, errors: Iterable[ConfigError]) -> None:
        self.errors = list(errors)
        super().__init__(self.errors)

    def __str__(self) -> str:
        return "\n".join(str(error) for error in self.errors)


def raise_all(errors: list[ConfigError]) -> None:
    """Raise the one error there is, or all of them together; return if there is none."""
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise ConfigErrors(errors)


def nearest(name: str, known: Iterable[str], cutoff: float = 0.45) -> str:
    """The known name that `name` was most likely meant to be, or an empty string.

    Args:
        cutoff: how alike they must be at least, from 0 (not at all) to 1 (the same).
    """
    known = list(known)
    swapped = [other for other in known if sorted(other) == sorted(name)]  # the commonest slip: modle
    same = [other for other in known if other.lower() == name.lower()]
    close = same or swapped or difflib.get_close_matches(name, known, n=1, cutoff=cutoff)
    begun = [other for other in known if other.startswith(name)] if len(name) > 2 else []
    return close[0] if close else begun[0] if len(begun) == 1 else ""


def first_line(error: Exception) -> str:
    """The first line of what an error says; its class if it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
