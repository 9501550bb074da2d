"""Pictures of a plan's choice as SVG: where a step's time goes, memory of every stage, time against memory."""

from __future__ import annotations

import itertools
import math
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from xml.sax.saxutils import escape

from autolaunch.report.choice_words import (
    MEMORY,
    NEAR_LIMIT,
    PARTS,
    Look,
    TimeUnit,
    difference,
    is_number,
    joined,
    look_of,
    memory_limit,
    mesh_name,
    option_differences,
    option_words,
    pareto_front,
    parts_of,
    ranked_rows,
    share_of,
    thinned,
)
from autolaunch.report.readable import readable_bytes

MOST_BARS = 6
"""Ways whose times are drawn: the chosen one and the best of the others."""

TOO_SLOW = 5.0
"""Ways that take so many times as long as the fastest are not drawn: nothing could be seen of the others."""

FAR_APART = 8.0
"""Slowest over fastest from which on the time axis of time and memory is logarithmic."""

MOST_NAMES = 8
"""Points of the front of time and memory that get a name."""

_WIDTH, _EDGE = 560, 20
_FONT = "system-ui,-apple-system,'Segoe UI',Roboto,'Helvetica Neue','DejaVu Sans',Arial,sans-serif"
_DIM, _LINE, _GRID, _LIMIT = "#555555", "#888888", "#E4E4E0", "#B00020"


def time_svg(choice: Mapping[str, Any]) -> str:
    """Where a step's time goes, of the chosen way and the best of the others, as stacked bars; empty without a time."""
    rows = [row for row in ranked_rows(choice) if is_number(row.get("seconds")) and parts_of(row.get("parts"), PARTS)]
    fastest = min((row["seconds"] for row in rows), default=0.0)
    rows = [row for row in rows if row["seconds"] <= TOO_SLOW * fastest or row.get("note") == "chosen"][:MOST_BARS]
    if not rows:
        return ""
    chosen = choice.get("chosen")
    longest = max(max(row["seconds"], sum(amount for _, amount in _positive(row["parts"], PARTS))) for row in rows)
    unit, scale, top, each = TimeUnit.of(rows[0]["seconds"]), (_WIDTH - 2 * _EDGE) / longest, 66, 58
    bottom = top + each * len(rows) - 8
    parts = [
        _words(_EDGE, 32, "Where a step's time goes", 17, 'font-weight="600"'),
        _words(_EDGE, 52, "predicted; exchange that computation hides takes no time here", 12, f'fill="{_DIM}"'),
        *_axis_below(longest, unit, scale, bottom, top),
    ]
    for index, row in enumerate(rows):
        y = top + each * index
        first = bool(chosen) and row.get("note") == "chosen"
        slower = "chosen" if first else difference(row.get("slower_by")) if chosen else ""
        time = joined(unit.write(row["seconds"]), slower)
        weight = 'font-weight="600"' if first else ""
        name = mesh_name(row["mesh"])
        options = (
            option_differences(row["overrides"], chosen["overrides"])
            if chosen and not first
            else option_words(row["overrides"])
        )
        room = _WIDTH - 2 * _EDGE - _width(time, 13, first) - 18
        name = _fitted(name, room, 13)
        about = _fitted(", ".join(options), room - _width(name, 13, first) - 10, 12)
        parts.append(
            f'<text x="{_EDGE}" y="{y + 15}"><tspan {weight}>{_text(name)}</tspan>'
            f'<tspan dx="10" font-size="12" fill="{_DIM}">{_text(about)}</tspan></text>'
        )
        parts.append(_words(_WIDTH - _EDGE, y + 15, time, 13, f'text-anchor="end" {weight}'))
        parts += _stacked(_positive(row["parts"], PARTS), PARTS, _EDGE, y + 22, 24, scale, unit.write, row["seconds"])
    used = {name: 1.0 for row in rows for name, _ in _positive(row["parts"], PARTS)}
    legend, height = _legend([look_of(name, PARTS) for name, _ in parts_of(used, PARTS)], bottom + 62)
    return _svg("Where a step's time goes", height, [*parts, *legend])


