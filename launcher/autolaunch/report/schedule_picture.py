"""A pipeline schedule as a picture, stages x time: for the terminal and as SVG."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

from rich.console import Group, RenderableType
from rich.text import Text

from autolaunch_strategies.schedules.schedule import Bar, Kind, Schedule, Timeline

MOST_ROWS = 16
"""Ranks that the terminal shows one by one; of more it shows the first, some of the middle and the last."""

MOST_COLUMNS = 8
"""Columns at most for the shortest bar, so that a small schedule does not fill a wide terminal."""


@dataclass(frozen=True)
class _Look:
    sign: str
    colour: str
    deep: str
    """The colour of the last stage of a rank."""
    words: str


# What comes together in a schedule differs in lightness or between blue and yellow, not only between red and green, so
# that colour-blind people can tell the kinds apart, and grey print can where I does not meet B.
_LOOKS = {
    Kind.F: _Look(">", "#B0D9F1", "#78B3DB", "forward"),
    Kind.B: _Look("<", "#E67A38", "#BC4F10", "backward"),
    Kind.I: _Look("(", "#DD9BC0", "#B5689A", "backward for inputs"),
    Kind.W: _Look("=", "#2A7F6C", "#134E41", "backward for weights"),
}
_IDLE_SIGN = "."
_NUMBERED = 1.75  # columns for the shortest bar of a kind from which on the kind's bars have numbers


# --- for the terminal --------------------------------------------------------------------------------------------


def schedule_text(timeline: Timeline, width: int) -> RenderableType:
    """A schedule in at most `width` columns: a row of signs per rank, with a legend; plain ASCII, colour if possible.

    A bar is its microbatch, if there is room for that in bars of its kind, and then signs of its kind. Where a column
    stands for several actions, columns show the kinds in turn, in proportion to their time.
    """
    schedule = timeline.schedule
    rows = _shown_ranks(schedule.ranks)
    names = {rank: _stages(schedule, rank, most=4) for rank in range(schedule.ranks)}
    margin = max(len("stages"), *(len(names[rank]) for rank in rows if rank is not None))
    columns, scale = _columns(timeline, max(width - margin - len("   idle"), 8))
    numbered = {kind for kind in _LOOKS if scale * _shortest(timeline, kind) >= _NUMBERED}
    lines = [
        Text(_title(schedule), style="bold"),
        Text(f"{_noun(schedule):>{margin}}  {'':{columns}} idle", style="dim"),
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
    for kind in _LOOKS:
        if any(bar.action.kind is kind for bar in timeline.bars):
            legend.append(_LOOKS[kind].sign, style=_style(kind)).append(f" {_LOOKS[kind].words}  ")
    legend.append(_IDLE_SIGN, style="dim").append(" idle")
    lines += [legend, Text(_idle_line(timeline))]
    if scale * _shortest(timeline) < 1 - 1e-6:
        forwards = 1 / scale / _unit(timeline)
        written = f"{forwards:.2g}" if forwards < 10 else f"{forwards:,.0f}"
        lines.append(Text(f"a column is {written} forwards long; signs of a kind are in proportion to its time"))
    for line in lines:
        line.no_wrap = len(line) <= width
    return Group(*lines)


def _shown_ranks(ranks: int) -> list[int | None]:
    """Ranks to show, None for those that are left out in between."""
    if ranks <= MOST_ROWS:
        return list(range(ranks))
    middle = ranks // 2
    return [*range(5), None, middle - 1, middle, None, *range(ranks - 5, ranks)]


def _columns(timeline: Timeline, room: int) -> tuple[int, float]:
    """How many columns the picture takes, and how many of them one unit of time takes."""
    shortest = _shortest(timeline)
    fits = room / (timeline.length / shortest) + 1e-6  # columns for the shortest bar
    if fits >= 1 and (fits < _NUMBERED or _regular(timeline)):
        fits = math.floor(fits)  # bars of equal time come out equal
    scale = min(fits, MOST_COLUMNS) / shortest
    return min(room, math.ceil(timeline.length * scale - 1e-6)), scale


def _regular(timeline: Timeline) -> bool:
    """Whether all bars of a kind are equally long."""
    unit = _unit(timeline)
    lengths = {(bar.action.kind, round((bar.end - bar.start) / unit, 6)) for bar in timeline.bars}
    return len(lengths) == len({kind for kind, _ in lengths})


def _row(bars: list[Bar], timeline: Timeline, columns: int, scale: float, numbered: set[Kind]) -> Text:
    origin = min(bar.start for bar in timeline.bars)
    signs, styles = [_IDLE_SIGN] * columns, ["dim"] * columns
    for column, kind in enumerate(_kinds_of_columns(bars, origin, columns, scale)):
        if kind:
            signs[column], styles[column] = _LOOKS[kind].sign, _style(kind)
    for bar in bars:
        start, end = round((bar.start - origin) * scale), round((bar.end - origin) * scale)
        number = str(bar.action.microbatch)
        # One sign of its kind stays, except in a bar that only rounding has made too narrow for it.
        squeezed = end - start == 1 and timeline.schedule.microbatches <= 10
        if bar.action.kind in numbered and (end - start > len(number) or squeezed):
            signs[start:end] = number + _LOOKS[bar.action.kind].sign * (end - start - len(number))
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
    return f"{_ink(_LOOKS[kind].colour)} on {_LOOKS[kind].colour}"


# --- words -------------------------------------------------------------------------------------------------------


def _noun(schedule: Schedule) -> str:
    return "stage" if schedule.virtual_stages == 1 else "stages"


def _title(schedule: Schedule) -> str:
    each = "" if schedule.virtual_stages == 1 else f", {schedule.virtual_stages} stages each"
    parts = f"{schedule.microbatches} microbatch" + ("" if schedule.microbatches == 1 else "es")
    ranks = f"{schedule.ranks} rank" + ("" if schedule.ranks == 1 else "s")
    return f"{Path(schedule.name).name}: {parts} on {ranks}{each}"


def _idle_line(timeline: Timeline) -> str:
    forward = sum(bar.end - bar.start for bar in timeline.bars if bar.action.kind is Kind.F)
    backward = sum(bar.end - bar.start for bar in timeline.bars if bar.action.kind is not Kind.F)
    ratio = f"{backward / forward:.3g}"
    forwards = "1 forward" if ratio == "1" else f"{ratio} forwards"
    return f"idle {timeline.idle_share:.1%} of all ranks' time, with a backward as long as {forwards}"


def _unit(timeline: Timeline) -> float:
    """The forward of one microbatch on all stages of a rank, on average, in the timeline's unit of time."""
    forward = sum(bar.end - bar.start for bar in timeline.bars if bar.action.kind is Kind.F)
    return forward / (timeline.schedule.microbatches * timeline.schedule.ranks)


