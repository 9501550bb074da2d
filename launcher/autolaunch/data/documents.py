"""Finding the files that `data.path` means, and the text that is there when it means none."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from autolaunch.directories import nearest_path
from autolaunch_strategies.config import ConfigError, as_typed

TEXT_SUFFIXES = (".txt", ".text", ".md", ".markdown", ".rst", ".tex")
"""What is taken from a directory; a file named by itself or by a glob may have any name."""

TOKEN_SUFFIXES = (".bin", ".npy")


def standard_library_documents() -> list[bytes]:
    """The English text inside Python's standard library: the help topics of `pydoc`, about 0.5 MB of UTF-8."""
    from pydoc_data.topics import topics

    return [topics[name].encode() for name in sorted(topics)]


def find_files(path: Any, suffixes: Iterable[str], key: str = "data.path") -> list[Path]:
    """The readable, non-empty files that `path` means: a file, a directory, a glob or a list of them.

    A directory is searched recursively. Files of a directory and of a glob come sorted by name, without empty ones;
    entries of a list come in the list's order.

    Raises:
        ConfigError: nothing is there, it is empty or cannot be read; `key` is how the message calls the setting.
    """
    if isinstance(path, list | tuple):
        if not path:
            raise ConfigError(f"{key}=[]", "the list is empty", "a file, a directory, a glob, or a list of them")
        return [file for entry in path for file in find_files(entry, suffixes, key)]
    where = f"{key}={path}"
    if not isinstance(path, str | os.PathLike) or not str(path):
        raise ConfigError(where, "not a path", "a file, a directory, a glob, or a list of them")
    place = expanded(path)
    if place.is_dir():
        files = _files_in(place, tuple(suffixes))
        if not files:
            raise ConfigError(where, f"no file with anything in it ends in {', '.join(suffixes)} in this directory")
    elif place.exists():
        files = [place]
    elif glob.has_magic(str(place)):
        # pathlib's own globbing takes no absolute pattern.
        files = sorted(filter(_has_content, map(Path, glob.iglob(str(place), recursive=True))))  # noqa: PTH207 - may be absolute
        if not files:
            raise ConfigError(where, "no file with anything in it matches")
    else:
        close = nearest_path(place)
        raise ConfigError(where, "no such file or directory", write=as_typed(key, close) if close else "")
    for file in files:
        name = where if file == place else f"{where}: {file}"
        if not os.access(file, os.R_OK):
            raise ConfigError(name, "the file cannot be read by this user")
        if file.stat().st_size == 0:
            raise ConfigError(name, "the file is empty")
    return files


def expanded(path: str | os.PathLike[str]) -> Path:
    """The path with the home directory in place of ``~``; unchanged where there is no such user."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def _has_content(file: Path) -> bool:
    return file.is_file() and file.stat().st_size > 0


def _files_in(directory: Path, suffixes: tuple[str, ...]) -> list[Path]:
    visible = (
        file
        for file in directory.rglob("*")
        if not any(part.startswith(".") for part in file.relative_to(directory).parts)
    )
    return sorted(file for file in visible if file.suffix.lower() in suffixes and _has_content(file))
