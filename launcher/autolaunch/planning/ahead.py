"""A process that plans, on another processor.

What that takes is imported while this one composes the config, or, if the model has to be profiled, while that is done.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from autolaunch.config.command_line import CommandLine, users_want_tracebacks
from autolaunch.planning import profiler
from autolaunch.planning.forks import Fork, works_beside

if TYPE_CHECKING:
    from autolaunch_strategies.planner.profile import ModelProfile

Choice = tuple[list[str], dict[str, Any]]
"""As `planning.choice.choice_of` returns it."""

_MODULES = (
    *(f"autolaunch_strategies.planner.{name}" for name in ("recipe", "choose", "document", "explain", "settings")),
    "numpy.ma",  # which numpy imports when it is first used, as the next one
    "numpy.random",
)
"""What a choice is made with."""

_waiting: _Planner | None = None


@contextlib.contextmanager
def planner_beside(line: CommandLine) -> Iterator[None]:
    """Have a planner at hand for a command line that asks for one plan. For others a profiler that has begun ends.

    None where it could not run beside this process; nor where errors are to be shown with where they were raised, which
    does not survive pickling.
    """
    global _waiting
    begun = profiler.taken()
    if line.asks_for_a_plan and works_beside() and not users_want_tracebacks():
        _waiting = _Planner(begun)
    elif begun is not None:
        begun.end()
    try:
        yield
    finally:
        planner, _waiting = _waiting, None
        if planner is not None:  # nobody asked it
            planner.end()


def ask(config: Mapping[str, Any], typed: list[str], by_device: Mapping[str, str]) -> Callable[[], Choice]:
    """Ask for a choice; what is returned waits for it. Arguments and errors are those of `choice.choice_of`."""
    global _waiting
    planner, _waiting = _waiting, None
    question = config, typed, by_device
    asked = planner is not None and planner.asked(question)

    def answer() -> Choice:
        made = planner.answer() if planner is not None and asked else None
        if made is None:  # there is none, or what went wrong is not for it to tell
            from autolaunch.planning.choice import choice_of

            return choice_of(*question)
        choice: Choice = made
        return choice

    return answer


class _Planner(Fork):
    """A fork that makes one choice, and with it the one that makes the profile, if that has begun."""

    def __init__(self, begun: Fork | None) -> None:
        self._begun = begun
        super().__init__(partial(_plan, begun))

    def end(self) -> None:
        super().end()
        if self._begun is not None:
            self._begun.end()


def _plan(begun: Fork | None, question: Callable[[], Any]) -> Choice:
    """Choose. What a choice is made with is imported when there is a processor for it.

    Args:
        begun: what profiles a model. It imports torch on one processor while the parent composes on the other.
    """
    if begun is None:
        _import_planner()
    config, typed, by_device = question()
    from autolaunch.planning.choice import choice_of

    choice = choice_of(config, typed, by_device, None if begun is None else partial(_profiled_by, begun))
    _note(config)
    return choice


def _profiled_by(begun: Fork, config: Mapping[str, Any], device_type: str) -> ModelProfile:
    """As `choice.profiled`."""
    asked = begun.asked((config, device_type))
    _import_planner()
    profile: ModelProfile | None = begun.answer() if asked else None
    if profile is None:
        raise RuntimeError("there is no profile")  # the command makes one itself, and tells what goes wrong
    return profile


def _import_planner() -> None:
    for name in _MODULES:
        importlib.import_module(name)


def _note(config: Mapping[str, Any]) -> None:
    """Write down that the profile of the line's model is known, if it is."""
    from autolaunch.config.cluster import hardware_of
    from autolaunch.planning.known_profiles import KnownProfile

    kept = KnownProfile(config, hardware_of(config["cluster"]).device).path
    if kept is not None and kept.exists():
        profiler.note(sys.argv[1:])