def _shortest(timeline: Timeline, kind: Kind | None = None) -> float:
    """The shortest bar (of a kind, 0 without one) that a picture shows whole; stages may have next to no work."""
    lengths = [bar.end - bar.start for bar in timeline.bars if kind in (None, bar.action.kind)]
    least = _unit(timeline) / timeline.schedule.virtual_stages / 4
    return max(least, min(lengths)) if lengths else 0.0


def _stages(schedule: Schedule, rank: int, most: int) -> str:
    stages = [str(stage) for stage in schedule.stages_of(rank)]
    return ", ".join(stages if len(stages) <= most else [stages[0], "...", stages[-1]])


# --- colour ------------------------------------------------------------------------------------------------------


def _ink(colour: str) -> str:
    """Black or white, whichever can be read on `colour`."""
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return "#000000" if 0.299 * red + 0.587 * green + 0.114 * blue > 125 else "#FFFFFF"


def _between(colour: str, deep: str, share: float) -> str:
    pairs = ((int(colour[at : at + 2], 16), int(deep[at : at + 2], 16)) for at in (1, 3, 5))
    return "#" + "".join(f"{round(one + share * (other - one)):02X}" for one, other in pairs)


# --- SVG ---------------------------------------------------------------------------------------------------------

_NARROWEST, _WIDEST = 720, 1600  # of the plot, in pixels
_ROOM_FOR_NUMBER = 13  # pixels of the shortest bar that the plot tries to give
_ROW, _GAP = 24, 6
_WHOLE_LOSS = "loss of the whole batch"
_FONT = "system-ui,-apple-system,'Segoe UI',Roboto,'Helvetica Neue','DejaVu Sans',Arial,sans-serif"
_LETTER, _DIGIT = 6.6, 0.6  # pixels of a letter at 12 px, width of a digit as a share of the font's size


