"""`autolaunch checkpoint verify PATH`: whether checkpoints are what was written. Imports no torch."""

from __future__ import annotations

import pickle
import shlex
import zipfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rich.text import Text

from autolaunch.report.readable import readable_bytes
from autolaunch.report.terminal import Terminal
from autolaunch_strategies.checkpoint.files import (
    BESIDE,
    MANIFEST,
    damage_in,
    files_with_hashes,
    order_of_writing,
    problem_with,
    read_manifest,
)
from autolaunch_strategies.config import ConfigError, nearest

USAGE = "autolaunch checkpoint verify outputs/run/<date>_<time>"
"""The command, as `--help` shows it."""

_READERS = 4


def checkpoint_command(words: Sequence[str]) -> int:
    """Do what stands behind `autolaunch checkpoint`; 0 if all checkpoints are whole, 1 if one is not.

    Raises:
        ConfigError: something else than `verify` and one path, or nothing there to look at.
    """
    if len(words) != 2 or words[0] != "verify":
        misspelt = len(words) == 2 and nearest(words[0], ["verify"])
        raise ConfigError(
            " ".join(["autolaunch checkpoint", *words]),
            f"no such word: {words[0]}; did you mean verify?" if misspelt else "it takes one word and one path",
            "verify, and a checkpoint, or a directory of checkpoints, of a run or of runs",
            shlex.join(["autolaunch", "checkpoint", "verify", words[1]]) if misspelt else USAGE,
        )
    path = Path(words[1]).expanduser().absolute()
    checkpoints = _checkpoints(path)
    if not checkpoints:
        raise ConfigError(
            f"autolaunch checkpoint verify {words[1]}",
            "no such file or directory" if not path.exists() else "there is no checkpoint in it",
            "a checkpoint, or a directory of checkpoints, of a run or of runs",
            USAGE,
        )
    problems = {checkpoint: _problem(checkpoint) for checkpoint in checkpoints}
    rows = [("checkpoint", "step", "mesh", "size", "")]
    for checkpoint, problem in problems.items():
        manifest = read_manifest(checkpoint)
        size = sum(entry["size"] for entry in manifest.get("files", {}).values())
        rows.append(
            (
                checkpoint.name if checkpoint == path else str(checkpoint.relative_to(path)),
                str(manifest.get("step", "")),
                str(manifest.get("mesh", "")),
                readable_bytes(size) if size else "",
                problem or _checked(checkpoint),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    styles = ["bold", *("red" if problem else "green" for problem in problems.values())]
    for row, style in zip(rows, styles, strict=True):
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False))
        # Not a table of rich, which would cut paths and reasons at the width of the terminal.
        Terminal().print(Text(f"{line}  ").append(row[4], style), soft_wrap=True)
    return 1 if any(problems.values()) else 0


def _checkpoints(path: Path) -> list[Path]:
    """What is meant by `path`, run by run and oldest first; not what was being written when its run ended."""
    if path.is_file() or (path / MANIFEST).exists():
        return [path]
    if not path.is_dir():
        return []
    runs = [path / "checkpoints", *(item / "checkpoints" for item in sorted(path.iterdir()))]
    found = [item for directory in runs if directory.is_dir() for item in _by_age(directory)]
    return found or [item for item in _by_age(path) if (item / MANIFEST).exists() or (item / ".metadata").exists()]


def _by_age(directory: Path) -> list[Path]:
    entries = [item for item in directory.iterdir() if item.is_dir() and not item.name.endswith(BESIDE)]
    return sorted(entries, key=order_of_writing)


def _problem(checkpoint: Path) -> str | None:
    problem = problem_with(checkpoint)
    if problem is not None:
        return problem
    if checkpoint.is_file():
        return _no_file_of_torch(checkpoint)
    with ThreadPoolExecutor(_READERS) as readers:  # hashing lets other threads run
        problems = list(readers.map(lambda name: damage_in(checkpoint, [name]), files_with_hashes(checkpoint)))
    return next((item for item in problems if item is not None), None)


def _no_file_of_torch(file: Path) -> str | None:
    """Why a single file is no checkpoint, by its form; None if it is an archive of `torch.save`, or an old pickle."""
    try:
        with file.open("rb") as opened:
            begins = opened.read(2)
        if begins == b"PK":
            with zipfile.ZipFile(file) as archive:
                is_ours = any(name.endswith("data.pkl") for name in archive.namelist())
        else:
            is_ours = begins[:1] == pickle.PROTO
    except OSError as error:
        return f"can't be read: {error.strerror}"
    except (zipfile.BadZipFile, ValueError, NotImplementedError):
        return "is damaged: it is no readable archive"
    return None if is_ours else "is no checkpoint: torch.save has not written it"


def _checked(checkpoint: Path) -> str:
    return "whole" if checkpoint.is_dir() and files_with_hashes(checkpoint) else "whole by its size: it has no hashes"
