"""Drawing as SVG: words whose width is known before they are drawn, bars, ticks at round numbers, legends.

Lengths are pixels, the origin is the upper left corner. `y` of words is their base line.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from xml.sax.saxutils import escape, quoteattr

INK, DIM, LINE, GRID, PAPER, TROUGH = "#222222", "#555555", "#888888", "#E4E4E0", "#FFFFFF", "#F0F0EC"
"""Colours of words, of words of less weight, of axes, of lines behind what is drawn, and what lies behind all that."""

_FONT = "system-ui,-apple-system,'Segoe UI',Roboto,'Helvetica Neue','DejaVu Sans',Arial,sans-serif"
_SMALL = 12
"""Size of words unless another one is named."""

Attribute = str | float | None

Mark = Callable[[float, float], str]
"""Draws a sign of a legend around a point."""


def picture(title: str, width: float, height: float, parts: Iterable[str]) -> str:
    """A whole file, on white, with a title for those who do not see it."""
    wide, high = f"{width:.0f}", f"{height:.0f}"
    attributes: dict[str, Attribute] = {
        **{"xmlns": "http://www.w3.org/2000/svg", "width": wide, "height": high, "viewBox": f"0 0 {wide} {high}"},
        **{"role": "img", "font_family": _FONT, "font_size": _SMALL, "fill": INK},
    }
    paper = element("rect", width=wide, height=high, fill=PAPER)
    return "\n".join([f"<svg{_attributes(attributes)}>", element("title", title), paper, *parts, "</svg>\n"])


def element(tag: str, content: str = "", about: str = "", /, **attributes: Attribute) -> str:
    """One element, its content as text.

    Args:
        about: what is shown when one points at it.
        attributes: `font_size` is written as font-size, numbers with two digits; None is left out.
    """
    inner = (f"<title>{escaped(about)}</title>" if about else "") + escaped(content)
    return f"<{tag}{_attributes(attributes)}>{inner}</{tag}>" if inner else f"<{tag}{_attributes(attributes)}/>"


def words(x: float, y: float, text: str, size: float = _SMALL, /, **attributes: Attribute) -> str:
    """Words that start at a point, or end there (`text_anchor="end"`), or have their middle there."""
    return element("text", text, x=x, y=y, font_size=None if size == _SMALL else size, **attributes)


def heading(x: float, title: str, below: str) -> list[str]:
    """A picture's title and a line of words below it; they end at 52 pixels."""
    return [words(x, 32, title, 17, font_weight=600), words(x, 52, below, fill=DIM)]


def bar(x: float, y: float, width: float, height: float, colour: str | None, about: str = "") -> str:
    """A rectangle with a seam at its right end, through which shows what lies behind; None: its group's colour."""
    return element("rect", "", about, x=x, y=y, width=width - min(1.0, width * 0.15), height=height, fill=colour)


# --- words whose width is known --------------------------------------------------------------------------------------


def text_width(text: str, size: float = _SMALL, bold: bool = False) -> float:
    """What a text takes in a wide font (DejaVu Sans); in others it takes less."""
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


def fitted(text: str, room: float, size: float = _SMALL, bold: bool = False) -> str:
    """The text, or as much of its beginning as there is room for."""
    if text_width(text, size, bold) <= room:
        return text
    while text and text_width(text + "…", size, bold) > room:
        text = text[:-1]
    return text + "…" if text else ""


# --- axes and legends ------------------------------------------------------------------------------------------------


def axis_below(
    ticks: Iterable[tuple[float, str]], left: float, right: float, y: float, name: str, top: float | None = None
) -> Iterator[str]:
    """Ticks with their numbers, and the name of the axis below them; it ends at y + 40.

    Args:
        ticks: (x, number).
        top: up to where a line goes behind what is drawn; None for an axis without one.
    """
    for x, number in ticks:
        line = f"M{x:.2f} {y if top is None else top:.2f}V{y + 5:.2f}"
        yield element("path", d=line, stroke=LINE if top is None else GRID)
        yield words(x, y + 20, number, fill=DIM, text_anchor="middle")
    if top is None:
        yield element("path", d=f"M{left:.2f} {y:.2f}H{right:.2f}", stroke=LINE)
    yield words((left + right) / 2, y + 39, name, fill=DIM, text_anchor="middle")


def round_numbers(low: float, high: float, most: int) -> list[float]:
    """At most so many round numbers (and one) within an interval, equally far apart."""
    if high <= low:
        return [low]
    power = 10.0 ** math.floor(math.log10((high - low) / most))
    step = next(power * factor for factor in (1, 2, 5, 10, 20) if (high - low) / (power * factor) <= most)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(count * step, 12) for count in range(first, last + 1)]


def round_numbers_apart(low: float, high: float, place: Callable[[float], float], apart: float) -> list[float]:
    """Round numbers within an interval, as many as are `apart` from each other where `place` puts them."""
    numbers: list[float] = []
    highest = math.floor(math.log10(high))
    for step in (factor * 10.0**power for power in range(highest, highest - 4, -1) for factor in (5, 2, 1)):
        if high - low > 40 * step:
            break
        for number in (count * step for count in range(math.ceil(low / step), math.floor(high / step) + 1)):
            if all(abs(place(number) - place(other)) >= apart for other in numbers):
                numbers.append(round(number, 12))
    return sorted(numbers) or [low]


def square(colour: str) -> Mark:
    """The sign of a kind of bar."""
    return lambda x, y: element("rect", x=x - 7, y=y - 7, width=14, height=14, fill=colour)


def circle(radius: float, **attributes: Attribute) -> Callable[..., str]:
    """The sign of a kind of point; takes `about` besides x and y."""
    return lambda x, y, about="": element("circle", "", about, cx=x, cy=y, r=radius, **attributes)


def legend(
    entries: Iterable[tuple[Sequence[Mark], str]], left: float, right: float, y: float
) -> tuple[list[str], float]:
    """Signs with words, in as many lines as it takes, and where the picture ends below them."""
    parts, x = [], left
    for marks, text in entries:
        wide = 14 * len(marks)
        text = fitted(text, right - left - wide - 6)
        if x > left and x + wide + 6 + text_width(text) > right:
            x, y = left, y + 22
        parts += [mark(x + 14 * index + 7, y - 4) for index, mark in enumerate(marks)]
        parts.append(words(x + wide + 6, y, text))
        x += wide + 6 + text_width(text) + 12
    return parts, y + 20


# --- XML -------------------------------------------------------------------------------------------------------------


def escaped(text: str) -> str:
    """As XML, without the signs that it forbids."""
    return escape(_allowed(text))


def _allowed(text: str) -> str:
    return "".join(sign if sign >= " " or sign in "\t\n" else "\N{REPLACEMENT CHARACTER}" for sign in text)


def _attributes(attributes: Mapping[str, Attribute]) -> str:
    written = {name: f"{value:.2f}" if isinstance(value, float) else str(value) for name, value in attributes.items()}
    return "".join(
        f" {name.replace('_', '-')}={quoteattr(_allowed(written[name]))}"
        for name, value in attributes.items()
        if value is not None
    )
