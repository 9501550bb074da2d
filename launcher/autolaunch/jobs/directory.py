"""What stands in an output directory before a run begins: said now, not after hours of training."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from autolaunch.directories import shown
from autolaunch_strategies.config import ConfigError, raise_all

_DIRECTORIES = (".hydra", "logs", "checkpoints")
_FILES = ("metrics.csv", "summary.json", "plan.yaml")


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


def _removing(path: Path) -> str:
    """The line that removes what is there."""
    return f"rm {'-r ' if path.is_dir() else ''}{shlex.quote(shown(path))}"
