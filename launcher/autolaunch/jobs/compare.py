"""`autolaunch compare`: runs beside the first of them, started for it (`mesh=1,2x2x2`) or finished."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from autolaunch.config.command_line import names_a_run, unquoted
from autolaunch.config.schema import Compare, defaults_of
from autolaunch.jobs.ends import JobEnd
from autolaunch.report.comparison import print_comparison, read_run
from autolaunch.report.terminal import Terminal
from autolaunch_strategies.config import ConfigError

USAGE = "autolaunch compare mesh=1,2x2x2"
"""The command, as messages show it."""

_DIFFERENT = 1
_TOLERANCE = "compare.tolerance"


def refuse_single_job(overrides: Sequence[str], swept: Sequence[str]) -> None:
    """Raise ConfigError if no key has several values."""
    if not swept:
        typed = [item for item in overrides if not item.startswith("task=")]
        raise ConfigError(
            " ".join(["autolaunch compare", *map(unquoted, typed)]),
            "there is one run, and nothing to compare it with",
            "a key with several values, of which the first is what the others are compared with; or two finished runs",
            USAGE,
        )


def compare_jobs(ends: Sequence[JobEnd], tolerance: float) -> int:
    """Print how far the jobs of a comparison are from the first of them, and return the exit code."""
    everywhere = set.intersection(*(set(end.overrides) for end in ends))
    runs = [
        read_run(Path(end.directory), " ".join(item for item in end.overrides if item not in everywhere))
        for end in ends
    ]
    return 0 if print_comparison(runs, tolerance, Terminal()) else _DIFFERENT


def compare_finished(words: Sequence[str]) -> int:
    """Print how far finished runs are from the first of them: 0 if all are equal, 1 if one is not.

    Args:
        words: their directories, and the tolerance.

    Raises:
        ConfigError: there is one directory, or one that is none, or a key that has no effect here.
    """
    directories = [word for word in words if names_a_run(word)]
    tolerance = float(defaults_of(Compare)["tolerance"])
    for word in (word for word in words if word not in directories):
        key, _, value = word.partition("=")
        try:
            if key != _TOLERANCE:
                raise ValueError
            tolerance = float(value)
        except ValueError:
            raise ConfigError(
                word,
                "does not go together with the directories of finished runs",
                f"{_TOLERANCE}=1e-4, a number",
                " ".join(["autolaunch compare", *directories]),
            ) from None
    if len(directories) < 2:
        raise ConfigError(
            f"autolaunch compare {directories[0]}",
            "there is one run, and nothing to compare it with",
            "two directories of finished runs, or a key with several values",
            USAGE,
        )
    runs = [read_run(Path(directory).expanduser(), directory) for directory in directories]
    return 0 if print_comparison(runs, tolerance, Terminal()) else _DIFFERENT
