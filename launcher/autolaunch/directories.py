"""Where the config groups lie, how messages call a file in them, and which path a misspelt one was meant to be."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from autolaunch_strategies.config import nearest

CONF = next(path for path in (Path(__file__).parent / "conf", Path(__file__).parents[2] / "conf") if path.is_dir())
"""The config groups: beside this module in a wheel, at the top of a checkout."""


def shown(file: Path) -> str:
    """A file's path as it helps a reader: under conf/ for ours, from the working directory for the user's."""
    if file.is_relative_to(CONF):
        return str(Path("conf") / file.relative_to(CONF))
    return str(file.relative_to(Path.cwd())) if file.is_relative_to(Path.cwd()) else str(file)


def nearest_path(place: Path) -> Path | None:
    """What is there and was most likely meant by a path at which there is nothing; None if nothing is like it."""
    first = next((part for part in (*reversed(place.parents), place) if not part.exists()), None)
    if first is None:
        return place
    try:
        beside = [  # a link may lead nowhere
            entry
            for entry in first.parent.iterdir()
            if entry.name[0] != "." and (entry.exists() if first == place else entry.is_dir())
        ]
    except OSError:
        return None
    # Compared without the ending, which would make all files of a kind look alike.
    same_kind = [entry for entry in beside if entry.suffix == first.suffix]
    for entries in (same_kind, beside):
        stems = {entry.stem: entry for entry in sorted(entries)}
        if close := nearest(first.stem, stems, cutoff=0.7):
            return nearest_path(stems[close] / place.relative_to(first))
    return None


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
