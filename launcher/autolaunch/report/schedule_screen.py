"""A pipeline's schedule in the terminal: a row of signs per rank, over time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.text import Text

from autolaunch.report.page import rows_shown
from autolaunch.report.schedule_words import (
    LOOKS,
    forward_time,
    idle_line,
    ink_on,
    kinds_in,
    schedule_title,
    shortest_bar,
    stage_names,
    stage_noun,
)
from autolaunch_strategies.schedules.schedule import Bar, Kind, Timeline

MOST_COLUMNS = 8
"""Columns at most for the shortest bar, so that a small schedule does not fill a wide terminal."""

_IDLE_SIGN = "."
_NUMBERED = 1.75  # columns for the shortest bar of a kind from which on the kind's bars have numbers


def schedule_text(timeline: Timeline, width: int) -> RenderableType:
    """A schedule in at most `width` columns: a row of signs per rank, with a legend; plain ASCII, colour if possible.

    A bar is its microbatch, if there is room for that in bars of its kind, and then signs of its kind. Where a column
    stands for several actions, columns show the kinds in turn, in proportion to their time.
    """
    schedule = timeline.schedule
    rows = rows_shown(schedule.ranks)
    names = {rank: stage_names(schedule, rank, most=4) for rank in range(schedule.ranks)}
    margin = max(len("stages"), *(len(names[rank]) for rank in rows if rank is not None))
    columns, scale = _columns(timeline, max(width - margin - len("   idle"), 8))
    numbered = {kind for kind in LOOKS if scale * shortest_bar(timeline, kind) >= _NUMBERED}
    lines = [
        Text(schedule_title(schedule), style="bold"),
        Text(f"{stage_noun(schedule):>{margin}}  {'':{columns}} idle", style="dim"),
    ]
    idle = timeline.idle_shares
    for rank in rows:
        if rank is None:
            lines.append(Text(f"{'...':>{margin}}", style="dim"))
            continue
        line = Text(f"{names[rank]:>{margin}}  ")
        bars = [bar for bar in timeline.bars if bar.rank == rank]
        line.append_text(_row(bars, timeline, columns, scale, numbered))
        line.append(f"{idle[rank]:>5.0%}")
        lines.append(line)
    legend = Text()
    for kind in kinds_in(timeline):
        legend.append(LOOKS[kind].sign, style=_style(kind)).append(f" {LOOKS[kind].words}  ")
    legend.append(_IDLE_SIGN, style="dim").append(" idle")
    lines += [legend, Text(idle_line(timeline))]
    if scale * shortest_bar(timeline) < 1 - 1e-6:
        forwards = 1 / scale / forward_time(timeline)
        written = f"{forwards:.2g}" if forwards < 10 else f"{forwards:,.0f}"
        lines.append(Text(f"a column is {written} forwards long; signs of a kind are in proportion to its time"))
    for line in lines:
        line.no_wrap = len(line) <= width
    return Group(*lines)


def _columns(timeline: Timeline, room: int) -> tuple[int, float]:
    """How many columns the picture takes, and how many of them one unit of time takes."""
    shortest = shortest_bar(timeline)
    fits = room / (timeline.length / shortest) + 1e-6  # columns for the shortest bar
    if fits >= 1 and (fits < _NUMBERED or _regular(timeline)):
        fits = math.floor(fits)  # bars of equal time come out equal
    scale = min(fits, MOST_COLUMNS) / shortest
    return min(room, math.ceil(timeline.length * scale - 1e-6)), scale


def _regular(timeline: Timeline) -> bool:
    """Whether all bars of a kind are equally long."""
    unit = forward_time(timeline)
    lengths = {(bar.action.kind, round((bar.end - bar.start) / unit, 6)) for bar in timeline.bars}
    return len(lengths) == len({kind for kind, _ in lengths})


def _row(bars: list[Bar], timeline: Timeline, columns: int, scale: float, numbered: set[Kind]) -> Text:
    origin = min(bar.start for bar in timeline.bars)
    signs, styles = [_IDLE_SIGN] * columns, ["dim"] * columns
    for column, kind in enumerate(_kinds_of_columns(bars, origin, columns, scale)):
        if kind:
            signs[column], styles[column] = LOOKS[kind].sign, _style(kind)
    for bar in bars:
        start, end = round((bar.start - origin) * scale), round((bar.end - origin) * scale)
        number = str(bar.action.microbatch)
        # One sign of its kind stays, except in a bar that only rounding has made too narrow for it.
        squeezed = end - start == 1 and timeline.schedule.microbatches <= 10
        if bar.action.kind in numbered and (end - start > len(number) or squeezed):
            signs[start:end] = number + LOOKS[bar.action.kind].sign * (end - start - len(number))
            styles[start:end] = [_style(bar.action.kind)] * (end - start)
    row = Text()
    for style, group in itertools.groupby(zip(signs, styles, strict=True), key=lambda pair: pair[1]):
        row.append("".join(sign for sign, _ in group), style=style)
    return row


def _kinds_of_columns(bars: list[Bar], origin: float, columns: int, scale: float) -> Iterator[Kind | None]:
    """What each column shows. What a column leaves out counts for the next ones, as in error diffusion."""
    shares: list[dict[Kind | None, float]] = [{} for _ in range(columns)]
    for bar in bars:
        start, end = (bar.start - origin) * scale, (bar.end - origin) * scale
        for column in range(math.floor(start), min(math.ceil(end), columns)):
            overlap = min(end, column + 1) - max(start, column)
            if overlap > 1e-6:
                shares[column][bar.action.kind] = shares[column].get(bar.action.kind, 0.0) + overlap
    owed: dict[Kind | None, float] = {}
    for share_of in shares:
        if (idle := 1 - sum(share_of.values())) > 1e-6:
            share_of[None] = idle
        for kind, share in share_of.items():
            owed[kind] = owed.get(kind, 0.0) + share
        shown = max(share_of, key=lambda kind: owed[kind])
        owed[shown] -= 1
        yield shown


def _style(kind: Kind) -> str:
    return f"{ink_on(LOOKS[kind].colour)} on {LOOKS[kind].colour}"
