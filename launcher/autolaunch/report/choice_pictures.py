"""Bars of a plan's choice as SVG: where a step's time goes, and the memory of every stage."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from autolaunch.report import svg
from autolaunch.report.choice_words import (
    CHOSEN,
    MEMORY,
    PARTS,
    Look,
    WayWords,
    limit_in_sight,
    look_of,
    memory_limit,
    memory_of_stages,
    memory_title,
    parts_of,
    ranked_rows,
)
from autolaunch.report.readable import TimeUnit, is_number, joined, readable_bytes, share_of, wrapped

MOST_BARS = 6
"""Ways whose times are drawn: the chosen one and the best of the others."""

TOO_SLOW = 5.0
"""Ways that take so many times as long as the fastest are not drawn: nothing could be seen of the others."""

LIMIT_COLOUR = "#B00020"

WIDTH, LEFT, RIGHT = 560.0, 20.0, 540.0
"""Of every picture of a choice, and where what is drawn begins and ends."""


def time_svg(choice: Mapping[str, Any]) -> str:
    """Where a step's time goes, of the chosen way and the best of the others, as stacked bars; empty without a time."""
    rows = [row for row in ranked_rows(choice) if is_number(row.get("seconds")) and _positive(row.get("parts"))]
    fastest = min((row["seconds"] for row in rows), default=0.0)
    rows = [row for row in rows if row["seconds"] <= TOO_SLOW * fastest or row.get("note") == CHOSEN][:MOST_BARS]
    if not rows:
        return ""
    unit = TimeUnit.of(rows[0]["seconds"])
    longest = max(max(row["seconds"], sum(seconds for _, seconds in _positive(row["parts"]))) for row in rows)
    scale = (RIGHT - LEFT) / longest
    bars: list[str] = []
    top = y = 66.0
    for row, way in zip(rows, WayWords.of(rows, choice), strict=True):
        weight = 600 if way.chosen else None
        time = joined(way.time, "chosen" if way.chosen else way.slower)
        mesh = svg.fitted(way.mesh, RIGHT - LEFT - svg.text_width(time, 13, way.chosen) - 12, 13, way.chosen)
        bars.append(svg.words(LEFT, y + 15, mesh, 13, font_weight=weight))
        bars.append(svg.words(RIGHT, y + 15, time, 13, font_weight=weight, text_anchor="end"))
        for line in wrapped(way.options, lambda line: svg.text_width(line) <= RIGHT - LEFT):
            y += 17
            bars.append(svg.words(LEFT, y + 15, svg.fitted(line, RIGHT - LEFT), fill=svg.DIM))
        bars += _stacked(_positive(row["parts"]), PARTS, (LEFT, y + 22, 24), scale, unit.write, row["seconds"])
        y += 58
    ticks = [
        (LEFT + tick * unit.seconds * scale, f"{tick:,.10g}")
        for tick in svg.round_numbers(0.0, longest / unit.seconds, 8)
    ]
    axis = svg.axis_below(ticks, LEFT, RIGHT, y - 8, f"time of a step, {unit.name}", top)
    title = "Where a step's time goes"
    heading = svg.heading(LEFT, title, "predicted; exchange that computation hides takes no time here")
    used = parts_of({name: 1.0 for row in rows for name, _ in _positive(row["parts"])}, PARTS)
    return _with_legend(title, [*heading, *axis, *bars], [look_of(name, PARTS) for name, _ in used], y + 54)


