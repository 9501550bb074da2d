"""Checkpoint directories as files: which are complete, which are not, which is the newest. Imports no torch."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import xxhash

MANIFEST = "checkpoint.json"
"""Written last: names every file of the checkpoint with size and hash. A directory without it is half-written."""

FORMAT = 3
"""Of the manifest; 1 had sizes only, 2 no hash of itself."""

METADATA = "meta.pt"
"""Everything that is not a model's or an optimizer's tensor."""

WRITING = ".writing"
"""Suffix of a checkpoint directory while it is written."""

REPLACED = ".replaced"
"""Suffix of a checkpoint directory for the moment in which another one takes its place."""

REMOVED = ".removed"
"""Suffix of a checkpoint directory while it is removed: what is left of it is none."""

BESIDE = (WRITING, REPLACED, REMOVED)
"""All suffixes of what stands beside checkpoints and is none by its name."""


def hash_of(file: Path) -> str:
    """The XXH3 hash (128 bits) of a file: it tells damage, not malice."""
    digest = xxhash.xxh3_128()
    with file.open("rb") as opened:
        while block := opened.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def write_manifest(
    directory: Path,
    step: int,
    mesh: str,
    hashes: Mapping[str, str] | None = None,
    run: Mapping[str, Any] | None = None,
    written: float | None = None,
) -> None:
    """List the files of a finished checkpoint directory with their sizes and hashes.

    Args:
        hashes: of those files whose hash is known; the others are read.
        run: plain data about the run that wrote it (`checkpoint.record`).
        written: when, in seconds since 1970; by default now.
    """
    known = hashes or {}
    # What other ranks have written counts, too, where a list of names comes late to this machine: then it is not whole.
    names = {*known, *(item.name for item in directory.iterdir())} - {MANIFEST}
    files = {
        item.name: {"size": item.stat().st_size, "xxh3": known.get(item.name) or hash_of(item)}
        for item in map(directory.joinpath, sorted(names))
    }
    about = {"step": step, "mesh": mesh, "written": time.time() if written is None else written, "run": dict(run or {})}
    manifest = {"format": FORMAT, **about, "files": files}
    beside = directory / f"{MANIFEST}{WRITING}"
    beside.write_text(json.dumps({**manifest, "xxh3": _hash_of_manifest(manifest)}, indent=1))
    reach_disk(beside)
    beside.replace(directory / MANIFEST)
    reach_disk(directory)


def reach_disk(path: Path) -> None:
    """Wait until the content of a file, or the names in a directory, outlast a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        # Not every file system can be asked that of a directory.
        with contextlib.suppress(OSError) if path.is_dir() else contextlib.nullcontext():
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _hash_of_manifest(manifest: Mapping[str, Any]) -> str:
    """The hash of what a manifest says, its own hash aside, however it is written."""
    said = {key: value for key, value in manifest.items() if key != "xxh3"}
    return xxhash.xxh3_128(json.dumps(said, sort_keys=True).encode()).hexdigest()


