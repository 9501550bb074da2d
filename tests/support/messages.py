"""What a person is told about a mistake: the key, the facts, what is allowed and the line to write, not the prose."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autolaunch_strategies.config import ConfigError, ConfigErrors

ALLOWED, WRITE = "  allowed: ", "  write:   "
"""How the lines begin that `ConfigError` adds to a problem."""


def rounded(message: str) -> str:
    """A message with its decimal numbers at three digits: the sixth of a loss is another one on another processor."""
    return re.sub(r"\d+\.\d{3,}", lambda number: f"{float(number[0]):.3g}", message)


@dataclass(frozen=True, init=False)
class Told:
    """What a test expects of one error of a message.

    Args:
        key: the whole place in the config that the message begins with, e.g. ``mesh=2x0``.
        facts: what must be in the problem: numbers, names, words that say which mistake it is; no sentences.
        write: the whole `write:` line; empty if there must be none, None if it does not matter.
        allowed: the whole `allowed:` line, or facts that must be in it; empty if there must be none, None if it does
            not matter.
    """

    key: str
    facts: tuple[str, ...]
    write: str | None
    allowed: str | tuple[str, ...] | None

    def __init__(
        self, key: str, *facts: str, write: str | None = "", allowed: str | tuple[str, ...] | None = None
    ) -> None:
        for name, value in (("key", key), ("facts", facts), ("write", write), ("allowed", allowed)):
            object.__setattr__(self, name, value)


def assert_told(
    message: str | BaseException,
    key: str,
    *facts: str,
    write: str | None = "",
    allowed: str | tuple[str, ...] | None = None,
) -> None:
    """Assert that one of the errors of a message is of `key`, and as expected; there may be others.

    Args:
        message: what was printed, or the error that was raised.
        key, facts, write, allowed: as in `Told`.

    Raises:
        AssertionError: with what is missing, and the message.
    """
    __tracebackhide__ = True
    expected = Told(key, *facts, write=write, allowed=allowed)
    missing = [_missing(error, expected) for error in _errors(message) if error.problem_of(key) is not None]
    _fail_if(min(missing, key=len, default=[f"no error is of the key {key}"]), message)


def assert_only_told(message: str | BaseException, expected: Told | Sequence[Told]) -> None:
    """Assert that a message holds these errors in this order, and nothing else.

    Args:
        message: what was printed, or the error that was raised.
        expected: one error, or several.

    Raises:
        AssertionError: with what is missing, and the message.
    """
    __tracebackhide__ = True
    expected = [expected] if isinstance(expected, Told) else list(expected)
    errors = _errors(message)
    if len(errors) != len(expected):
        _fail_if([f"{len(errors)} errors, not {len(expected)}"], message)
    _fail_if([part for error, one in zip(errors, expected, strict=True) for part in _missing(error, one)], message)


@dataclass
class _Error:
    """One error of a message. Where the key ends is known of an exception; a text may hold `: ` in its key, too."""

    key: str | None
    headline: str  # the key and the problem
    allowed: str = ""
    write: str = ""

    def problem_of(self, key: str) -> str | None:
        """What is wrong with `key`; None if this error is of another one."""
        if self.key not in (None, key) or not f"{self.headline}: ".startswith(f"{key}: "):
            return None
        return self.headline[len(key) + 2 :]


def _errors(message: str | BaseException) -> list[_Error]:
    if isinstance(message, ConfigErrors):
        return [found for error in message.errors for found in _errors(error)]
    errors: list[_Error] = []
    for line in str(message).strip("\n").split("\n") if str(message) else []:
        if errors and line.startswith(ALLOWED):
            errors[-1].allowed = line.removeprefix(ALLOWED)
        elif errors and line.startswith(WRITE):
            errors[-1].write = line.removeprefix(WRITE)
        elif errors and (line.startswith("    ") or isinstance(message, ConfigError)):
            errors[-1].headline += f"\n{line}"  # more of the same problem
        else:
            errors.append(_Error(message.where if isinstance(message, ConfigError) else None, line))
    return errors


def _missing(error: _Error, expected: Told) -> list[str]:
    """What an error lacks of what is expected of it, in words."""
    problem = error.problem_of(expected.key)
    if problem is None:
        return [f"not the key {expected.key}: {error.headline}"]
    missing = [f"not in the problem of {expected.key}: {fact}" for fact in _not_in(problem, expected.facts)]
    if isinstance(expected.allowed, tuple):
        missing += [f"not allowed for {expected.key}: {fact}" for fact in _not_in(error.allowed, expected.allowed)]
    elif expected.allowed not in (None, error.allowed):
        missing.append(f"not the `allowed:` line of {expected.key}: {expected.allowed or '(none)'}")
    if expected.write not in (None, error.write):
        missing.append(f"not the `write:` line of {expected.key}: {expected.write or '(none)'}")
    return missing


def _not_in(text: str, facts: Iterable[str]) -> list[str]:
    """The facts that are not in a text as words of their own: 3 is in `3 of 4`, and neither in `32` nor in `3.5`."""
    return [fact for fact in facts if not re.search(rf"(?<!\w)(?<!\d[.,]){re.escape(fact)}(?!\w)(?![.,]\d)", text)]


def _fail_if(missing: list[str], message: str | BaseException) -> None:
    __tracebackhide__ = True
    if "Traceback" in str(message):
        missing = [*missing, "there is a traceback"]
    if missing:
        raise AssertionError("\n".join([*missing, "the message:", *(f"  {line}" for line in str(message).split("\n"))]))
