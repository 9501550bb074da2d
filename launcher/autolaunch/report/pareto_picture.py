"""Time against memory as SVG: the ways to run a model that nothing beats in both, the others, and the chosen one."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autolaunch.report import svg
from autolaunch.report.choice_pictures import LEFT, LIMIT_COLOUR, RIGHT, WIDTH, limit_line
from autolaunch.report.choice_words import PARTS, memory_limit, pareto_front, thinned
from autolaunch.report.readable import BINARY_UNITS, TimeUnit, binary_power, is_number, readable_bytes
from autolaunch.report.settings_words import mesh_name, option_words

MOST_NAMES = 8
"""Points of the front that get a name."""

Box = tuple[float, float, float, float]
"""Left, top, right and bottom."""

_CHOSEN = svg.circle(7, fill=PARTS["mp"].colour, stroke=svg.INK, stroke_width=1.5)
_FRONT = svg.circle(4, fill=PARTS["compute"].colour, stroke=svg.PAPER, stroke_width=0.75)
_OTHER = svg.circle(3.5, fill=svg.PAPER, stroke=svg.LINE, stroke_width=1.5)


def pareto_svg(choice: Mapping[str, Any]) -> str:
    """Time against memory: the ways that nothing beats in both, the others, the chosen one; empty with one way."""
    front, chosen = pareto_front(choice), choice.get("chosen") or {}
    if not front:
        return ""
    slowest = max(*(row["seconds"] for row in front), chosen.get("seconds") or 0.0)
    others = [
        row
        for row in choice.get("alternatives") or ()
        if is_number(row.get("seconds")) and is_number(row.get("memory_bytes")) and row["seconds"] <= 1.05 * slowest
    ]
    points = [*front, *others, *([chosen] if chosen else [])]
    if len({_place_of(row) for row in points}) < 2:
        return ""  # one point shows nothing
    plot = _Plot.around(points, memory_limit(chosen))
    unit = TimeUnit.of(chosen.get("seconds") or front[0]["seconds"])
    places = [plot.place(row) for row in front]
    line = "L".join(f"{x:.2f} {y:.2f}" for x, y in places)
    title = "Time against memory"
    parts = [
        *svg.heading(LEFT, title, "on the line: ways that no other way beats in both"),
        *plot.axes(unit),
        svg.element("path", d=f"M{line}", stroke=PARTS["attention"].colour, stroke_width=2, fill="none"),
        *(_OTHER(*plot.place(row), about=_about(row, unit)) for row in others),
        *(_FRONT(*plot.place(row), about=_about(row, unit)) for row in front),
    ]
    labels = _Labels(plot, [*map(plot.place, points), *_along(places)])
    if chosen:
        labels.keep_off(plot.place(chosen), 9)
    if plot.limit is not None:
        parts += labels.limit(plot.limit)
    if chosen:
        parts += labels.beside(plot.place(chosen), f"chosen: {mesh_name(chosen['mesh'])}", bold=True, reach=200)
        parts.append(_CHOSEN(*plot.place(chosen), about=_about(chosen, unit)))
    for row in _named(front, chosen):
        parts += labels.beside(plot.place(row), mesh_name(row["mesh"]))
    entries = [([_CHOSEN], "chosen")] if chosen else []
    entries += [([_FRONT], "nothing is better in both")] + ([([_OTHER], "other alternatives")] if others else [])
    legend, height = svg.legend(entries, LEFT, RIGHT, plot.bottom + 68)
    return svg.picture(title, WIDTH, height, [*parts, *legend])


@dataclass(frozen=True)
class _Plot:
    """Where seconds and bytes are on the picture.

    Seconds by the root of what they are more than the fastest's: many ways are nearly as fast, few are much slower.
    """

    fastest: float
    slowest: float
    most_bytes: float
    limit: float | None
    left: float = LEFT + 62
    right: float = RIGHT - 6
    top: float = 92.0
    bottom: float = 412.0

    @classmethod
    def around(cls, points: Sequence[Mapping[str, Any]], limit: float | None) -> _Plot:
        """Room for all points, and for the limit if it is near."""
        times = [point["seconds"] for point in points]
        sizes = [point["memory_bytes"] for point in points]
        near = limit if limit is not None and limit <= 1.6 * max(sizes) else None
        return cls(min(times), max(times), max(*sizes, near or 0.0) * 1.08 or 1.0, near)

    def x(self, seconds: float) -> float:
        longer = (seconds - self.fastest) / (self.slowest - self.fastest) if self.slowest > self.fastest else 0.5
        return self.left + 14 + math.sqrt(max(longer, 0.0)) * (self.right - self.left - 28)

    def y(self, size: float) -> float:
        return self.bottom - size / self.most_bytes * (self.bottom - self.top)

    def place(self, point: Mapping[str, Any]) -> tuple[float, float]:
        return self.x(point["seconds"]), self.y(point["memory_bytes"])

    def axes(self, unit: TimeUnit) -> Iterator[str]:
        numbers = svg.round_numbers_apart(
            self.fastest / unit.seconds, self.slowest / unit.seconds, lambda number: self.x(number * unit.seconds), 48
        )
        ticks = [(self.x(number * unit.seconds), f"{number:,.6g}") for number in numbers]
        name = f"time of a step, {unit.name}; the scale is wider near the fastest"
        yield from svg.axis_below(ticks, self.left, self.right, self.bottom, name, self.top)
        power = binary_power(self.most_bytes)
        for number in svg.round_numbers(0.0, self.most_bytes / 1024**power, 7):
            y = self.y(number * 1024**power)
            yield svg.element("path", d=f"M{self.left - 5} {y:.2f}H{self.right}", stroke=svg.GRID)
            yield svg.words(self.left - 9, y + 4.2, f"{number:,.10g}", fill=svg.DIM, text_anchor="end")
        frame = f"M{self.left} {self.top}V{self.bottom}H{self.right}"
        yield svg.element("path", d=frame, stroke=svg.LINE, fill="none")
        yield svg.words(LEFT, self.top - 8, f"memory, {BINARY_UNITS[power]}", fill=svg.DIM)


class _Labels:
    """Words beside points, never over points or other words; what has no room is left to the point's title."""

    def __init__(self, plot: _Plot, points: Iterable[tuple[float, float]]) -> None:
        self._plot = plot
        self._taken: list[Box] = [(0, plot.top - 20, plot.left + 30, plot.top - 4)]  # the name of the axis
        for point in points:
            self.keep_off(point, 5)

    def keep_off(self, point: tuple[float, float], distance: float) -> None:
        """Let no words come nearer to a point."""
        x, y = point
        self._taken.append((x - distance, y - distance, x + distance, y + distance))

    def limit(self, size: float) -> list[str]:
        """A line across the plot at the memory of a device, and its name at the line's end or above the plot."""
        plot, y, text = self._plot, self._plot.y(size), f"limit {readable_bytes(size)}"
        self._taken.append((plot.left, y - 2, plot.right, y + 2))
        left = plot.right - 6 - svg.text_width(text)
        places = [(left, y - 7), (left, y + 17), (left, plot.top - 8)]
        line = limit_line(f"M{plot.left} {y:.2f}H{plot.right}")
        return [line, *self._at_free_place(text, places, fill=LIMIT_COLOUR)]

    def beside(self, point: tuple[float, float], text: str, bold: bool = False, reach: int = 0) -> list[str]:
        """Words at the first free place around a point; nothing if there is none.

        Args:
            reach: how far from the point they may stand where there is no room beside it, with a line to it.
        """
        (x, y), text, weight = point, svg.fitted(text, 250, bold=bold), 600 if bold else None
        wide = svg.text_width(text, bold=bold)
        left = -10 - wide
        near = ((10, -8), (10, 16), (left, 16), (left, -8), (12, 4), (-wide / 2, -12), (-wide / 2, 22))
        places = [(x + dx, y + dy) for dx, dy in (*near, (10, -16), (10, 24), (left, 24), (left, -16))]
        if words := self._at_free_place(text, places, font_weight=weight):
            return words
        for distance, degrees in itertools.product(range(24, reach + 1, 16), range(0, 360, 30)):
            end_x = x + distance * math.cos(math.radians(degrees))
            end_y = y + distance * math.sin(math.radians(degrees))
            start = end_x - 4 - wide if 90 < degrees < 270 else end_x + 4
            if words := self._at_free_place(text, [(start, end_y + 4)], font_weight=weight):
                for place in _along([point, (end_x, end_y)]):
                    self.keep_off(place, 2)
                return [svg.element("path", d=f"M{x:.2f} {y:.2f}L{end_x:.2f} {end_y:.2f}", stroke=svg.INK), *words]
        return []

    def _at_free_place(self, text: str, places: Iterable[tuple[float, float]], **attributes: Any) -> list[str]:
        wide = svg.text_width(text, bold=bool(attributes.get("font_weight")))
        for x, y in places:
            box = (x, y - 11, x + wide, y + 3)
            inside = self._plot.left < x and box[2] <= self._plot.right
            inside = inside and self._plot.top - 20 <= box[1] and box[3] < self._plot.bottom
            if inside and not any(_overlap(box, other) for other in self._taken):
                self._taken.append(box)
                return [svg.words(x, y, text, **attributes)]
        return []


def _named(front: Sequence[Mapping[str, Any]], chosen: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Points of a front that get their mesh beside them: the ends, and where the mesh changes."""
    others = [row for row in front if not chosen or _place_of(row) != _place_of(chosen)]
    runs = [next(run) for _, run in itertools.groupby(others, key=lambda row: row["mesh"])]
    last = [others[-1]] if others and others[-1] is not runs[-1] else []
    return thinned([*runs, *last], MOST_NAMES)


def _along(places: Sequence[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """Points on the lines between places."""
    for (x, y), (to_x, to_y) in itertools.pairwise(places):
        steps = math.ceil(max(abs(to_x - x), abs(to_y - y)) / 8) or 1
        for step in range(steps):
            yield x + (to_x - x) * step / steps, y + (to_y - y) * step / steps


def _overlap(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def _about(row: Mapping[str, Any], unit: TimeUnit) -> str:
    way = ", ".join([mesh_name(row["mesh"]), *option_words(row["overrides"])])
    return f"{way}: {unit.write(row['seconds'])}, {readable_bytes(row['memory_bytes'])}"


def _place_of(row: Mapping[str, Any]) -> tuple[float, float]:
    return row["seconds"], row["memory_bytes"]
