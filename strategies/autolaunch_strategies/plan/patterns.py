"""Patterns over dotted module names, as plans write them. Imports no torch."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from functools import lru_cache

from autolaunch_strategies.config import ConfigError


@lru_cache(maxsize=4096)
def compile_pattern(pattern: str) -> re.Pattern[str]:
    """Read a pattern that must match a whole dotted name.

    A `*` that is a whole name part stands for exactly one part (``layers.*.fc1``), a dot for a dot; everything else is
    a regular expression, as in Paddle's plans: ``layers.[0-3].fc(1|2)``, ``.*fc1``, ``head|emb``.

    Raises:
        ConfigError: it is not a regular expression.
    """
    text = ""
    position = 0
    while position < len(pattern):
        char, following = pattern[position], pattern[position + 1 : position + 2]
        starts_part = position == 0 or pattern[position - 1] in ".|("
        ends_part = pattern[position + 1 : position + 2] in ("", ".", "|", ")")
        if char == "*" and starts_part and ends_part:
            text += "[^.]+"
        elif char == "\\":
            text += pattern[position : position + 2]
            position += 1
        elif char == "." and following in ("*", "+", "?") and not _whole_part_star(pattern, position + 1):
            text += "."  # part of `.*`, `.+`, `.?`
        elif char == ".":
            text += r"\."
        else:
            text += char
        position += 1
    try:
        return re.compile(text)
    except re.error as error:
        raise ConfigError(
            f"mp.plan: {pattern!r}", f"not a pattern: {error}", "names, *, or a regular expression"
        ) from None


def _whole_part_star(pattern: str, position: int) -> bool:
    """Whether the character at `position` is a `*` that is a name part by itself."""
    return pattern[position] == "*" and position > 1 and pattern[position + 1 : position + 2] in ("", ".", "|", ")")


def matching(pattern: str, names: Iterable[str]) -> list[str]:
    """The names that a pattern matches, in their order."""
    compiled = compile_pattern(pattern)
    return [name for name in names if compiled.fullmatch(name)]


def with_parents(name: str) -> list[str]:
    """`a`, `a.b`, `a.b.c` for `a.b.c`."""
    parts = name.split(".")
    return [".".join(parts[: count + 1]) for count in range(len(parts))]


def nearest_names(pattern: str, names: Iterable[str], count: int = 3) -> list[str]:
    """Names that `pattern` was most likely meant to match: numbers count as equal, so that layers do not crowd."""
    shapes: dict[str, str] = {}
    for name in names:
        shapes.setdefault(re.sub(r"\d+", "*", name), name)
    wanted = re.sub(r"\d+|\[[^\]]*\]|\([^)]*\)", "*", pattern)
    close = difflib.get_close_matches(wanted, shapes, n=count, cutoff=0.5)
    if not close:
        last = wanted.rsplit(".", 1)[-1]
        close = difflib.get_close_matches(last, [shape.rsplit(".", 1)[-1] for shape in shapes], n=count, cutoff=0.6)
        close = [shape for shape in shapes if shape.rsplit(".", 1)[-1] in close][:count]
    return close
