"""What a plan's choice says in words and numbers: the same in the terminal, in pictures and on the page.

A choice is the plain data of `planner.document`: `chosen`, `alternatives`, `pareto`, `plateau`, `counts`, `hardware`,
`model`, `warnings`. Times are seconds, memory is bytes, shares are fractions.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autolaunch.report.readable import (
    TimeUnit,
    counted,
    difference,
    is_number,
    joined,
    of_limit,
    readable_bytes,
    readable_count,
    share_of,
)
from autolaunch.report.settings_words import mesh_name, mesh_words, option_differences, option_rows, option_words
from autolaunch_strategies.config import as_typed


@dataclass(frozen=True)
class Look:
    """How one kind of time or memory is shown."""

    words: str
    colour: str
    ink: str
    """Of letters on the colour."""
    sign: str = ""
    """In a terminal's bar."""


# Neighbours in a bar differ in lightness, so that colour-blind people and grey print can tell them apart. Blue
# computes, orange and yellow exchange, grey does nothing.
PARTS = {
    "compute": Look("matrix products", "#1F5A99", "#FFFFFF"),
    "attention": Look("attention", "#74ACDF", "#000000"),
    "elementwise": Look("elementwise work", "#C3DCF3", "#000000"),
    "kernels": Look("launching kernels", "#4A5568", "#FFFFFF"),
    "mp": Look("exchange over mp", "#E07A35", "#000000"),
    "cp": Look("exchange over cp", "#F6C79B", "#000000"),
    "ep": Look("tokens to experts", "#B0522A", "#FFFFFF"),
    "pp": Look("sends between stages", "#8F3D0B", "#FFFFFF"),
    "bubble": Look("waiting in the pipeline", "#E3E1DA", "#000000"),
    "dp": Look("exchange over dp", "#F2CE4A", "#000000"),
    "optimizer": Look("optimizer", "#2A7F6C", "#FFFFFF"),
    "fixed": Look("fixed costs", "#9A9A9A", "#000000"),
}
"""Parts of a step's time, in the order in which they are shown."""

MEMORY = {
    "parameters": Look("parameters", "#1F5A99", "#FFFFFF", "P"),
    "gradients": Look("gradients", "#8FC1EA", "#000000", "G"),
    "optimizer": Look("optimizer", "#2A7F6C", "#FFFFFF", "O"),
    "activations": Look("activations", "#F6C79B", "#000000", "A"),
    "loss": Look("loss", "#B5400F", "#FFFFFF", "L"),
    "other": Look("other", "#C9C7C0", "#000000", "+"),
}
"""Kinds of memory, in the order in which they are shown."""

CHOSEN = "chosen"
"""The note of the way that was chosen."""

NEAR_LIMIT = 0.1
"""Share of the limit from which on bars of memory are drawn against it; below, against the largest of them."""

MFU = "flops of matrix products and attention (fused causal attention as half), none of recomputation, over the peak"
"""The convention of the figure, unless the choice names another one."""


# --- what is compared -------------------------------------------------------------------------------------------------


def parts_of(parts: Mapping[str, float] | None, looks: Mapping[str, Look]) -> list[tuple[str, float]]:
    """Name and amount of what is not nothing, in the order of the looks; unknown names last."""
    parts = parts or {}
    names = [*(name for name in looks if name in parts), *sorted(name for name in parts if name not in looks)]
    return [(name, parts[name]) for name in names if is_number(parts[name]) and parts[name] != 0]


def look_of(name: str, looks: Mapping[str, Look]) -> Look:
    """How it is shown; a name that is not known is shown as it is."""
    return looks.get(name) or Look(name, "#777777", "#FFFFFF", "?")


