"""Runs cells on warm ranks, one after another, and keeps what came out in a file."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from autolaunch_strategies.config import parse_mesh
from tests.gauntlet.cells import PHASE, PLAIN
from tests.gauntlet.row import Row
from tests.gauntlet.table import meshes_of
from tests.gauntlet.verdict import Verdict, judge
from tests.support.ranks import Group

CELLS = Path(__file__).with_name("cells.py")
SECONDS = 120.0
"""A cell that takes longer hangs."""
FAREWELL = 8.0
"""How long ranks have for refusing after the first of them did, in seconds."""
LIFE = 40
"""Cells that ranks run before new ones take their place: every cell leaves process groups behind."""


class Ranks:
    """Groups of warm ranks by their number."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.groups: dict[int, Group] = {}
        self.runs: dict[int, int] = {}
        self.made = 0

    def outcome(self, case: str, count: int) -> dict[int, dict[str, Any]]:
        """What each of `count` ranks wrote of a case."""
        self.runs[count] = self.runs.get(count, 0) + 1
        if self.runs[count] % LIFE == 0:
            self.groups.pop(count).close()
        if count not in self.groups:
            self.made += 1
            where = self.directory / f"{self.made}"
            self.groups[count] = Group(CELLS, where, "cells", count, timeout=SECONDS, farewell=FAREWELL)
        group = self.groups[count]
        written = group.outcome(case)
        for file in group.directory.glob("*.json"):
            file.unlink()
        return written

    def close(self) -> None:
        for group in self.groups.values():
            group.close()


class Results:
    """Verdicts by cell, kept in a JSON file that is written after every cell."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.cells: dict[str, dict[str, Any]] = json.loads(path.read_text())["cells"] if path.exists() else {}

    def add(self, verdict: Verdict) -> None:
        entry = verdict.as_dict()
        self.cells[entry.pop("cell")] = entry
        self.save()

    def keep(self, keys: Collection[str]) -> None:
        """Forget the cells of rows that are there no more."""
        self.cells = {cell: entry for cell, entry in self.cells.items() if (cell.rpartition("@")[0] or cell) in keys}
        self.save()

    def save(self) -> None:
        ordered = {cell: self.cells[cell] for cell in sorted(self.cells)}
        self.path.write_text(json.dumps({"cells": ordered}, indent=1) + "\n")


def run(rows: Iterable[Row], chosen: Callable[[str], bool], results: Results, say: Callable[[str], None]) -> None:
    """Run the chosen cells of rows.

    Args:
        chosen: says of a cell, `<library>:<model>@<mesh>`, whether it is run.
        say: is told every verdict.
    """
    with TemporaryDirectory() as directory:
        ranks = Ranks(Path(directory))
        try:
            for row in rows:
                cells = [cell for mesh in meshes_of(row) if chosen(cell := f"{row.key}@{mesh}")]
                if cells:
                    _run_row(row, cells, ranks, results, say)
        finally:
            ranks.close()


def _run_row(row: Row, cells: list[str], ranks: Ranks, results: Results, say: Callable[[str], None]) -> None:
    alone = ranks.outcome(f"{row.key}@{PLAIN}", 1).get(0, {"error": "it hangs in one process", "traceback": ""})
    if "error" in alone:
        say(f"{row.key}: no cell, since one process fails: {alone['error']}\n{alone['traceback'][-1500:]}")
        results.cells[row.key] = {"verdict": "not run", "message": alone["error"]}
        results.save()
        return
    results.cells[row.key] = {"verdict": "one process", "parameters": alone["result"]["parameters"]}
    for cell in cells:
        started = time.monotonic()
        count = parse_mesh(cell.rpartition("@")[2]).size
        verdict = judge(cell, alone["result"], ranks.outcome(cell, count), count, PHASE)
        results.add(verdict)
        share = "" if verdict.share is None else f" {verdict.share:.2f}"
        took = time.monotonic() - started
        say(f"{cell}: {verdict.verdict} {verdict.where}{share} ({took:.0f} s) {verdict.message}".rstrip())
