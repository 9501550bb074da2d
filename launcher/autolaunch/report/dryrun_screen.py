"""What a dry run saw, in the terminal: memory of each rank beside the plan's, and what is exchanged."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from autolaunch.directories import shown
from autolaunch.report.page import Page
from autolaunch.report.readable import readable_bytes


def show_dryrun(rows: Sequence[Mapping[str, Any]], mesh: str, file: Path, console: Console) -> None:
    """Show the ranks of a dry run.

    Args:
        rows: `planning.dryrun.account_of` of each.
        file: where everything is written.
    """
    page = Page(console)
    page.title(f"memory at the fullest moment of a step, mesh={mesh}")
    memory = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("rank", "place", "parameters", "gradients", "optimizer", "activations", "total", "plan says"):
        memory.add_column(name, justify="left" if name in ("rank", "place") else "right")
    for row in rows:
        place = " ".join(f"{axis}{index}" for axis, index in row["place"].items())
        pieces, plan = row["memory"], row.get("predicted")
        said = "" if plan is None else f"{readable_bytes(plan['total'])} ({plan['total'] / pieces['total'] - 1:+.0%})"
        kinds = ("parameters", "gradients", "optimizer", "activations", "total")
        memory.add_row(str(row["rank"]), place, *(readable_bytes(pieces[kind]) for kind in kinds), said)
    page.print(memory)
    page.title("what a step exchanges")
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("rank", "what", "among", "times", "bytes in all"):
        table.add_column(name, justify="left" if name in ("rank", "what", "among") else "right")
    for row in rows:
        sums: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
        for item in row["collectives"]:
            _add(sums[item["kind"], item["axes"]], item)
        for item in row["messages"]:
            _add(sums[item["kind"], f"rank {item['peer']}"], item)
        for number, ((kind, among), (count, size)) in enumerate(sums.items()):
            table.add_row(str(row["rank"]) if not number else "", kind, among, f"{count:,}", readable_bytes(size))
    page.print(table)
    page.text(f"ranks of one group do the same in the same order; every size: {shown(file)}")


def _add(sums: list[int], item: Mapping[str, Any]) -> None:
    sums[0] += item["count"]
    sums[1] += item["count"] * item["bytes"]
