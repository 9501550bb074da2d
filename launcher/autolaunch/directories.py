"""Where the config groups lie, how messages call a file in them, and which path a misspelt one was meant to be."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

from autolaunch_strategies.config import ConfigError, nearest

CONF = next(path for path in (Path(__file__).parent / "conf", Path(__file__).parents[2] / "conf") if path.is_dir())
"""The config groups: beside this module in a wheel, at the top of a checkout."""

_FULL = (errno.ENOSPC, errno.EDQUOT)


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


def cache_entry(name: str) -> Path:
    """Where an entry of the cache lies or is to be made; one that its owner lets nobody read has one beside it.

    That is in the temporary directories, as `writable_cache()` is where nothing can be written.
    """
    entry = writable_cache() / name
    if entry.exists() and not os.access(entry, os.R_OK | os.X_OK if entry.is_dir() else os.R_OK):
        _temporary_cache().mkdir(exist_ok=True)
        return _temporary_cache() / name
    return entry


def part_of(entry: Path) -> Path:
    """A name beside an entry of the cache for what becomes it by a rename, not used by anybody else.

    What is made there has the permissions of the user's umask, so that others may read it; not so with `tempfile`.
    """
    return entry.with_name(f"{entry.name}.{uuid.uuid4().hex}.part")


@contextlib.contextmanager
def cache_errors() -> Iterator[None]:
    """Tell of a cache in which there is no room, or that can't be read or written; an OSError of other files passes.

    Raises:
        ConfigError: what is wrong with the cache.
    """
    try:
        yield
    except OSError as error:
        caches, file = (user_cache(), _temporary_cache()), Path(str(error.filename))
        cache = next((item for item in caches if file.is_relative_to(item)), None)
        if cache is None and error.errno not in _FULL:
            raise
        raise ConfigError(
            f"cache {cache or user_cache()}",
            os.strerror(error.errno or 0).lower(),
            "a directory that can be read and written, with room for what is tokenised",
            "export XDG_CACHE_HOME=DIRECTORY",
        ) from None


def _temporary_cache() -> Path:
    return Path(tempfile.gettempdir()) / f"autolaunch-{os.getuid()}"