def memory_svg(choice: Mapping[str, Any]) -> str:
    """Memory of a rank in every stage of the pipeline against the device's limit; empty if nothing was chosen."""
    chosen = choice.get("chosen") or {}
    stages = chosen.get("stages") or ()
    if not stages:
        return ""
    limit = memory_limit(chosen)
    height_of, gap = (24, 8) if len(stages) <= 12 else (16, 4) if len(stages) <= 40 else (12, 3)
    size = 13 if height_of > 12 else 10.5
    labels = [str(stage.get("pipe_rank", index)) for index, stage in enumerate(stages)]
    blocks = [str(stage.get("blocks", "")) for stage in stages]
    sizes = [stage["total"] for stage in stages]
    totals = [readable_bytes(size) + (f" · {share_of(size, limit)}" if limit else "") for size in sizes]
    first = _EDGE + max(_width("rank", 12), *(_width(label, size) for label in labels))
    left = first + 14 + max(_width("blocks", 12), *(_width(block, size) for block in blocks)) + 12
    right = _WIDTH - _EDGE - max(_width(total, size) for total in totals) - 10
    near = limit if limit and max(sizes) >= NEAR_LIMIT * limit else None
    scale = (right - left) / max(*sizes, near or 0.0, 1.0)
    title = "Memory of a rank" if len(stages) == 1 else "Memory of a rank in each stage of the pipeline"
    of = f"; a device has {readable_bytes(limit)}" if limit and not near else ""
    top = 92
    bottom = top + len(stages) * (height_of + gap) - gap
    parts = [
        _words(_EDGE, 32, title, 17, 'font-weight="600"'),
        _words(_EDGE, 52, f"predicted peak of a step{of}", 12, f'fill="{_DIM}"'),
        _words(first, top - 10, "rank", 12, f'fill="{_DIM}" text-anchor="end"'),
        _words(left - 12, top - 10, "blocks", 12, f'fill="{_DIM}" text-anchor="end"'),
    ]
    for index, stage in enumerate(stages):
        y = top + index * (height_of + gap)
        base = y + height_of / 2 + size * 0.36
        over = f'fill="{_LIMIT}" font-weight="600"' if limit is not None and sizes[index] > limit else ""
        parts += [
            f'<rect x="{left:.2f}" y="{y}" width="{right - left:.2f}" height="{height_of}" fill="#F4F4F1"/>',
            _words(first, base, labels[index], size, 'text-anchor="end"'),
            _words(left - 12, base, blocks[index], size, f'text-anchor="end" fill="{_DIM}"'),
            _words(_WIDTH - _EDGE, base, totals[index], size, f'text-anchor="end" {over}'),
        ]
        amounts = _positive({name: stage.get(name, 0.0) for name in MEMORY}, MEMORY)
        parts += _stacked(amounts, MEMORY, left, y, height_of, scale, readable_bytes, stage["total"], shares=False)
    if near:
        x, words = left + near * scale, f"limit {readable_bytes(near)}"
        at = max(x, left + _width(words, 12))
        parts += [
            f'<path d="M{x:.2f} {top - 5}V{bottom + 5}" stroke="{_LIMIT}" stroke-width="2" stroke-dasharray="5 3"/>',
            _words(at, top - 10, words, 12, f'text-anchor="end" fill="{_LIMIT}"'),
        ]
    used = [name for name in MEMORY if max(stage.get(name) or 0.0 for stage in stages) * scale >= 0.5]
    legend, height = _legend([MEMORY[name] for name in used], bottom + 34)
    return _svg(title, height, [*parts, *legend])


