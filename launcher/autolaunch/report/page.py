"""A page on the terminal: panels, rows, sentences and bars, no wider than can be read, in signs that it can write."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

from rich.box import ROUNDED, SIMPLE_HEAD, Box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.measure import Measurement
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from autolaunch.report.readable import wrapped

WIDEST = 100
"""Columns: lines longer than this are hard to read, however wide the terminal is."""

NARROW = 80
"""Columns below which tables have neither lines nor frames, and so no margins for them."""

MOST_ROWS = 16
"""Rows of one kind that are shown one by one; of more, some are left out."""

LEVELS = "▁▂▃▄▅▆▇█"
"""Low to high, in a line's curve."""

_EIGHTHS = " ▏▎▍▌▋▊▉█"
_PLAIN_SIGNS = str.maketrans({**dict(zip(LEVELS, "_.,-=+*#", strict=True)), "·": "-", "×": "x", "→": "->"})


def framed_table(console: Console) -> Table:
    """A table in a frame, which is left out where its columns need the room."""
    return Table() if console.width >= NARROW else Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)


class Page:
    """A console, and how wide and in which letters things are written on it."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.width = min(console.width, WIDEST)
        self.box: Box | None = SIMPLE_HEAD if self.width >= NARROW else None
        """Of tables."""
        self._unicode = console.encoding.lower().startswith("utf")

    def writable(self, text: str) -> str:
        """The text with plain letters in place of signs that the console's encoding lacks."""
        if self._unicode:
            return text
        return text.translate(_PLAIN_SIGNS).encode(self.console.encoding, "replace").decode(self.console.encoding)

    def bar(self, columns: float, whole: bool = False) -> str:
        """A bar so many columns long; what is not nothing is seen."""
        if not self._unicode or whole:
            return ("█" if self._unicode else "#") * max(round(columns), 1)
        eighths = max(round(columns * 8), 1)
        return "█" * (eighths // 8) + (_EIGHTHS[eighths % 8] if eighths % 8 else "")

    def panel(self, title: str, colour: str, rows: Iterable[tuple[str, str | Text]]) -> None:
        """Labels and texts in a frame; rows without text are left out."""
        self.console.print(
            Panel(
                self._grid(rows),
                title=Text(self.writable(title), style=f"bold {colour}"),
                title_align="left",
                border_style=colour,
                box=ROUNDED,
                width=self.width,
                padding=(0, 1),
            )
        )

    def rows(self, rows: Iterable[tuple[str, str | Text]]) -> None:
        """Labels and texts; rows without text are left out."""
        self.print(self._grid(rows))

    def title(self, text: str) -> None:
        """The title of a section, with an empty line before it."""
        self.console.print()
        self.text(text, "bold")

    def sentences(self, title: str, sentences: Iterable[str], style: str = "") -> None:
        """Sentences under a title, each with a dash."""
        table = Table.grid(padding=(0, 1))
        table.add_column(no_wrap=True, style="dim")
        table.add_column(overflow="fold")
        for sentence in sentences:
            table.add_row("-", Text(self.writable(sentence), style=style))
        if table.row_count:
            self.title(title)
            self.print(table)

    def command(self, words: Sequence[str]) -> None:
        """A command that can be copied: broken between words alone."""
        if not words:
            return
        self.title("run it")
        lines = [self.writable(words[0])]
        for word in map(self.writable, words[1:]):
            if cell_len(f"{lines[-1]} {word} \\") <= self.width:
                lines[-1] += f" {word}"
            else:
                lines[-1] += " \\"
                lines.append(f"  {word}")
        for line in lines:
            self.console.print(Text(line, style="cyan"), soft_wrap=True)

    def text(self, text: str | Text, style: str = "") -> None:
        """Words that go on in the next line where there is no room; nothing if there are none."""
        if text:
            self.print(text if isinstance(text, Text) else Text(self.writable(text), style=style))

    def line(self, line: Text) -> None:
        """One line, cut off where there is no room."""
        line.no_wrap, line.overflow = True, "crop"
        self.print(line)

    def print(self, renderable: RenderableType) -> None:
        """Whatever rich can show, as wide as the page at most."""
        self.console.print(renderable, width=self.width)

    def _grid(self, rows: Iterable[tuple[str, str | Text]]) -> Table:
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim", no_wrap=True)
        table.add_column(overflow="fold")
        for label, text in rows:
            if text:
                style = text.style if isinstance(text, Text) else ""
                table.add_row(self.writable(label), Text(self.writable(str(text)), style=style))
        return table


class Phrases:
    """Phrases with commas between and a note behind them, in a cell: broken between phrases, not within."""

    def __init__(self, phrases: Sequence[str], note: str = "", style: str = "") -> None:
        self._phrases, self._note, self._style = phrases, f"{' - ' if phrases and note else ''}{note}", style

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement.get(console, options, Text(", ".join(self._phrases) + self._note))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        lines = wrapped(self._phrases, lambda line: cell_len(line) <= options.max_width)
        yield Text("\n".join(lines), overflow="fold").append(self._note, style=self._style)


def rows_shown(number: int, ends: int = 5, middle: int = 2, keep: int = 0) -> list[int | None]:
    """Indices of the rows to show, None where some are left out.

    Args:
        ends: of many rows, how many of the first and of the last are shown;
        middle: how many of those in the middle;
        keep: and one more.
    """
    if number <= MOST_ROWS:
        return list(range(number))
    inner = range((number - middle) // 2, (number + middle) // 2)
    indices = sorted({*range(ends), *inner, keep, *range(number - ends, number)})
    rows: list[int | None] = [indices[0]]
    for before, index in itertools.pairwise(indices):
        rows += [index] if index == before + 1 else [None, index]
    return rows
