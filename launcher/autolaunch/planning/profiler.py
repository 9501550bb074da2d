"""A fork that profiles the model of a plan. It begins with the command, before that has read what was typed.

A plan of a model that nothing is known of waits for torch longer than for everything else together.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autolaunch.directories import user_cache
from autolaunch.planning.forks import Fork, works_beside
from autolaunch_strategies.config import ConfigError

if TYPE_CHECKING:
    from autolaunch_strategies.planner.profile import ModelProfile

_NOT_OF_MODELS = frozenset(
    ("cluster", "mesh", "pp", "cp", "ep", "recompute", "compile", "optimizer", "trainer", "why", "full", "name")
)
"""Keys that a profile does not depend on."""
_MODULES = (
    "autolaunch.models",
    *(f"autolaunch_strategies.planner.{name}" for name in ("profile_cache", "subject", "module_profile")),
)
"""What a profile is made with."""

_PLANS = {"plan", "task=plan", "mesh=auto"}
"""Words of which a line that asks for a plan has one."""

_begun: Fork | None = None


def begin(argv: Sequence[str]) -> None:
    """Begin, if a command line looks like one of a plan of a model that nothing is known of."""
    global _begun
    with contextlib.suppress(ConfigError, OSError):  # of variables of ranks, which is told when they are read again
        if not _PLANS.isdisjoint(argv) and works_beside() and not is_noted(argv):
            _begun = Fork(_profile)


def taken() -> Fork | None:
    """The one that has begun, once; who takes it ends it."""
    global _begun
    taken, _begun = _begun, None
    return taken


def _profile(question: Callable[[], Any]) -> ModelProfile:
    """Profile a model, given the arguments of `choice.profiled`."""
    from autolaunch_strategies.torch_private.compiler import import_compiler_when_asked

    import_compiler_when_asked()
    for name in _MODULES:
        importlib.import_module(name)
    from autolaunch.planning.choice import profiled

    return profiled(*question())


def is_noted(argv: Sequence[str]) -> bool:
    """Whether the profile of a line's model is likely to be known, so that torch is not needed."""
    try:
        return _noted_as(argv) in _notes().read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return False


def note(argv: Sequence[str]) -> None:
    """Write down that the profile of a line's model is known."""
    with contextlib.suppress(OSError):
        if not is_noted(argv):
            with _notes().open("a", encoding="ascii") as notes:
                notes.write(f"{_noted_as(argv)}\n")


def _notes() -> Path:
    return user_cache() / "profiles" / "lines.txt"


def _noted_as(argv: Sequence[str]) -> str:
    keys = {word: word.lstrip("+~-").partition("=")[0].split(".")[0] for word in argv}
    asked = {word for flag, word in itertools.pairwise(argv) if flag == "--why"}
    words = sorted(word for word, key in keys.items() if key not in _NOT_OF_MODELS and word not in asked)
    return hashlib.blake2b(repr(words).encode(), digest_size=8).hexdigest()
