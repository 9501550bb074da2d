"""How far each rank has come, written by the rank, read by the parent: one small file per rank."""

from __future__ import annotations

from enum import IntEnum
from pathlib import Path

from autolaunch.job import write_beside


class Phase(IntEnum):
    """The steps of a worker's life, in order."""

    SILENT = 0
    """Nothing was heard of it."""
    STARTED = 1
    """Python runs; it can be asked for its stack."""
    IMPORTED = 2
    """torch is imported."""
    CONNECTED = 3
    """It talks to the store where all ranks meet."""
    RUNNING = 4
    """All ranks are joined, and it has begun its task."""
    DONE = 5
    """The task is done on every rank."""


def write_phase(directory: Path, rank: int, phase: Phase) -> None:
    """Tell the parent that this rank has reached `phase`."""
    write_beside(phase_file(directory, rank), phase.name)


def read_phase(directory: Path, rank: int) -> Phase:
    """The last phase that the rank reported."""
    try:
        return Phase[phase_file(directory, rank).read_text(encoding="utf-8")]
    except FileNotFoundError:
        return Phase.SILENT


def forget_reports(directory: Path) -> None:
    """Make the directory, and remove what ranks of an earlier run in it reported; their logs stay."""
    directory.mkdir(parents=True, exist_ok=True)
    for report in ("phase_*", "failure_*", "stack_*", "stopped.json"):
        for file in directory.glob(report):
            file.unlink()


def phase_file(directory: Path, rank: int) -> Path:
    """Where a rank reports its phase."""
    return directory / f"phase_{rank}"


def stack_file(directory: Path, rank: int) -> Path:
    """Where a rank writes its stack when the parent asks for it."""
    return directory / f"stack_{rank}"
