"""Where the config groups lie, and how a file in them is called in a message."""

from __future__ import annotations

import os
from pathlib import Path

CONF = next(path for path in (Path(__file__).parent / "conf", Path(__file__).parents[2] / "conf") if path.is_dir())
"""The config groups: beside this module in a wheel, at the top of a checkout."""


def shown(file: Path) -> str:
    """A file's path as it helps a reader: under conf/ for ours, from the working directory for the user's."""
    if file.is_relative_to(CONF):
        return str(Path("conf") / file.relative_to(CONF))
    return str(file.relative_to(Path.cwd())) if file.is_relative_to(Path.cwd()) else str(file)


def user_cache() -> Path:
    """The directory for caches: `$XDG_CACHE_HOME/autolaunch`, or `~/.cache/autolaunch`. Deleting it loses nothing."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "autolaunch"
