"""What a dry run saw, in the terminal: memory of each rank beside the plan's, and what is exchanged."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from autolaunch.directories import shown
from autolaunch.report.page import Page
from autolaunch.report.readable import readable_bytes


def show_dryrun(
    rows: Sequence[Mapping[str, Any]], wrong: Sequence[str], mesh: str, file: Path, console: Console
) -> None:
    """Show the ranks of a dry run.

    Args:
        rows: `planning.dryrun.account_of` of each.
        wrong: where they do not agree.
        file: where everything is written.
    """
    page = Page(console)
    sizes = {axis: len({row["place"][axis] for row in rows}) for axis in rows[0]["place"]}
    most = max(row["memory"]["total"] for row in rows)
    unit, word = next((item for item in _UNITS if most >= item[0]), _UNITS[-1])
    page.title(f"{word} at the fullest moment of a step, mesh={mesh}")
    memory = _table(page, ("rank", "place"), ("params", "grads", "optim", "rest", "total", "plan", ""))
    for alike in _alike(rows, lambda row: (row["memory"], row.get("predicted"))):
        row = alike[0]
        pieces, plan = row["memory"], row.get("predicted")
        total = None if plan is None else plan["total"]
        said = ("", "") if total is None else (f"{total / unit:,.2f}", f"{total / pieces['total'] - 1:+.0%}")
        kinds = ("parameters", "gradients", "optimizer", "activations", "total")
        memory.add_row(_ranks(alike), _place(alike, sizes), *(f"{pieces[kind] / unit:,.2f}" for kind in kinds), *said)
    page.print(memory)
    page.text("rest: activations, gathered parameters and what is computed with; plan: what `plan` says of the total")
    page.title("what a step exchanges")
    table = _table(page, ("rank", "what", "among"), ("times", "bytes in all"))
    for alike in _alike(rows, _exchanged):
        for number, ((kind, among), (count, size)) in enumerate(_exchanged(alike[0]).items()):
            table.add_row(_ranks(alike) if not number else "", kind, among, f"{count:,}", readable_bytes(size))
    page.print(table)
    for note in dict.fromkeys(note for row in rows for note in row["notes"]):
        page.text(note)
    is_compared = len(rows) > 1 and not wrong
    agreed = f"what ranks {_ranks(rows)} exchange fits together (`rank=` runs others); " if is_compared else ""
    page.text(f"{agreed}every size: {shown(file)}")


def _table(page: Page, words: Sequence[str], numbers: Sequence[str]) -> Table:
    """A table in which words go on in the next line where there is no room, and numbers are whole."""
    table = Table(box=page.box, show_edge=False, pad_edge=False, collapse_padding=True, padding=(0, 1))
    for name in words:
        table.add_column(name, overflow="fold")
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table


_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def _alike(rows: Sequence[Mapping[str, Any]], of: Callable[[Mapping[str, Any]], Any]) -> list[list[Mapping[str, Any]]]:
    """Rows of which `of` says the same, together; in the order of the first of each."""
    found: list[list[Mapping[str, Any]]] = []
    for row in rows:
        known = next((group for group in found if of(group[0]) == of(row)), None)
        if known is None:
            found.append([row])
        else:
            known.append(row)
    return found


def _ranks(rows: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(str(row["rank"]) for row in rows)


def _place(rows: Sequence[Mapping[str, Any]], sizes: Mapping[str, int]) -> str:
    """Where ranks stand on the axes on which those that are shown differ."""
    places = {axis: sorted({row["place"][axis] for row in rows}) for axis, size in sizes.items() if size > 1}
    return " ".join(f"{axis}{','.join(map(str, numbers))}" for axis, numbers in places.items())


def _exchanged(row: Mapping[str, Any]) -> dict[tuple[str, str], list[int]]:
    """(what, among whom) -> [times, bytes in all]."""
    sums: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
    for item in row["collectives"]:
        _add(sums[item["kind"], item["axes"]], item)
    for item in row["messages"]:
        _add(sums[item["kind"], item["at"]], item)
    return dict(sums)


def _add(sums: list[int], item: Mapping[str, Any]) -> None:
    sums[0] += item["count"]
    sums[1] += item["count"] * item["bytes"]
