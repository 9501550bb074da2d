"""What came out, as a page of the docs."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from tests.gauntlet.table import MESHES
from tests.gauntlet.verdict import CLASSES

_PARTICULARS = re.compile(r"\bmodel\.[\w.]+|\(\w+\)|(?<=for )[A-Z]\w+|(?<=parts of )\w+|(?<=model )[A-Z]\w+|\b\d+\b")
Cells = Mapping[str, Mapping[str, Any]]
ONE_PROCESS = "one process"
"""The verdict of a row's entry, which holds the number of its parameters."""

_HEAD = """# The gauntlet

Models that nobody here wrote, made small by their own arguments, with random weights and without dropout. Each is
trained for three steps of SGD with clipping on every mesh, in a LightningModule, with every option of `MeshStrategy` at
its default, and compared with a plain loop of one process: the loss and the gradient norm of every step, the weights
and buffers afterwards. `python -m tests.gauntlet` writes this page; `tests/gauntlet/requirements.txt` names the
libraries and their versions.

A cell is *right*; *refused*, by every rank alike, with a message that says why and what to write; *wrong*, if a number
differs; a *crash*, if anything else is raised; or a *hang*. `python -m tests.gauntlet timm:resnet10t@1x1x2` runs one.
"""


def page(cells: Cells) -> str:
    """The page in Markdown."""
    verdicts = {cell: entry for cell, entry in cells.items() if entry["verdict"] in CLASSES}
    parts = [
        _HEAD,
        "## By axis\n\n" + _counts(verdicts, "axis", lambda cell: _axis(cell), MESHES.values()),
        "## By library\n\n" + _counts(verdicts, "library", lambda cell: cell.partition(":")[0]),
        _shares(verdicts),
        "## Models\n\nThe number is the largest share of the parameters that a rank holds.\n\n" + _models(cells),
        "## What is refused, and why\n\n" + _messages(verdicts),
    ]
    return "\n".join(part.rstrip() + "\n" for part in parts if part)


def _axis(cell: str) -> str:
    mesh = cell.rpartition("@")[2]
    return MESHES.get(mesh, mesh)


def _counts(verdicts: Cells, title: str, group_of: Any, order: Iterable[str] = ()) -> str:
    groups: dict[str, Counter[str]] = {name: Counter() for name in order}
    for cell, entry in verdicts.items():
        groups.setdefault(group_of(cell), Counter())[entry["verdict"]] += 1
    groups = {name: counts for name, counts in groups.items() if counts}
    total = sum(groups.values(), Counter())
    lines = [f"| {title} | cells | {' | '.join(CLASSES)} | % right |", "|---" * (len(CLASSES) + 3) + "|"]
    for name, counts in [*(groups.items() if order else sorted(groups.items())), ("all", total)]:
        lines.append(
            f"| {name} | {counts.total()} | {' | '.join(str(counts[kind]) for kind in CLASSES)} "
            f"| {100 * counts['right'] / max(1, counts.total()):.0f} |"
        )
    return "\n".join(lines) + "\n"


def _shares(verdicts: Cells) -> str:
    """How much of the parameters a rank holds at mp=2."""
    shares = [entry["share"] for cell, entry in verdicts.items() if _axis(cell) == "mp" and "share" in entry]
    if not shares:
        return ""
    whole = sum(share > 0.8 for share in shares)
    return (
        f"Of the parameters of a model, a rank of two along mp holds {statistics.median(shares):.2f} in the median; "
        f"in {whole} of {len(shares)} models more than 0.8.\n"
    )


def _models(cells: Cells) -> str:
    axes = list(dict.fromkeys([*MESHES, *(cell.rpartition("@")[2] for cell in cells if "@" in cell)]))
    titles = ["model", "parameters", *(MESHES.get(mesh, mesh) for mesh in axes)]
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for key in sorted({cell.rpartition("@")[0] or cell for cell in cells}):
        if cells.get(key, {}).get("verdict") != ONE_PROCESS:
            continue
        words = [_word(cells.get(f"{key}@{mesh}")) for mesh in axes]
        lines.append(f"| {key} | {cells[key]['parameters']:,} | {' | '.join(words)} |")
    return "\n".join(lines) + "\n"


def _word(entry: Mapping[str, Any] | None) -> str:
    if entry is None:
        return ""
    if entry["verdict"] == "right":
        return f"{entry['share']:.2f}" if "share" in entry else "right"
    return f"**{entry['verdict']}**" if entry["verdict"] != "refused" else "refused"


def _messages(verdicts: Cells) -> str:
    """Every cause once, with the cells that have it."""
    by_message: dict[tuple[str, str], list[str]] = {}
    for cell, entry in sorted(verdicts.items()):
        if entry["verdict"] != "right":
            by_message.setdefault((entry["verdict"], _cause(entry.get("message", ""))), []).append(cell)
    order = ("wrong", "crash", "hang", "refused")
    lines = [
        f"- {verdict}: `{', '.join(cells)}`: {_escaped(message)}"
        for (verdict, message), cells in sorted(by_message.items(), key=lambda item: order.index(item[0][0]))
    ]
    return "\n".join(lines) + "\n"


def _cause(message: str) -> str:
    """Its first line, without what differs from model to model: names of modules and classes, and numbers."""
    first = (message.splitlines() or [""])[0]
    return _PARTICULARS.sub("…", first)


def _escaped(message: str) -> str:
    return message.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*").replace("_", "\\_")
