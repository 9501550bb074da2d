"""What stands in an output directory before a run begins: said now, not after hours of training."""

from __future__ import annotations

import contextlib
import itertools
import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autolaunch.directories import shown
from autolaunch.jobs.ends import ENDS, METRICS, read_summary
from autolaunch_strategies.checkpoint.files import complete_checkpoints
from autolaunch_strategies.config import ConfigError, raise_all

_DIRECTORIES = (".hydra", "logs", "checkpoints", ENDS)
_FILES = ("metrics.csv", "summary.json", "plan.yaml")
_PREDICTIONS = "predictions"


def check_what_is_there(directory: Path) -> None:
    """Refuse a directory in which something is in the way of what a run writes.

    Raises:
        ConfigError, ConfigErrors: a file where a directory has to be, or the other way round, or one of another's.
    """
    errors = []
    for path in (directory / name for name in _DIRECTORIES):
        if path.exists() and not path.is_dir():
            errors.append(ConfigError(shown(path), "is a file", "a directory, or nothing", _removing(path)))
        elif path.is_dir() and not os.access(path, os.W_OK | os.X_OK):
            errors.append(ConfigError(shown(path), "nothing can be written there", "a directory that can be written"))
    for path in (directory / name for name in _FILES):
        if path.is_dir():
            errors.append(ConfigError(shown(path), "is a directory", "a file, or nothing", _removing(path)))
    raise_all(errors)


def check_that_nothing_is_lost(directory: Path, config: Mapping[str, Any], going_on: str) -> None:
    """Refuse a run that would mix with, or write over, what an earlier one has left.

    Args:
        directory: where it will write.
        config: the job; its `ckpt_path` as it was typed.
        going_on: the line that goes on with the earlier run.

    Raises:
        ConfigError: for `fit` there is an earlier training, with which it does not go on; for `predict`, predictions.
    """
    where, task, ckpt_path = f"output_dir={shown(directory)}", config["task"], config["ckpt_path"]
    if task == "fit" and not _goes_on(directory, ckpt_path):
        whole = complete_checkpoints(directory / "checkpoints")
        if whole or _has_measured(directory):
            left = whole[-1] if whole else directory / METRICS
            raise ConfigError(
                where,
                f"an earlier run is in this directory ({left.relative_to(directory)}), and would be written over",
                f"another directory; to begin anew in this one, {_removing(directory if whole else left)} before",
                "" if ckpt_path is not None else going_on if whole else _removing(left),
            )
    if task == "predict" and any((directory / _PREDICTIONS).glob("*.pt")):
        raise ConfigError(
            where,
            f"predictions of an earlier run are in this directory ({_PREDICTIONS}), and would be mixed with new ones",
            "another directory, or one without predictions",
            _removing(directory / _PREDICTIONS),
        )


def _has_measured(directory: Path) -> bool:
    """Whether a run has finished that has written rows; one that failed without a checkpoint is simply begun again."""
    with contextlib.suppress(OSError, ValueError):  # what can't be read is nothing
        if read_summary(directory).get("status") == "finished":
            with (directory / METRICS).open("rb") as file:
                return len(list(itertools.islice(file, 2))) == 2
    return False


def _goes_on(directory: Path, ckpt_path: Any) -> bool:
    """Whether a run with this `ckpt_path` goes on with the one that is in its directory."""
    if ckpt_path is None or ckpt_path == "last":
        return ckpt_path == "last"
    return Path(str(ckpt_path)).expanduser().resolve().is_relative_to(directory.resolve())


def _removing(path: Path) -> str:
    """The line that removes what is there."""
    return f"rm {'-r ' if path.is_dir() else ''}{shlex.quote(shown(path))}"
