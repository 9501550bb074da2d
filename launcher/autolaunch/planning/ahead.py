"""A process that plans: it imports what that takes while the config is composed in this one, on another processor."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import importlib
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from autolaunch.config.command_line import CommandLine, typed_keys, users_want_tracebacks
from autolaunch.directories import user_cache
from autolaunch.launch.containment import die_with_parent
from autolaunch.launch.place import place
from autolaunch_strategies.config import ConfigError, ConfigErrors

Choice = tuple[list[str], dict[str, Any]]
"""As `planning.choice.choice_of` returns it."""

_NOT_OF_MODELS = frozenset(
    ("cluster", "mesh", "pp", "cp", "ep", "recompute", "compile", "optimizer", "trainer", "why", "full", "name")
)
"""Keys that a profile does not depend on."""

THREADS_OF_NUMPY = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
"""Variables that numpy's libraries read as they are imported. The planner's products are small: with a thread on each
processor it took 2.5 s of them in place of 1.5, also from the process that composes the config meanwhile."""

_waiting: _Planner | None = None


@contextlib.contextmanager
def planner_beside(line: CommandLine) -> Iterator[None]:
    """Have a planner at hand for a command line that asks for one plan.

    None where it could not run beside this process, or other threads might hold locks as it is forked; nor where
    errors are to be shown with where they were raised, which does not survive pickling.
    """
    global _waiting
    alone = threading.active_count() == 1 and place().kind == "alone" and not users_want_tracebacks()
    if line.asks_for_a_plan and alone and sys.platform == "linux" and len(os.sched_getaffinity(0)) > 1:
        _waiting = _Planner(line)
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
        if isinstance(made, ConfigError | ConfigErrors):
            raise made
        choice: Choice = made
        return choice

    return answer


class _Planner:
    """A fork of this process that answers one question."""

    def __init__(self, line: CommandLine) -> None:
        theirs_to_read, ours_to_write = os.pipe()
        ours_to_read, theirs_to_write = os.pipe()
        parent, self._process = os.getpid(), os.fork()
        if self._process == 0:
            os.close(ours_to_write)
            os.close(ours_to_read)
            _plan(line, theirs_to_read, theirs_to_write, parent)
        os.close(theirs_to_read)
        os.close(theirs_to_write)
        self._to, self._of = ours_to_write, ours_to_read

    def asked(self, question: Any) -> bool:
        """Ask it; whether it could be asked."""
        with contextlib.suppress(Exception), os.fdopen(self._to, "wb") as to:
            pickle.dump(question, to)
            return True
        self.end()
        return False

    def answer(self) -> Any:
        """What it says, once it does; None if it fails."""
        answer = None
        with contextlib.suppress(Exception), os.fdopen(self._of, "rb") as of:
            answer = pickle.load(of)
        self.end()
        return answer

    def end(self) -> None:
        """End it, whatever it does."""
        with contextlib.suppress(OSError):
            os.kill(self._process, signal.SIGKILL)
            os.waitpid(self._process, 0)


def _plan(line: CommandLine, to_read: int, to_write: int, parent: int) -> NoReturn:
    """In the fork: import, read a question, write the answer, and end; also when its parent does."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # the parent says that it was ended
        die_with_parent(parent)
        gc.disable()
        for threads in THREADS_OF_NUMPY:
            os.environ.setdefault(threads, "1")
        _import_what_it_takes(with_torch=not _is_noted(line))
        from autolaunch.planning.choice import choice_of

        with os.fdopen(to_read, "rb") as of:
            config, typed, by_device = pickle.load(of)
        try:
            answer: Any = choice_of(config, typed, by_device)
            _note(line, config)
        except (ConfigError, ConfigErrors) as error:
            answer = error
        sys.stdout.flush()
        with os.fdopen(to_write, "wb") as to:
            pickle.dump(answer, to)
    finally:  # also without an answer: then the parent plans, and tells what goes wrong
        os._exit(0)


def _import_what_it_takes(with_torch: bool) -> None:
    """Import what `choice_of` would, also with a model that nothing is known of."""
    planner = ("recipe", "choose", "document", "explain", "settings")
    names = [f"autolaunch_strategies.planner.{name}" for name in planner]
    names += ["numpy.ma", "numpy.random"]  # which numpy imports when they are first used
    if with_torch:
        from autolaunch_strategies.torch_private.compiler import import_compiler_when_asked

        import_compiler_when_asked()
        of_profiles = ("profile_cache", "subject", "module_profile")
        names += ["autolaunch.models", *(f"autolaunch_strategies.planner.{name}" for name in of_profiles)]
    for name in names:
        importlib.import_module(name)


def _is_noted(line: CommandLine) -> bool:
    """Whether the profile of a line's model is likely to be known, so that torch is not needed."""
    try:
        return _noted_as(line) in _notes().read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return False


def _note(line: CommandLine, config: Mapping[str, Any]) -> None:
    """Write down that the profile of a line's model is known, if it is."""
    from autolaunch.config.cluster import hardware_of
    from autolaunch.planning.known_profiles import KnownProfile

    with contextlib.suppress(OSError):
        kept = KnownProfile(config, hardware_of(config["cluster"]).device).path
        if kept is not None and kept.exists() and not _is_noted(line):
            with _notes().open("a", encoding="ascii") as notes:
                notes.write(f"{_noted_as(line)}\n")


def _notes() -> Path:
    return user_cache() / "profiles" / "lines.txt"


def _noted_as(line: CommandLine) -> str:
    words = [item for item in line.overrides for key in typed_keys([item]) if key.split(".")[0] not in _NOT_OF_MODELS]
    return hashlib.blake2b(repr((sorted(words), line.config_dir)).encode(), digest_size=8).hexdigest()