def write_schedule_svg(timeline: Timeline, path: str | os.PathLike[str], whole_loss: bool = False) -> Path:
    """Write a schedule as a self-contained SVG, one row per rank, and return its path.

    Later stages of a rank are darker. The unit of time is the forward of one microbatch on all stages of a rank.

    Args:
        whole_loss: mark where the loss of the whole batch is computed, behind the last forward.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".new")
    beside.write_text(_svg(timeline, whole_loss), encoding="utf-8")
    return beside.replace(path)


def _svg(timeline: Timeline, whole_loss: bool) -> str:
    schedule, unit, origin = timeline.schedule, _unit(timeline), min(bar.start for bar in timeline.bars)
    shortest = _shortest(timeline)
    plot = min(max(_NARROWEST, timeline.length / shortest * _ROOM_FOR_NUMBER), _WIDEST)
    scale = plot / timeline.length
    names = [_stages(schedule, rank, most=6) for rank in range(schedule.ranks)]
    left = 24 + _LETTER * max(len(_noun(schedule)), *map(len, names)) + 10
    top, right = 84, left + plot
    bottom = top + schedule.ranks * (_ROW + _GAP) - _GAP
    width, height = right + 76, bottom + 98
    darker = "; darker: later stages of a rank" if schedule.virtual_stages > 1 else ""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height}" '
        f'viewBox="0 0 {width:.0f} {height}" font-family="{_FONT}" font-size="12" fill="#222222">',
        f"<title>{escape(_title(schedule))}</title>",
        f'<rect width="{width:.0f}" height="{height}" fill="#FFFFFF"/>',
        _words(24, 32, _title(schedule), 'font-size="17" font-weight="600"'),
        _words(24, 53, _idle_line(timeline) + darker, 'fill="#555555"'),
        _words(left - 10, top - 9, _noun(schedule), 'fill="#555555" text-anchor="end"'),
        _words(right + 60, top - 9, "idle", 'fill="#555555" text-anchor="end"'),
    ]
    for rank, (name, idle) in enumerate(zip(names, timeline.idle_shares, strict=True)):
        y = top + rank * (_ROW + _GAP)
        parts += [
            f'<rect x="{left:.2f}" y="{y}" width="{plot:.2f}" height="{_ROW}" fill="#EDEDEA"/>',
            _words(left - 10, y + 16.5, name, 'text-anchor="end"'),
            _words(right + 60, y + 16.5, f"{idle:.1%}", 'text-anchor="end"'),
        ]
    parts += _axis(left, right, top, bottom, scale * unit)
    chunks = [schedule.stages_of(rank) for rank in range(schedule.ranks)]
    for kind, chunk in itertools.product(_LOOKS, range(schedule.virtual_stages)):
        chosen = [bar for bar in timeline.bars if bar.action.kind is kind]
        chosen = [bar for bar in chosen if chunks[bar.rank].index(bar.action.stage) == chunk]
        if chosen:
            colour = _colour(kind, chunk, schedule.virtual_stages)
            parts.append(f'<g fill="{colour}">')
            parts += [_rectangle(bar, left + (bar.start - origin) * scale, top, scale, unit, origin) for bar in chosen]
            parts.append(f'</g><g fill="{_ink(colour)}" text-anchor="middle">')
            parts += filter(None, (_number(bar, left + (bar.start - origin) * scale, top, scale) for bar in chosen))
            parts.append("</g>")
    if whole_loss:
        last = max((bar for bar in timeline.bars if bar.action.kind is Kind.F), key=lambda bar: bar.end)
        parts.append(_loss_mark(left + (last.end - origin) * scale, top + last.rank * (_ROW + _GAP), _ROW))
    parts += _legend(timeline, left, bottom + 74, whole_loss)
    return "\n".join([*parts, "</svg>\n"])


def _words(x: float, y: float, text: str, attributes: str = "") -> str:
    return f'<text x="{x:.2f}" y="{y:.2f}" {attributes}>{escape(text)}</text>'


def _colour(kind: Kind, chunk: int, chunks: int) -> str:
    return _between(_LOOKS[kind].colour, _LOOKS[kind].deep, chunk / max(chunks - 1, 1))


def _rectangle(bar: Bar, x: float, top: float, scale: float, unit: float, origin: float) -> str:
    wide = (bar.end - bar.start) * scale
    seam = min(1.0, wide * 0.15)  # what lies behind shows between two bars
    y = top + bar.rank * (_ROW + _GAP)
    if wide < 1:  # nobody can point at it
        return f'<rect x="{x:.2f}" y="{y}" width="{wide - seam:.2f}" height="{_ROW}"/>'
    times = f"{(bar.start - origin) / unit:.4g} to {(bar.end - origin) / unit:.4g}"
    about = f"{_LOOKS[bar.action.kind].words}, stage {bar.action.stage}, microbatch {bar.action.microbatch}: {times}"
    return f'<rect x="{x:.2f}" y="{y}" width="{wide - seam:.2f}" height="{_ROW}"><title>{about}</title></rect>'


def _number(bar: Bar, x: float, top: float, scale: float) -> str:
    wide, number = (bar.end - bar.start) * scale, str(bar.action.microbatch)
    size = min(12.0, (wide - 2) / (len(number) * _DIGIT))
    if size < 7.5:
        return ""
    y = top + bar.rank * (_ROW + _GAP) + _ROW / 2 + size * 0.36
    return f'<text x="{x + wide / 2:.2f}" y="{y:.2f}" font-size="{size:.1f}">{number}</text>'


def _loss_mark(x: float, y: float, height: float) -> str:
    line = f'<rect x="{x - 2:.2f}" y="{y - 2}" width="4" height="{height + 4}" fill="#222222">'
    return f"{line}<title>{_WHOLE_LOSS}</title></rect>"


def _axis(left: float, right: float, top: float, bottom: float, scale: float) -> list[str]:
    step = next(step for step in _steps() if (right - left) / (step * scale) <= 14)
    parts = [f'<path d="M{left:.2f} {bottom + 8}H{right:.2f}" stroke="#888888" fill="none"/>']
    for tick in range(math.floor((right - left) / (step * scale) + 1e-6) + 1):
        x = left + tick * step * scale
        parts.append(f'<path d="M{x:.2f} {bottom + 8}v5" stroke="#888888" fill="none"/>')
        parts.append(_words(x, bottom + 27, f"{tick * step:g}", 'fill="#555555" text-anchor="middle"'))
    title = "time in forward passes of one microbatch"
    return [*parts, _words((left + right) / 2, bottom + 46, title, 'fill="#555555" text-anchor="middle"')]


def _steps() -> Iterator[int]:
    for power in itertools.count():
        yield from (10**power, 2 * 10**power, 5 * 10**power)


def _legend(timeline: Timeline, x: float, y: float, whole_loss: bool) -> list[str]:
    parts, chunks = [], timeline.schedule.virtual_stages
    entries = [
        ([_colour(kind, chunk, chunks) for chunk in range(chunks)], look.words)
        for kind, look in _LOOKS.items()
        if any(bar.action.kind is kind for bar in timeline.bars)
    ]
    for colours, words in [*entries, (["#EDEDEA"], "idle")]:
        for colour in colours:
            parts.append(f'<rect x="{x:.2f}" y="{y - 11}" width="14" height="14" fill="{colour}"/>')
            x += 14
        parts.append(_words(x + 7, y, words))
        x += 7 + len(words) * _LETTER + 22
    if whole_loss:
        parts += [_loss_mark(x + 2, y - 11, 14), _words(x + 11, y, _WHOLE_LOSS)]
    return parts
