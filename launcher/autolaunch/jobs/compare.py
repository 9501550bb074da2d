"""`autolaunch compare`: runs beside the first of them, started for it (`mesh=1,2x2x2`) or finished."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from pathlib import Path

from autolaunch.config.command_line import names_a_run, unquoted
from autolaunch.config.schema import Compare, defaults_of
from autolaunch.directories import nearest_path
from autolaunch.jobs.ends import METRICS, JobEnd
from autolaunch.report.comparison import Run, print_comparison, read_run
from autolaunch.report.terminal import Terminal
from autolaunch_strategies.config import ConfigError, raise_all

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
    own = [" ".join(item for item in end.overrides if item not in everywhere) for end in ends]
    alike = len(set(own)) < len(own)  # then only their numbers tell jobs apart
    labels = [f"job {end.number} {label}".rstrip() if alike else label for end, label in zip(ends, own, strict=True)]
    runs = [read_run(Path(end.directory), label) for end, label in zip(ends, labels, strict=True)]
    return 0 if print_comparison(runs, tolerance, Terminal()) else _DIFFERENT


def compare_finished(words: Sequence[str]) -> int:
    """Print how far finished runs are from the first of them: 0 if all are equal, 1 if one is not.

    Args:
        words: their directories, and the tolerance.

    Raises:
        ConfigError: there is one directory, or one that is no run's, or a key that has no effect here, or no tolerance.
        ConfigErrors: several directories are no run's.
    """
    directories = [word for word in words if names_a_run(word)]
    tolerance = float(defaults_of(Compare)["tolerance"])
    for word in (word for word in words if word not in directories):
        key, _, value = word.partition("=")
        if key != _TOLERANCE:
            raise ConfigError(
                word,
                "does not go together with the directories of finished runs",
                f"{_TOLERANCE}=1e-4, a number",
                shlex.join(["autolaunch", "compare", *directories]),
            )
        tolerance = _tolerance(value)
    if len(directories) < 2:
        raise ConfigError(
            f"autolaunch compare {directories[0]}",
            "there is one run, and nothing to compare it with",
            "two directories of finished runs, or a key with several values",
            USAGE,
        )
    return 0 if print_comparison(_read_all(directories), tolerance, Terminal()) else _DIFFERENT


def _tolerance(typed: str) -> float:
    try:
        tolerance = float(typed)
    except ValueError:
        tolerance = math.nan
    if not tolerance >= 0:
        raise ConfigError(
            f"{_TOLERANCE}={typed}",
            "is not a number that is at least 0",
            "a number, at least 0: the largest relative difference that counts as equal",
            f"{_TOLERANCE}=1e-4",
        )
    return tolerance


def _read_all(directories: Sequence[str]) -> list[Run]:
    runs: dict[str, Run] = {}
    errors = []
    for typed in dict.fromkeys(directories):
        try:
            runs[typed] = read_run(_run_at(typed), typed)
        except ConfigError as error:
            errors.append(error)
    raise_all(errors)
    return [runs[typed] for typed in directories]


def _run_at(typed: str) -> Path:
    """The directory of the run that is meant by what was typed, if that is one beyond doubt."""
    path = Path(typed).expanduser()
    if not path.exists():
        near = nearest_path(path)
        run = None if near is None else _run_meant(near)
        raise ConfigError(
            typed, "there is no such directory", "the directory of a run", shlex.quote(str(run)) if run else ""
        )
    run = _run_meant(path)
    if path.is_dir():
        if run in (None, path):
            return path
        raise ConfigError(typed, "holds runs, and is not one itself", "the directory of one run", shlex.quote(str(run)))
    if run is None or path.name != METRICS:
        raise ConfigError(typed, "is a file", "the directory of a run", shlex.quote(str(run)) if run else "")
    return run


def _run_meant(path: Path) -> Path | None:
    """The run that a path is, or whose file it is, or the newest one that it holds: of a name, or of a sweep."""
    directory = path if path.is_dir() else path.parent
    if (directory / METRICS).is_file():
        return directory
    if directory != path:
        return None
    held = [*path.glob(f"*/{METRICS}"), *path.glob(f"*/*/{METRICS}")]
    return max(held, key=lambda file: file.stat().st_mtime).parent if held else None