def read_manifest(directory: Path) -> dict[str, Any]:
    """The manifest of a checkpoint directory, each file as its `size` and, if it is known, its hash `xxh3`.

    `written` is 0 where it does not say when that was. An empty dict if there is none that can be read, that says less
    than a manifest does, or something else than was written.
    """
    try:
        manifest = json.loads((directory / MANIFEST).read_text())
        hashed = "xxh3" in manifest or manifest["format"] == FORMAT
        if hashed and manifest["format"] <= FORMAT and manifest["xxh3"] != _hash_of_manifest(manifest):
            return {}
        files = {
            name: {"size": int(entry["size"]), "xxh3": str(entry["xxh3"])}
            if isinstance(entry, dict)
            else {"size": int(entry)}
            for name, entry in manifest["files"].items()
        }
        written = float(manifest.get("written", 0.0))
        if not math.isfinite(written):
            return {}
        numbers = {"format": int(manifest["format"]), "step": int(manifest["step"]), "written": written}
        return {**manifest, **numbers, "files": files}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def problem_with(path: Path) -> str | None:
    """Why a checkpoint can't be loaded, in a few words; None if it looks whole.

    A directory is whole when each file of its manifest is there in full. A single file (a plain Lightning checkpoint)
    is only looked at for being there and not empty.
    """
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return "does not exist"
    except OSError as error:
        return f"can't be read: {error.strerror}"
    if stat.S_ISREG(status.st_mode):
        return "is an empty file" if status.st_size == 0 else None
    if path.name.endswith(WRITING):
        return "was never finished: it was still being written"
    manifest = read_manifest(path)
    if not manifest and (reason := _unreadable(path / MANIFEST)):
        return f"can't be read: {MANIFEST}: {reason}"
    if not manifest:
        return f"is not a complete checkpoint: it has no readable {MANIFEST}"
    if manifest["format"] > FORMAT:
        return f"was written by a newer autolaunch: its format is {manifest['format']}, this one reads up to {FORMAT}"
    for name, entry in manifest["files"].items():
        file = path / name
        try:
            size = file.stat().st_size if file.is_file() else None
        except OSError as error:
            return f"can't be read: {name}: {error.strerror}"
        if size is None:
            return f"is damaged: {name} is missing"
        if size != entry["size"]:
            return f"is damaged: {name} has {size} bytes instead of {entry['size']}"
    return None


def files_with_hashes(path: Path) -> list[str]:
    """The files of a whole checkpoint directory whose content can be checked, the largest first."""
    files = read_manifest(path)["files"]
    return sorted((name for name, entry in files.items() if "xxh3" in entry), key=lambda name: -files[name]["size"])


def damage_in(path: Path, names: Iterable[str]) -> str | None:
    """What is wrong with the content of some files of a checkpoint directory, in a few words; None if nothing is.

    Args:
        names: of files in the manifest, with hashes.
    """
    files = read_manifest(path)["files"]
    for name in names:
        try:
            if hash_of(path / name) != files[name]["xxh3"]:
                return f"is damaged: the content of {name} has changed since it was written"
        except OSError as error:
            return f"can't be read: {name}: {error.strerror}"
    return None


def order_of_writing(checkpoint: Path) -> tuple[float, int, int]:
    """Sorts checkpoints by when they were written, the newest last, by what they say themselves.

    Those of older formats do not say; they come first, the furthest trained last. What has no readable manifest is as
    old as its directory.
    """
    manifest, changed = read_manifest(checkpoint), checkpoint.stat().st_mtime_ns
    return (manifest["written"], manifest["step"], changed) if manifest else (changed / 1e9, -1, changed)


def _unreadable(file: Path) -> str | None:
    """Why a file that is there can't be read; None if it can, or is not there."""
    try:
        with file.open("rb"):
            return None
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        return error.strerror


def clear_leftovers(directory: Path, is_own: Callable[[str], bool]) -> None:
    """Remove what processes that were killed have left in a directory in which nobody else writes.

    A checkpoint that was to be replaced gets its name back if nothing has taken its place.

    Args:
        is_own: whether a checkpoint of this name is one to look after.
    """
    try:
        entries = list(directory.iterdir())
    except OSError:
        return
    for item in entries:
        suffix = next((suffix for suffix in BESIDE if item.name.endswith(suffix)), None)
        if suffix is None or not item.is_dir() or item.is_symlink() or not is_own(item.name.removesuffix(suffix)):
            continue
        plain = item.with_name(item.name.removesuffix(suffix))
        if suffix == REPLACED and problem_with(plain) is not None and problem_with(item) is None:
            if not os.path.lexists(plain):
                item.rename(plain)
        else:
            shutil.rmtree(item, ignore_errors=True)


def complete_checkpoints(directory: Path) -> list[Path]:
    """The whole checkpoint directories right below `directory`, the newest last; none if it can't be read."""
    try:
        entries = list(directory.iterdir())
    except OSError:
        return []
    checkpoints = [item for item in entries if item.is_dir() and not item.is_symlink() and problem_with(item) is None]
    return sorted(checkpoints, key=order_of_writing)
