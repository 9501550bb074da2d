"""A pipeline's schedule as SVG: a row of bars per rank, over time."""

from __future__ import annotations

import os
from pathlib import Path

from autolaunch.job import write_beside
from autolaunch.report import svg
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

_NARROWEST, _WIDEST = 720, 1600  # of the plot, in pixels
_ROOM_FOR_NUMBER = 13  # pixels of the shortest bar that the plot tries to give
_EDGE, _TOP, _ROW, _GAP = 24, 84, 24, 6
_DIGIT = 0.6  # width of a digit as a share of the font's size
_WHOLE_LOSS = "loss of the whole batch"


def write_schedule_svg(timeline: Timeline, path: str | os.PathLike[str], whole_loss: bool = False) -> Path:
    """Write a schedule as a self-contained SVG, one row per rank, and return its path.

    Later stages of a rank are darker. The unit of time is the forward of one microbatch on all stages of a rank.

    Args:
        whole_loss: mark where the loss of the whole batch is computed, behind the last forward.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_beside(path, _schedule_svg(timeline, whole_loss))
    return path


def _schedule_svg(timeline: Timeline, whole_loss: bool) -> str:
    schedule, unit, origin = timeline.schedule, forward_time(timeline), min(bar.start for bar in timeline.bars)
    width = min(max(_NARROWEST, timeline.length / shortest_bar(timeline) * _ROOM_FOR_NUMBER), _WIDEST)
    scale = width / timeline.length
    names = [stage_names(schedule, rank, most=6) for rank in range(schedule.ranks)]
    noun = stage_noun(schedule)
    left = _EDGE + max(map(svg.text_width, (noun, *names))) + 10
    right = left + width
    bottom = _TOP + schedule.ranks * (_ROW + _GAP) - _GAP
    darker = "; darker: later stages of a rank" if schedule.virtual_stages > 1 else ""
    parts = [
        *svg.heading(_EDGE, schedule_title(schedule), idle_line(timeline) + darker),
        svg.words(left - 10, _TOP - 9, noun, fill=svg.DIM, text_anchor="end"),
        svg.words(right + 60, _TOP - 9, "idle", fill=svg.DIM, text_anchor="end"),
    ]
    for rank, (name, idle) in enumerate(zip(names, timeline.idle_shares, strict=True)):
        y = _TOP + rank * (_ROW + _GAP)
        parts += [
            svg.element("rect", x=left, y=y, width=width, height=_ROW, fill=svg.TROUGH),
            svg.words(left - 10, y + 16.5, name, text_anchor="end"),
            svg.words(right + 60, y + 16.5, f"{idle:.1%}", text_anchor="end"),
        ]
    ticks = [
        (left + number * unit * scale, f"{number:g}") for number in svg.round_numbers(0.0, timeline.length / unit, 14)
    ]
    parts += svg.axis_below(ticks, left, right, bottom + 8, "time in forward passes of one microbatch")
    for colour, bars in _by_colour(timeline).items():
        rectangles, numbers = [], []
        for bar in bars:
            x, y = left + (bar.start - origin) * scale, _TOP + bar.rank * (_ROW + _GAP)
            wide = (bar.end - bar.start) * scale
            about = _about(bar, origin, unit) if wide >= 1 else ""  # nobody can point at less
            rectangles.append(svg.bar(x, y, wide, _ROW, None, about))
            numbers.append(_number(bar, x + wide / 2, y + _ROW / 2, wide))
        parts += [f'<g fill="{colour}">', *rectangles, "</g>"]
        parts += [f'<g fill="{ink_on(colour)}" text-anchor="middle">', *filter(None, numbers), "</g>"]
    entries: list[tuple[list[svg.Mark], str]] = []
    for kind in kinds_in(timeline):
        colours = [LOOKS[kind].colour_of(chunk, schedule.virtual_stages) for chunk in range(schedule.virtual_stages)]
        entries.append(([svg.square(colour) for colour in colours], LOOKS[kind].words))
    entries.append(([svg.square(svg.TROUGH)], "idle"))
    if whole_loss:
        last = max((bar for bar in timeline.bars if bar.action.kind is Kind.F), key=lambda bar: bar.end)
        parts.append(_loss_mark(left + (last.end - origin) * scale, _TOP + last.rank * (_ROW + _GAP), _ROW))
        entries.append(([lambda x, y: _loss_mark(x, y - 7, 14)], _WHOLE_LOSS))
    legend, height = svg.legend(entries, left, right + 60, bottom + 74)
    return svg.picture(schedule_title(schedule), right + 76, height + 4, [*parts, *legend])


def _by_colour(timeline: Timeline) -> dict[str, list[Bar]]:
    """The bars by their colours: of each kind, one for each of a rank's stages."""
    schedule = timeline.schedule
    chunks = {stage: chunk for rank in range(schedule.ranks) for chunk, stage in enumerate(schedule.stages_of(rank))}
    bars: dict[str, list[Bar]] = {}
    for bar in timeline.bars:
        colour = LOOKS[bar.action.kind].colour_of(chunks[bar.action.stage], schedule.virtual_stages)
        bars.setdefault(colour, []).append(bar)
    return bars


def _about(bar: Bar, origin: float, unit: float) -> str:
    times = f"{(bar.start - origin) / unit:.4g} to {(bar.end - origin) / unit:.4g}"
    return f"{LOOKS[bar.action.kind].words}, stage {bar.action.stage}, microbatch {bar.action.microbatch}: {times}"


def _number(bar: Bar, x: float, y: float, room: float) -> str:
    """The microbatch in the middle of a bar, empty where it could not be read."""
    number = str(bar.action.microbatch)
    size = min(12.0, (room - 2) / (len(number) * _DIGIT))
    return svg.words(x, y + size * 0.36, number, round(size, 1)) if size >= 7.5 else ""


def _loss_mark(x: float, y: float, height: float) -> str:
    return svg.element("rect", "", _WHOLE_LOSS, x=x - 2, y=y - 2, width=4, height=height + 4, fill=svg.INK)
