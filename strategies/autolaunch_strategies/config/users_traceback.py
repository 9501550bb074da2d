"""A traceback in which the lines of the user's code stand out: frames of other code are counted, the log has them."""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path

KEPT = 3
"""How many frames are shown, the last ones, where no error of a chain was in the user's code."""


def user_traceback(error: BaseException) -> str:
    """The traceback of `error` with the frames of the user's code, and the last one, in which it was raised."""
    report = traceback.TracebackException.from_exception(error)
    chain = list(_chain(report))
    if any(getattr(item, "exceptions", None) for item, _ in chain):
        return "".join(report.format()).rstrip()  # a tree of errors, not a chain
    kept = KEPT if not any(map(_is_own, (frame for item, _ in chain for frame in item.stack))) else 0
    told = [f"{_frames(item.stack, kept)}{''.join(item.format_exception_only())}" for item, _ in chain]
    parts = [
        f"Traceback (most recent call last):\n{text}{leads_to}"
        for text, follows, (_, leads_to) in zip(told, [*told[1:], ""], chain, strict=True)
        if text != follows  # what is tried twice fails twice
    ]
    return "".join(parts).rstrip()


def _chain(report: traceback.TracebackException) -> list[tuple[traceback.TracebackException, str]]:
    """The first error and those that followed from it, each with what leads to the next."""
    chain = [(report, "")]
    while True:
        current = chain[-1][0]
        if current.__cause__ is not None:
            chain.append((current.__cause__, "\nThis was the direct cause of what follows:\n\n"))
        elif current.__context__ is not None and not current.__suppress_context__:
            chain.append((current.__context__, "\nWhile this was handled, there was another error:\n\n"))
        else:
            return chain[::-1]


def _is_own(frame: traceback.FrameSummary) -> bool:
    return not frame.filename.startswith(plumbing())


def _frames(stack: Sequence[traceback.FrameSummary], kept: int) -> str:
    """Frames as text; of an error that was in libraries alone the last `kept` ones."""
    runs = [(own, list(run)) for own, run in groupby(stack, _is_own)]
    if not any(own for own, _ in runs):
        return _left_out(len(stack) - kept) + (_formatted(stack[-kept:]) if kept else "")
    text = ""
    for number, (own, run) in enumerate(runs):
        if own:
            text += _formatted(run)
        elif number == len(runs) - 1:
            text += _left_out(len(run) - 1) + _formatted(run[-1:])
        elif number:  # what leads to the first of the user's frames is the same in every run
            text += _left_out(len(run))
    return text


def _formatted(frames: Sequence[traceback.FrameSummary]) -> str:
    return "".join(traceback.StackSummary.from_list(frames).format())


def _left_out(count: int) -> str:
    return f"  ... {count} frame{'s' if count > 1 else ''} of libraries\n" if count > 0 else ""


@cache
def plumbing() -> tuple[str, ...]:
    """How the files of launcher, trainer and torch begin, which lead to the user's code and are not it."""
    packages = [find_spec(name) for name in ("autolaunch", "autolaunch_strategies")]
    paths = [str(Path(package.origin).parent) for package in packages if package is not None and package.origin]
    site = sysconfig.get_path("purelib")
    paths += [f"{site}/{name}" for name in ("torch", "lightning", "lightning_utilities", "hydra", "omegaconf")]
    paths += [f"{sysconfig.get_path('stdlib')}/{name}" for name in ("contextlib.py", "importlib", "runpy.py")]
    return (*(path if path.endswith(".py") else f"{path}/" for path in paths), "<frozen")