def pareto_svg(choice: Mapping[str, Any]) -> str:
    """Time against memory: the ways that nothing beats in both, the others, the chosen one; empty with one way."""
    front, chosen = pareto_front(choice), choice.get("chosen") or {}
    others = [
        row
        for row in choice.get("alternatives") or ()
        if is_number(row.get("seconds")) and is_number(row.get("memory_bytes"))
    ]
    if not front:
        return ""
    slowest = max(*(row["seconds"] for row in front), chosen.get("seconds") or 0.0)
    others = [row for row in others if row["seconds"] <= slowest * 1.05]
    points = [*front, *others, *([chosen] if chosen else [])]
    if len({_place_of(row) for row in points}) < 2:
        return ""  # one point shows nothing
    plot = _Plot.around(points, memory_limit(chosen))
    unit = TimeUnit.of(chosen.get("seconds") or front[0]["seconds"])
    parts = [
        _words(_EDGE, 32, "Time against memory", 17, 'font-weight="600"'),
        _words(_EDGE, 52, "on the line: ways that no other way beats in both", 12, f'fill="{_DIM}"'),
        *plot.axes(unit),
    ]
    if plot.limit is not None:
        y = plot.y(plot.limit)
        parts.append(
            f'<path d="M{plot.left} {y:.2f}H{plot.right}" stroke="{_LIMIT}" stroke-width="2" stroke-dasharray="5 3"/>'
        )
    places = [plot.place(row) for row in front]
    line = "L".join(f"{x:.2f} {y:.2f}" for x, y in places)
    parts.append(f'<path d="M{line}" stroke="{PARTS["attention"].colour}" stroke-width="2" fill="none"/>')
    parts += [_dot(plot, row, unit, 3.5, f'fill="#FFFFFF" stroke="{_LINE}" stroke-width="1.5"') for row in others]
    parts += [_dot(plot, row, unit, 4, f'fill="{PARTS["compute"].colour}"') for row in front]
    if chosen:
        parts.append(_dot(plot, chosen, unit, 7, f'fill="{PARTS["mp"].colour}" stroke="#222222" stroke-width="1.5"'))
    labels = _Labels(plot, [*map(plot.place, points), *_along(places)])
    if plot.limit is not None:
        y = plot.y(plot.limit)
        below = y - 7 - 14 < plot.top
        labels.keep_off(y)
        parts.append(
            labels.fixed(plot.right - 6, y + 17 if below else y - 7, f"limit {readable_bytes(plot.limit)}", _LIMIT)
        )
    if chosen:
        parts += labels.beside(plot.place(chosen), f"chosen: {mesh_name(chosen['mesh'])}", 'font-weight="600"')
    parts += [line for row in _named(front, chosen) for line in labels.beside(plot.place(row), mesh_name(row["mesh"]))]
    entries = [
        ("chosen", PARTS["mp"].colour, 'stroke="#222222" stroke-width="1.5"'),
        ("nothing is better in both", PARTS["compute"].colour, ""),
        ("other alternatives", "#FFFFFF", f'stroke="{_LINE}" stroke-width="1.5"'),
    ]
    shown = [bool(chosen), True, bool(others)]
    x, y = float(_EDGE), plot.bottom + 68
    for words, colour, stroke in itertools.compress(entries, shown):
        parts.append(f'<circle cx="{x + 6:.2f}" cy="{y - 4}" r="5" fill="{colour}" {stroke}/>')
        parts.append(_words(x + 17, y, words, 12))
        x += 17 + _width(words, 12) + 18
    return _svg("Time against memory", y + 18, parts)


# --- bars and their legend -------------------------------------------------------------------------------------------


def _positive(parts: Mapping[str, float], looks: Mapping[str, Look]) -> list[tuple[str, float]]:
    return [(name, amount) for name, amount in parts_of(parts, looks) if amount > 0]


def _stacked(
    amounts: Sequence[tuple[str, float]],
    looks: Mapping[str, Look],
    left: float,
    top: float,
    height: float,
    scale: float,
    write: Any,
    whole: float,
    shares: bool = True,
) -> Iterator[str]:
    """Rectangles one after another, with their shares where there is room for them."""
    x = left
    for name, amount in amounts:
        look, wide = look_of(name, looks), amount * scale
        seam = min(1.0, wide * 0.15)  # what lies behind shows between two rectangles
        share = share_of(amount, whole)
        yield (
            f'<rect x="{x:.2f}" y="{top}" width="{wide - seam:.2f}" height="{height}" fill="{look.colour}">'
            f"<title>{_text(f'{look.words}: {write(amount)}, {share}')}</title></rect>"
        )
        for words in (f"{look.words} {share}", share) if shares else (look.words,):
            if height >= 16 and _width(words, 11.5) <= wide - 8:
                middle = f'fill="{look.ink}" text-anchor="middle"'
                yield _words(x + wide / 2, top + height / 2 + 4.2, words, 11.5, middle)
                break
        x += wide


def _legend(looks: Iterable[Look], y: float) -> tuple[list[str], float]:
    """Squares with words, in as many lines as it takes, and where the picture ends below them."""
    parts, x = [], float(_EDGE)
    for look in looks:
        words = _fitted(look.words, _WIDTH - 2 * _EDGE - 20, 12)
        if x > _EDGE and x + 20 + _width(words, 12) > _WIDTH - _EDGE:
            x, y = float(_EDGE), y + 22
        parts.append(f'<rect x="{x:.2f}" y="{y - 11:.2f}" width="14" height="14" fill="{look.colour}"/>')
        parts.append(_words(x + 20, y, words, 12))
        x += 20 + _width(words, 12) + 10
    return parts, y + 20


def _axis_below(longest: float, unit: TimeUnit, scale: float, y: float, top: float) -> Iterator[str]:
    """Ticks of time below the bars, and lines behind them."""
    for tick in _ticks(0.0, longest / unit.seconds, 8):
        x = _EDGE + tick * unit.seconds * scale
        anchor = "start" if tick == 0 else "end" if x > _WIDTH - _EDGE - 14 else "middle"
        yield f'<path d="M{x:.2f} {top}V{y + 5}" stroke="{_GRID}"/>'
        yield _words(x, y + 20, f"{tick:,.10g}", 12, f'fill="{_DIM}" text-anchor="{anchor}"')
    yield _words(_WIDTH / 2, y + 38, f"time of a step, {unit.name}", 12, f'fill="{_DIM}" text-anchor="middle"')