def ranked_rows(choice: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The chosen way, if there is one, and the alternatives in their order."""
    chosen, alternatives = choice.get("chosen"), choice.get("alternatives") or ()
    return [*([{**chosen, "slower_by": 0.0, "note": CHOSEN}] if chosen else []), *alternatives]


def different_rows(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Of ways that have their mesh and what they recompute in common, the first."""
    kinds: dict[tuple[str, ...], Mapping[str, Any]] = {}
    for row in rows:
        recomputed = (item for item in row["overrides"] if item.startswith("recompute="))
        kinds.setdefault((mesh_name(row["mesh"]), *recomputed), row)
    return list(kinds.values())


def pareto_front(choice: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The ways that nothing beats in both time and memory, the fastest first."""
    front = [row for row in choice.get("pareto") or () if is_number(row["seconds"]) and is_number(row["memory_bytes"])]
    return sorted(front, key=lambda row: (row["seconds"], row["memory_bytes"]))


def thinned(rows: Sequence[Any], most: int) -> list[Any]:
    """At most `most` of the rows, evenly spread, the first and the last among them."""
    if len(rows) <= most:
        return list(rows)
    return [rows[round(step * (len(rows) - 1) / (most - 1))] for step in range(most)]


@dataclass(frozen=True)
class WayWords:
    """What is written of one way to run it, in a table or beside its bar."""

    chosen: bool
    mesh: str
    options: list[str]
    """All of the chosen way's; of another, those that are other than there."""
    note: str
    time: str
    slower: str
    """Than the chosen way; empty for itself, and where nothing was chosen."""
    memory: str
    fits: str
    """`yes`, `tight`, `over` (but by no more than predictions err) or `no`; empty if that is not known."""

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, Any]], choice: Mapping[str, Any]) -> list[WayWords]:
        """What is written of each of these ways, their times in one unit."""
        chosen = choice.get("chosen") or {}
        unit = TimeUnit.of(chosen.get("seconds", rows[0].get("seconds") if rows else None))
        return [cls._of_row(row, chosen, unit) for row in rows]

    @classmethod
    def _of_row(cls, row: Mapping[str, Any], chosen: Mapping[str, Any], unit: TimeUnit) -> WayWords:
        first = bool(chosen) and row.get("note") == CHOSEN
        other = bool(chosen) and not first
        options = option_differences(row["overrides"], chosen["overrides"]) if other else option_words(row["overrides"])
        size, slower = row.get("memory_bytes"), row.get("slower_by")
        if slower is None and is_number(row.get("seconds")) and chosen.get("seconds"):
            slower = row["seconds"] / chosen["seconds"] - 1
        return cls(
            chosen=first,
            mesh=mesh_name(row["mesh"]),
            options=options,
            note=str(row.get("note") or ""),
            time=unit.write(row.get("seconds")),
            slower=difference(slower) if other else "",
            memory=readable_bytes(size) if is_number(size) else "?",
            fits=_fits_within(row, chosen.get("memory_limit_bytes")),
        )


def _fits_within(row: Mapping[str, Any], limit: float | None) -> str:
    """As the row says, else by its memory."""
    if row.get("fits"):
        return str(row["fits"])
    size: Any = row.get("memory_bytes")
    return ("yes" if size <= limit else "no") if is_number(size) and is_number(limit) else ""


@dataclass(frozen=True)
class StageMemory:
    """Memory of a rank in one stage of the pipeline, and what is written of it."""

    rank: str
    blocks: str
    total: float
    kinds: list[tuple[str, float]]
    """Name and bytes of each kind of which there is any, in the order of `MEMORY`."""
    size: str
    share: str
    """Of the limit; empty without one."""


def memory_of_stages(chosen: Mapping[str, Any]) -> list[StageMemory]:
    """Memory of a rank in every stage, in their order."""
    limit = memory_limit(chosen)
    return [
        StageMemory(
            rank=str(stage.get("pipe_rank", index)),
            blocks=str(stage.get("blocks", "")),
            total=stage["total"],
            kinds=[(name, size) for name, size in parts_of(stage, MEMORY) if name in MEMORY and size > 0],
            size=readable_bytes(stage["total"]),
            share=share_of(stage["total"], limit) if limit else "",
        )
        for index, stage in enumerate(chosen.get("stages") or ())
    ]


def memory_title(stages: Sequence[StageMemory]) -> str:
    """What the memory of these stages is called."""
    return "memory of a rank" if len(stages) == 1 else "memory of a rank in each stage of the pipeline"


def memory_limit(chosen: Mapping[str, Any]) -> float | None:
    """What a device has; None if that is not known."""
    limit: Any = chosen.get("memory_limit_bytes")
    return float(limit) if is_number(limit) and limit > 0 else None


def limit_in_sight(chosen: Mapping[str, Any], stages: Sequence[StageMemory]) -> float | None:
    """The limit, if bars of memory reach near enough to it to be drawn against it."""
    limit = memory_limit(chosen)
    return limit if limit and max(stage.total for stage in stages) >= NEAR_LIMIT * limit else None


# --- sentences -------------------------------------------------------------------------------------------------------


