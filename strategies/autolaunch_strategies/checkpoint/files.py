"""Checkpoint directories as files: which are complete, which are not, which is the newest. Imports no torch."""

from __future__ import annotations

import json
from pathlib import Path

MANIFEST = "checkpoint.json"
"""Written last: names every file of the checkpoint with its size. A directory without it is half-written."""

METADATA = "meta.pt"
"""Everything that is not a model's or an optimizer's tensor."""

WRITING = ".writing"
"""Suffix of a checkpoint directory while it is written."""

REPLACED = ".replaced"
"""Suffix of a checkpoint directory for the moment in which another one takes its place."""


def write_manifest(directory: Path, step: int, mesh: str) -> None:
    """List the files of a finished checkpoint directory with their sizes."""
    files = {item.name: item.stat().st_size for item in sorted(directory.iterdir()) if item.name != MANIFEST}
    beside = directory / f"{MANIFEST}{WRITING}"
    beside.write_text(json.dumps({"format": 1, "step": step, "mesh": mesh, "files": files}, indent=1))
    beside.replace(directory / MANIFEST)


def read_manifest(directory: Path) -> dict:
    """The manifest of a checkpoint directory, or an empty dict if there is none that can be read."""
    try:
        manifest = json.loads((directory / MANIFEST).read_text())
    except (OSError, ValueError):
        return {}
    return manifest if isinstance(manifest, dict) and isinstance(manifest.get("files"), dict) else {}


def problem_with(path: Path) -> str | None:
    """Why a checkpoint can't be loaded, in a few words; None if it looks whole.

    A directory is whole when each file of its manifest is there in full. A single file (a plain Lightning checkpoint)
    is only looked at for being there and not empty.
    """
    if not path.exists():
        return "does not exist"
    if path.is_file():
        return "is an empty file" if path.stat().st_size == 0 else None
    if path.name.endswith(WRITING):
        return "was never finished: it was still being written"
    manifest = read_manifest(path)
    if not manifest:
        return f"is not a complete checkpoint: it has no readable {MANIFEST}"
    for name, size in manifest["files"].items():
        file = path / name
        if not file.is_file():
            return f"is damaged: {name} is missing"
        if file.stat().st_size != size:
            return f"is damaged: {name} has {file.stat().st_size} bytes instead of {size}"
    return None


def complete_checkpoints(directory: Path) -> list[Path]:
    """The whole checkpoint directories right below `directory`, the furthest trained (then the newest) last."""
    if not directory.is_dir():
        return []
    checkpoints = [
        item
        for item in directory.iterdir()
        if item.is_dir() and not item.is_symlink() and (item / MANIFEST).is_file() and problem_with(item) is None
    ]
    return sorted(checkpoints, key=lambda item: (read_manifest(item)["step"], (item / MANIFEST).stat().st_mtime_ns))