def memory_svg(choice: Mapping[str, Any]) -> str:
    """Memory of a rank in every stage of the pipeline against the device's limit; empty if nothing was chosen."""
    chosen = choice.get("chosen") or {}
    stages = memory_of_stages(chosen)
    if not stages:
        return ""
    limit, near = memory_limit(chosen), limit_in_sight(chosen, stages)
    height, gap = (24, 8) if len(stages) <= 12 else (16, 4) if len(stages) <= 40 else (12, 3)
    size = 13 if height > 12 else 10.5
    totals = [joined(stage.size, stage.share) for stage in stages]
    ranks_end = LEFT + max(svg.text_width("rank"), *(svg.text_width(stage.rank, size) for stage in stages))
    blocks_wide = max(svg.text_width("blocks"), *(svg.text_width(stage.blocks, size) for stage in stages))
    blocks_end = ranks_end + 14 + blocks_wide
    left, right = blocks_end + 12, RIGHT - max(svg.text_width(total, size) for total in totals) - 10
    scale = (right - left) / max(*(stage.total for stage in stages), near or 0.0, 1.0)
    title = memory_title(stages).capitalize()
    of = f"; a device has {readable_bytes(limit)}" if limit and not near else ""
    top = 92
    bottom = top + len(stages) * (height + gap) - gap
    dim: dict[str, svg.Attribute] = {"fill": svg.DIM, "text_anchor": "end"}
    parts = [
        *svg.heading(LEFT, title, f"predicted peak of a step{of}"),
        svg.words(ranks_end, top - 10, "rank", **dim),
        svg.words(blocks_end, top - 10, "blocks", **dim),
    ]
    for index, (stage, total) in enumerate(zip(stages, totals, strict=True)):
        y = top + index * (height + gap)
        base = y + height / 2 + size * 0.36
        over = limit is not None and stage.total > limit
        look: dict[str, svg.Attribute] = {"fill": LIMIT_COLOUR, "font_weight": 600} if over else {}
        parts += [
            svg.element("rect", x=left, y=y, width=right - left, height=height, fill=svg.TROUGH),
            svg.words(ranks_end, base, stage.rank, size, text_anchor="end"),
            svg.words(blocks_end, base, stage.blocks, size, **dim),
            svg.words(RIGHT, base, total, size, text_anchor="end", **look),
            *_stacked(stage.kinds, MEMORY, (left, y, height), scale, readable_bytes, stage.total, shares=False),
        ]
    if near:
        x, text = left + near * scale, f"limit {readable_bytes(near)}"
        at = max(x, left + svg.text_width(text))
        parts += [
            limit_line(f"M{x:.2f} {top - 5}V{bottom + 5}"),
            svg.words(at, top - 10, text, text_anchor="end", fill=LIMIT_COLOUR),
        ]
    seen = {name for stage in stages for name, amount in stage.kinds if amount * scale >= 0.5}
    return _with_legend(title, parts, [MEMORY[name] for name in MEMORY if name in seen], bottom + 34)


def limit_line(path: str) -> str:
    """A line at the memory that a device has."""
    return svg.element("path", d=path, stroke=LIMIT_COLOUR, stroke_width=2, stroke_dasharray="5 3")


def _positive(parts: Mapping[str, float] | None) -> list[tuple[str, float]]:
    return [(name, seconds) for name, seconds in parts_of(parts, PARTS) if seconds > 0]


def _stacked(
    amounts: Sequence[tuple[str, float]],
    looks: Mapping[str, Look],
    place: tuple[float, float, float],
    scale: float,
    write: Callable[[float], str],
    whole: float,
    shares: bool = True,
) -> Iterator[str]:
    """Rectangles one after another, named and with their shares where there is room for that.

    Args:
        place: left, top and height.
        whole: what the amounts are shares of.
        shares: whether they are written into the rectangles.
    """
    x, y, height = place
    for name, amount in amounts:
        look, wide, share = look_of(name, looks), amount * scale, share_of(amount, whole)
        yield svg.bar(x, y, wide, height, look.colour, f"{look.words}: {write(amount)}, {share}")
        texts = (f"{look.words} {share}", share) if shares else (look.words,)
        text = next((text for text in texts if svg.text_width(text, 11.5) <= wide - 8), "")
        if text and height >= 16:
            yield svg.words(x + wide / 2, y + height / 2 + 4.2, text, 11.5, fill=look.ink, text_anchor="middle")
        x += wide


def _with_legend(title: str, parts: Sequence[str], looks: Iterable[Look], y: float) -> str:
    """The picture with squares for kinds of bars below it."""
    legend, height = svg.legend([([svg.square(look.colour)], look.words) for look in looks], LEFT, RIGHT, y)
    return svg.picture(title, WIDTH, height, [*parts, *legend])