def decision_rows(choice: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(label, text) of what was planned for, what was chosen and what is predicted of it."""
    model, hardware, chosen = choice.get("model") or {}, choice.get("hardware") or {}, choice.get("chosen")
    rows = [("model", _model(model)), ("machines", _machines(hardware)), ("precision", choice.get("precision") or "")]
    if chosen:
        low, high, unit = chosen.get("seconds_low"), chosen.get("seconds_high"), TimeUnit.of(chosen["seconds"])
        known = is_number(low) and is_number(high)
        between = f", {unit.number(low)} to {unit.write(high)} within one standard deviation" if known else ""
        ranks = chosen.get("ranks") or 1
        words = mesh_words(chosen["mesh"])
        rows += [
            ("mesh", words if ranks == 1 else joined(words, f"{ranks:,} ranks")),
            *option_rows(chosen["overrides"]),
            ("step", f"{unit.write(chosen['seconds'])} predicted{between}"),
            ("speed", _speed(chosen, model.get("positions"))),
            ("memory", of_limit(chosen.get("memory_bytes"), chosen.get("memory_limit_bytes")) + " on the fullest rank"),
        ]
    return [(label, text) for label, text in rows if text]


def mfu_convention(choice: Mapping[str, Any]) -> str:
    """What the figure MFU counts; empty where there is none."""
    if not is_number((choice.get("chosen") or {}).get("mfu")):
        return ""
    return f"MFU: {choice.get('mfu_convention') or MFU}"


def looked_at(choice: Mapping[str, Any]) -> str:
    """How many ways were looked at, how many of them fit, and how many are nearly as fast as the fastest."""
    counts, plateau = choice.get("counts") or {}, choice.get("plateau") or {}
    parts = []
    if is_number(counts.get("considered")):
        numbers = {"fit": counts.get("fit", 0), "may fit": counts.get("may_fit"), "do not": counts.get("too_large")}
        fit = ", ".join(f"{number:,} {words}" for words, number in numbers.items() if number or words == "fit")
        parts.append(f"{counted(counts['considered'], 'way')} considered: {fit}")
    if plateau:
        near = ", ".join(f"{number:,} within {band}" for band, number in plateau.items())
        parts.append(f"of those to choose from, {near} of the fastest")
    return "; ".join(parts)


def rejected_rows(counts: Mapping[str, Any] | None, most: int) -> list[tuple[str, str]]:
    """(number, rule) of what was not considered, most frequent first; beyond `most` rules one row for the rest."""
    rejected = (counts or {}).get("rejected") or {}
    ranked = sorted(((number, rule) for rule, number in rejected.items() if number), key=lambda row: (-row[0], row[1]))
    rows = [(f"{number:,}", str(rule)) for number, rule in ranked[:most]]
    if rest := ranked[most:]:
        rows.append((f"{sum(number for number, _ in rest):,}", f"by {counted(len(rest), 'further rule')}"))
    return rows


def command_of(choice: Mapping[str, Any], plan: str = "") -> list[str]:
    """The words of the command that runs the choice, quoted for a shell; empty if nothing was chosen.

    Args:
        plan: the file with it; without one the command sets what was chosen, and nothing else.
    """
    chosen = choice.get("chosen")
    if not chosen:
        return []
    return ["autolaunch", *([as_typed("+plan", plan)] if plan else map(shlex.quote, chosen["overrides"]))]


def _model(model: Mapping[str, Any]) -> str:
    parameters, batch, positions = (model.get(key) for key in ("parameters", "batch_size", "positions"))
    return joined(
        str(model.get("name") or ""),
        f"{readable_count(parameters)} parameters" if parameters else "",
        _batch(batch, positions) if batch and positions else "",
    )


def _batch(batch: int, positions: int) -> str:
    """One position stands for a sample of which nobody has said that it is a sequence."""
    return f"{batch:,} × {positions:,} tokens per step" if positions > 1 else f"{counted(batch, 'sample')} per step"


def _machines(hardware: Mapping[str, Any]) -> str:
    nodes, each = hardware.get("nodes") or 1, hardware.get("devices_per_node") or 1
    size = counted(each, "device") if nodes == 1 else f"{nodes:,} nodes × {counted(each, 'device')}"
    origin = hardware.get("origin")
    return joined(str(hardware.get("name") or ""), size, f"figures {origin}" if origin else "") if hardware else ""


def _speed(chosen: Mapping[str, Any], positions: Any) -> str:
    rate: Any = chosen.get("tokens_per_second")
    mfu: Any = chosen.get("mfu")
    counted_in = "samples" if positions == 1 else "tokens"
    return joined(
        f"{f'{rate:.3g}' if rate < 100 else readable_count(rate)} {counted_in}/s" if is_number(rate) else "",
        (f"MFU {mfu:.1%}" if mfu >= 0.0005 else "MFU below 0.1%") if is_number(mfu) else "",
    )