def _ticks(low: float, high: float, most: int) -> list[float]:
    """Round numbers within an interval."""
    if high <= low:
        return [low]
    power = 10.0 ** math.floor(math.log10((high - low) / most))
    step = next(power * factor for factor in (1, 2, 5, 10, 20) if (high - low) / (power * factor) <= most)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(count * step, 12) for count in range(first, last + 1)]


def _powers(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten within an interval; of many, the powers alone."""
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1, 2, 5) if high < 300 * low else (1,)
    found = [round(factor * 10.0**power, 12) for power in exponents for factor in factors]
    return [tick for tick in found if low <= tick <= high]


# --- the plot of time and memory -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Plot:
    """Where seconds and bytes are on the picture; seconds by their logarithm where they are far apart."""

    seconds: tuple[float, float]
    logarithmic: bool
    bytes: tuple[float, float]
    limit: float | None
    left: float = _EDGE + 62.0
    right: float = _WIDTH - _EDGE - 6.0
    top: float = 92.0
    bottom: float = 412.0

    @classmethod
    def around(cls, points: Sequence[Mapping[str, Any]], limit: float | None) -> _Plot:
        """Room for all points, and for the limit if it is near."""
        times = [point["seconds"] for point in points]
        sizes = [point["memory_bytes"] for point in points]
        shown = limit if limit is not None and limit <= 1.6 * max(sizes) else None
        highest = max([*sizes, *([shown] if shown else [])])
        logarithmic = max(times) > FAR_APART * min(times) > 0
        seconds = (min(times) / 1.2, max(times) * 1.2) if logarithmic else _widened(min(times), max(times))
        return cls(seconds, logarithmic, (0.0, highest * 1.08 or 1.0), shown)

    def x(self, seconds: float) -> float:
        low, high = self.seconds
        share = math.log(seconds / low) / math.log(high / low) if self.logarithmic else (seconds - low) / (high - low)
        return self.left + share * (self.right - self.left)

    def y(self, size: float) -> float:
        low, high = self.bytes
        return self.bottom - (size - low) / (high - low) * (self.bottom - self.top)

    def place(self, point: Mapping[str, Any]) -> tuple[float, float]:
        return self.x(point["seconds"]), self.y(point["memory_bytes"])

    def axes(self, unit: TimeUnit) -> Iterator[str]:
        low, high = (seconds / unit.seconds for seconds in self.seconds)
        for tick in _powers(low, high) if self.logarithmic else _ticks(low, high, 7):
            x = self.x(tick * unit.seconds)
            yield f'<path d="M{x:.2f} {self.top}V{self.bottom + 5}" stroke="{_GRID}"/>'
            yield _words(x, self.bottom + 20, f"{tick:,.10g}", 12, f'fill="{_DIM}" text-anchor="middle"')
        power = min(int(math.log2(max(self.bytes[1], 1))) // 10, 4)
        for tick in _ticks(0.0, self.bytes[1] / 1024**power, 7):
            y = self.y(tick * 1024**power)
            yield f'<path d="M{self.left - 5} {y:.2f}H{self.right}" stroke="{_GRID}"/>'
            yield _words(self.left - 9, y + 4.2, f"{tick:,.10g}", 12, f'fill="{_DIM}" text-anchor="end"')
        name = ("bytes", "KiB", "MiB", "GiB", "TiB")[power]
        middle = (self.left + self.right) / 2
        yield f'<path d="M{self.left} {self.top}V{self.bottom}H{self.right}" stroke="{_LINE}" fill="none"/>'
        centred = f'fill="{_DIM}" text-anchor="middle"'
        yield _words(middle, self.bottom + 40, f"time of a step, {unit.name}", 12, centred)
        yield _words(_EDGE, self.top - 8, f"memory, {name}", 12, f'fill="{_DIM}"')


class _Labels:
    """Words beside points, never over points or other words; what has no room is left to the point's title."""

    def __init__(self, plot: _Plot, points: Iterable[tuple[float, float]]) -> None:
        self._plot = plot
        self._taken = [(x - 5, y - 5, x + 5, y + 5) for x, y in points]

    def keep_off(self, y: float) -> None:
        """Let nothing come over a line across the plot."""
        self._taken.append((self._plot.left, y - 2, self._plot.right, y + 2))

    def fixed(self, x: float, y: float, words: str, colour: str) -> str:
        """Words that end at a place, whatever is there."""
        self._taken.append((x - _width(words, 12), y - 11, x, y + 3))
        return _words(x, y, words, 12, f'fill="{colour}" text-anchor="end"')

    def beside(self, point: tuple[float, float], words: str, attributes: str = "") -> list[str]:
        """Words at the first free place around a point; nothing if there is none."""
        (x, y), words = point, _fitted(words, 250, 12)
        wide = _width(words, 12)
        left = -10 - wide
        beside = ((10, -8), (10, 16), (left, 16), (left, -8), (12, 4), (-wide / 2, -12), (-wide / 2, 22))
        for dx, dy in (*beside, (10, -16), (10, 24), (left, 24), (left, -16)):
            box = (x + dx, y + dy - 11, x + dx + wide, y + dy + 3)
            inside = self._plot.left < box[0] and box[2] <= self._plot.right and self._plot.top <= box[1]
            if inside and box[3] < self._plot.bottom and not any(_overlap(box, other) for other in self._taken):
                self._taken.append(box)
                return [_words(box[0], y + dy, words, 12, attributes)]
        return []


def _named(front: Sequence[Mapping[str, Any]], chosen: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Points of a front that get their mesh beside them: the ends, and where the mesh changes."""
    others = [row for row in front if not chosen or (row["seconds"], row["memory_bytes"]) != _place_of(chosen)]
    runs = [next(run) for _, run in itertools.groupby(others, key=lambda row: row["mesh"])]
    last = [others[-1]] if others and others[-1] is not runs[-1] else []
    return thinned([*runs, *last], MOST_NAMES)


def _along(places: Sequence[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """Points on the lines between places."""
    for (x, y), (to_x, to_y) in itertools.pairwise(places):
        steps = math.ceil(max(abs(to_x - x), abs(to_y - y)) / 8) or 1
        for step in range(steps):
            yield x + (to_x - x) * step / steps, y + (to_y - y) * step / steps


def _overlap(one: tuple[float, float, float, float], other: tuple[float, float, float, float]) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def _widened(low: float, high: float) -> tuple[float, float]:
    margin = 0.06 * (high - low) or 0.1 * high or 1.0
    return max(low - margin, 0.0), high + margin


def _dot(plot: _Plot, row: Mapping[str, Any], unit: TimeUnit, radius: float, attributes: str) -> str:
    x, y = plot.place(row)
    about = ", ".join([mesh_name(row["mesh"]), *option_words(row["overrides"])])
    about += f": {unit.write(row['seconds'])}, {readable_bytes(row['memory_bytes'])}"
    return f'<circle cx="{x:.2f}" cy="{y:.2f}" r="{radius}" {attributes}><title>{_text(about)}</title></circle>'


def _place_of(row: Mapping[str, Any]) -> tuple[float, float]:
    return row["seconds"], row["memory_bytes"]


# --- words -----------------------------------------------------------------------------------------------------------


def _svg(title: str, height: float, parts: Iterable[str]) -> str:
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height:.0f}" role="img" '
            f'viewBox="0 0 {_WIDTH} {height:.0f}" font-family="{_FONT}" font-size="13" fill="#222222">',
            f"<title>{_text(title)}</title>",
            f'<rect width="{_WIDTH}" height="{height:.0f}" fill="#FFFFFF"/>',
            *parts,
            "</svg>\n",
        ]
    )


def _words(x: float, y: float, text: str, size: float, attributes: str = "") -> str:
    return f'<text x="{x:.2f}" y="{y:.2f}" font-size="{size:g}" {attributes}>{_text(text)}</text>'


def _width(text: str, size: float, bold: bool = False) -> float:
    """Pixels that a text takes in a wide font (DejaVu Sans); in others it takes less."""
    return size * sum(map(_sign_width, text)) * (1.12 if bold else 1.0)


def _sign_width(sign: str) -> float:
    if unicodedata.east_asian_width(sign) in "WF":
        return 1.0
    if sign in "ijl|'.,:; ":
        return 0.34
    if sign in "ftrI()[]-/!":
        return 0.42
    if sign in "mwMWQ%@+=<>…" or not sign.isascii():
        return 0.98
    return 0.72 if sign.isupper() else 0.64


def _fitted(text: str, room: float, size: float) -> str:
    """The text, or as much of its beginning as there is room for."""
    if _width(text, size) <= room:
        return text
    while text and _width(text + "…", size) > room:
        text = text[:-1]
    return text + "…" if text else ""


def _text(text: str) -> str:
    """As XML, without the signs that it forbids."""
    return escape("".join(sign if sign >= " " or sign in "\t\n" else "\N{REPLACEMENT CHARACTER}" for sign in text))
