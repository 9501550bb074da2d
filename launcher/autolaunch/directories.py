"""Where the config groups lie, and how a file in them is called in a message."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

CONF = next(path for path in (Path(__file__).parent / "conf", Path(__file__).parents[2] / "conf") if path.is_dir())
"""The config groups: beside this module in a wheel, at the top of a checkout."""


def shown(file: Path) -> str:
    """A file's path as it helps a reader: under conf/ for ours, from the working directory for the user's."""
    if file.is_relative_to(CONF):
        return str(Path("conf") / file.relative_to(CONF))
    return str(file.relative_to(Path.cwd())) if file.is_relative_to(Path.cwd()) else str(file)


def user_cache() -> Path:
    """The directory for caches: `$XDG_CACHE_HOME/autolaunch`, or `~/.cache/autolaunch`. Deleting it loses nothing.

    For a user without a home, as in many a container, one of the temporary directories.
    """
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "autolaunch"
    except RuntimeError:
        return _temporary_cache()


def writable_cache() -> Path:
    """`user_cache()`, made if it is not there; if nothing can be written to it, one of the temporary directories."""
    directory = user_cache()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if os.access(directory, os.W_OK | os.X_OK):
            return directory
    except OSError:  # a home that is not there, or another's
        pass
    _temporary_cache().mkdir(exist_ok=True)
    return _temporary_cache()


def _temporary_cache() -> Path:
    return Path(tempfile.gettempdir()) / f"autolaunch-{os.getuid()}"
