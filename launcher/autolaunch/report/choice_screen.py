"""A plan's choice in the terminal, and the answer to why something else was not chosen."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.box import ROUNDED, SIMPLE_HEAD
from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from autolaunch.report.choice_words import (
    MEMORY,
    NEAR_LIMIT,
    PARTS,
    TimeUnit,
    command_of,
    decision_rows,
    difference,
    fits_within,
    is_number,
    joined,
    look_of,
    memory_limit,
    mesh_name,
    mesh_words,
    mfu_convention,
    of_limit,
    option_differences,
    option_words,
    pareto_front,
    parts_of,
    plateau_words,
    ranked_rows,
    rejected_rows,
    searched,
    share_of,
    step_time,
    thinned,
)
from autolaunch.report.readable import readable_bytes
from autolaunch.report.screen import PLAIN_SIGNS, WIDEST

MOST_ALTERNATIVES = 10
MOST_STAGES = 16
"""Pipe ranks whose memory is shown one by one; of more, the first, some of the middle and the last."""
MOST_OF_FRONT = 8
MOST_RULES = 12

FITS = {"yes": "green", "tight": "yellow", "no": "red"}

_EIGHTHS = " ▏▎▍▌▋▊▉█"


def show_choice(choice: Mapping[str, Any], console: Console, written: Sequence[Path] = ()) -> None:
    """Show what was chosen, what is predicted of it, what else there is, and why.

    Args:
        choice: `planner.document`.
        written: the plan, which the shown command runs, and its pages; without any, the command has the settings.
    """
    page = _Page(console)
    chosen = choice.get("chosen")
    if chosen:
        page.panel("plan", "cyan", decision_rows(choice))
        page.dim(mfu_convention(choice))
        page.sentences("why", chosen.get("reasons") or ())
        _show_time(page, chosen)
        _show_memory(page, chosen)
    else:
        page.panel("plan: nothing fits", "red", decision_rows(choice))
    _show_ranking(page, choice)
    _show_front(page, choice)
    _show_counts(page, choice)
    page.sentences("warnings", choice.get("warnings") or (), "yellow")
    page.command(command_of(choice, _short_path(written[0]) if written else ""))
    if written:
        first, *others = written
        names = [item.name if item.parent == first.parent else _short_path(item) for item in others]
        page.rows([("written", ", ".join([_short_path(first), *names]))])


def show_why(explanation: Mapping[str, Any], console: Console) -> None:
    """Show why something was not chosen: where it stands, what rejects it, and where its time goes instead.

    Args:
        explanation: `asked`, `found`, `rank`, `of`, `overrides`, `seconds`, `chosen_seconds`, `parts_difference`,
            `memory_bytes`, `memory_limit_bytes`, `rejected` (`rule`, `reason`), `sentences`.
    """
    page = _Page(console)
    found = bool(explanation.get("found"))
    console.print()
    page.panel(f"why not {explanation['asked']}", "cyan" if found else "yellow", _explanation_rows(explanation))
    refused = [item["reason"] for item in explanation.get("rejected") or ()]
    for sentence in explanation.get("sentences") or ():
        if not any(reason in sentence for reason in refused):  # said in the panel
            page.text(sentence)
    parts = parts_of(explanation.get("parts_difference"), PARTS)
    if found and parts:
        _show_differences(page, parts)


# --- sections --------------------------------------------------------------------------------------------------------


def _show_time(page: _Page, chosen: Mapping[str, Any]) -> None:
    unit = TimeUnit.of(chosen["seconds"])
    parts = _seen(parts_of(chosen.get("parts"), PARTS), unit)
    if not parts:
        return
    page.title("where a step's time goes")
    whole = sum(seconds for _, seconds in parts)
    names = _names(page, parts)
    times = [unit.write(seconds) for _, seconds in parts]
    shares = [share_of(seconds, whole) for _, seconds in parts]
    fixed = max(map(cell_len, names)) + max(map(len, times)) + max(map(len, shares)) + 6
    room, longest = max(page.width - fixed, 4), max(seconds for _, seconds in parts)
    for (part, seconds), name, time, share in zip(parts, names, times, shares, strict=True):
        line = Text(_padded(name, names))
        line.append(f"  {time:>{max(map(len, times))}}  {share:>{max(map(len, shares))}}  ")
        line.append(page.bar(seconds / longest * room), style=look_of(part, PARTS).colour)
        page.line(line)


def _show_memory(page: _Page, chosen: Mapping[str, Any]) -> None:
    stages = chosen.get("stages") or ()
    if not stages:
        return
    limit = memory_limit(chosen)
    title = "memory of a rank" if len(stages) == 1 else "memory of a rank in each stage of the pipeline"
    page.title(title + (f", limit {readable_bytes(limit)}" if limit else ""))
    labels = [str(stage.get("pipe_rank", index)) for index, stage in enumerate(stages)]
    blocks = [str(stage.get("blocks", "")) for stage in stages]
    sizes = [readable_bytes(stage["total"]) for stage in stages]
    shares = [share_of(stage["total"], limit) if limit else "" for stage in stages]
    left = [max(len(title), *map(len, column)) for title, column in (("rank", labels), ("blocks", blocks))]
    right = [max(map(len, column)) for column in (sizes, shares)]
    room = max(page.width - sum(left) - sum(right) - 8, 8)
    most = max(stage["total"] for stage in stages)
    near = limit if limit and most >= NEAR_LIMIT * limit else None
    scale = room / max(most, near or 0.0, 1.0)
    page.line(Text(f"{'rank':>{left[0]}}  {'blocks':>{left[1]}}", style="dim"))
    full = max(range(len(stages)), key=lambda index: stages[index]["total"])
    shown, signs = _shown_stages(len(stages), full), set[str]()
    for before, index in zip([None, *shown], shown, strict=False):
        if before is not None and index > before + 1:
            page.line(Text(f"{'...':>{left[0]}}", style="dim"))
        line = Text(f"{labels[index]:>{left[0]}}  {blocks[index]:>{left[1]}}  ")
        bar = _memory_bar(stages[index], near, scale, room)
        signs |= set(bar.plain)
        line.append_text(bar)
        line.append(f"  {sizes[index]:>{right[0]}}  {shares[index]:>{right[1]}}")
        page.line(line)
    legend = Text()
    for look in (look for look in MEMORY.values() if look.sign in signs):
        legend.append(look.sign, style=f"{look.ink} on {look.colour}").append(f" {look.words}  ")
    if near:
        legend.append("|", style="bold red").append(" limit")
    page.text(legend)


def _show_ranking(page: _Page, choice: Mapping[str, Any]) -> None:
    rows = ranked_rows(choice)[: MOST_ALTERNATIVES + 1]
    if len(rows) > (1 if choice.get("chosen") else 0):
        page.title("the choice and its alternatives" if choice.get("chosen") else "what comes closest")
        page.print(_ranking(page, rows, choice.get("chosen") or {}))


def _show_front(page: _Page, choice: Mapping[str, Any]) -> None:
    """What less memory costs, if there are ways beside the chosen one that nothing beats in both."""
    chosen, front = choice.get("chosen") or {}, pareto_front(choice)
    front = [point for point in front if is_number(chosen.get("seconds")) and point["seconds"] > chosen["seconds"]]
    front = [point for point in front if point["memory_bytes"] < chosen["memory_bytes"]]
    if front:
        rows = [
            {**point, "slower_by": point["seconds"] / chosen["seconds"] - 1} for point in thinned(front, MOST_OF_FRONT)
        ]
        page.title("what less memory costs")
        page.print(_ranking(page, rows, chosen, numbered=False))


def _ranking(page: _Page, rows: Sequence[Mapping[str, Any]], chosen: Mapping[str, Any], numbered: bool = True) -> Table:
    """Ways to run it as a table; of all but the chosen one, the options that are other than there."""
    unit = TimeUnit.of(chosen.get("seconds", rows[0].get("seconds")))
    look: dict[str, Any] = {"show_edge": False, "pad_edge": False, "collapse_padding": True, "padding": (0, 1)}
    table = Table(box=SIMPLE_HEAD, header_style="dim", **look)
    if numbered:
        table.add_column("", justify="right", no_wrap=True)
    table.add_column("mesh", overflow="fold")
    table.add_column("what differs" if chosen else "options", overflow="fold", ratio=1)
    table.add_column("time", justify="right", no_wrap=True)
    table.add_column("slower", justify="right", no_wrap=True)
    table.add_column("memory", justify="right", no_wrap=True)
    if numbered:
        table.add_column("fits", no_wrap=True)
    for number, row in enumerate(rows, start=1):
        first = bool(chosen) and row.get("note") == "chosen"
        words = option_differences(row["overrides"], chosen["overrides"]) if chosen else option_words(row["overrides"])
        options = Text(page.writable(", ".join(words)))
        if note := row.get("note"):
            options.append(page.writable(f"{' - ' if options else ''}{note}"), style="" if first else "dim")
        cells: list[str | Text] = [
            Text(page.writable(mesh_name(row["mesh"]))),
            options,
            unit.write(row.get("seconds")),
            difference(row.get("slower_by")) if chosen and not first else "",
            readable_bytes(row["memory_bytes"]) if is_number(row.get("memory_bytes")) else "?",
        ]
        if numbered:
            fits = fits_within(row, chosen.get("memory_limit_bytes"))
            cells = [str(number), *cells, Text(fits, style=FITS.get(fits, ""))]
        table.add_row(*cells, style="bold" if first else "")
    return table


def _show_counts(page: _Page, choice: Mapping[str, Any]) -> None:
    counts = choice.get("counts") or {}
    found = "; ".join(filter(None, (searched(counts), plateau_words(choice.get("plateau")))))
    rejected = rejected_rows(counts, MOST_RULES)
    if not found and not rejected:
        return
    page.title("what was looked at")
    if found:
        page.text(found)
    if rejected:
        table = Table.grid(padding=(0, 2))
        table.add_column(justify="right", no_wrap=True)
        table.add_column(overflow="fold")
        for number, rule in rejected:
            table.add_row(number, Text(page.writable(rule)))
        page.text("rejected:")
        page.print(table)


def _show_differences(page: _Page, parts: Sequence[tuple[str, float]]) -> None:
    longest = max(abs(seconds) for _, seconds in parts)
    unit = TimeUnit.of(longest)
    parts = _seen(parts, unit)
    page.title("a step's time against what was chosen")
    names, times = _names(page, parts), [f"{'+' if seconds > 0 else ''}{unit.write(seconds)}" for _, seconds in parts]
    room = max((page.width - max(map(cell_len, names)) - max(map(len, times)) - 5) // 2, 2)
    for (_, seconds), name, time in zip(parts, names, times, strict=True):
        line = Text(f"{_padded(name, names)}  {time:>{max(map(len, times))}}  ")
        bar = page.bar(abs(seconds) / longest * room, whole=True)
        less, more = (bar, "") if seconds < 0 else ("", bar)
        line.append(f"{less:>{room}}", style="green").append("|", style="dim").append(more, style="red")
        page.line(line)


def _explanation_rows(explanation: Mapping[str, Any]) -> list[tuple[str, str]]:
    seconds: Any = explanation.get("seconds")
    chosen: Any = explanation.get("chosen_seconds")
    rows: list[tuple[str, str]] = []
    if explanation.get("overrides"):
        mesh = next((item.partition("=")[2] for item in explanation["overrides"] if item.startswith("mesh=")), "")
        rows.append(("nearest", joined(mesh_words(mesh) if mesh else "", *option_words(explanation["overrides"]))))
    if is_number(explanation.get("rank")):
        of = f" of {explanation['of']:,}" if is_number(explanation.get("of")) else ""
        rows.append(("place", f"{explanation['rank']:,}{of} that fit, fastest first"))
    if is_number(seconds):
        text = f"{step_time(seconds)} predicted"
        if is_number(chosen) and chosen > 0 and seconds != chosen:
            unit, longer = TimeUnit.of(seconds), seconds - chosen
            text += f"; the chosen way takes {unit.write(chosen)} ({difference(longer / chosen)})"
        rows.append(("step", text))
    if is_number(explanation.get("memory_bytes")):
        rows.append(("memory", of_limit(explanation["memory_bytes"], explanation.get("memory_limit_bytes"))))
    for item in explanation.get("rejected") or ():
        rows.append(("rejected", str(item["reason"])))
    return rows


# --- bars ------------------------------------------------------------------------------------------------------------


def _memory_bar(stage: Mapping[str, Any], limit: float | None, scale: float, room: int) -> Text:
    """The kinds of memory one after another, the room up to the limit, and the limit."""
    bar, reached, column = Text(), 0.0, 0
    known = [(name, amount) for name, amount in parts_of(stage, MEMORY) if name in MEMORY and amount > 0]
    for name, amount in known:
        reached += amount
        until = min(round(reached * scale), room)
        look = MEMORY[name]
        bar.append(look.sign * (until - column), style=f"{look.ink} on {look.colour}")
        column = max(column, until)
    bar.append("." * (room - column), style="dim")
    if limit:
        at = min(round(limit * scale), room) - 1
        bar = Text.assemble(bar[:at], ("|", "bold red"), bar[at + 1 :])
    return bar


def _shown_stages(number: int, fullest: int) -> list[int]:
    if number <= MOST_STAGES:
        return list(range(number))
    middle = number // 2
    return sorted({*range(5), middle - 1, middle, fullest, *range(number - 5, number)})


def _seen(parts: Iterable[tuple[str, float]], unit: TimeUnit) -> list[tuple[str, float]]:
    """Those that are not written as nothing."""
    return [(name, seconds) for name, seconds in parts if abs(seconds) / unit.seconds * 10**unit.digits >= 0.5]


def _names(page: _Page, parts: Iterable[tuple[str, float]]) -> list[str]:
    names = [page.writable(look_of(name, PARTS).words) for name, _ in parts]
    return [set_cell_size(name, min(cell_len(name), 28)) for name in names]


def _padded(name: str, names: Sequence[str]) -> str:
    return set_cell_size(name, max(map(cell_len, names)))


# --- the page --------------------------------------------------------------------------------------------------------


class _Page:
    """A console, and how wide and in which letters things are written on it."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.width = min(console.width, WIDEST)
        self._unicode = console.encoding.lower().startswith("utf")

    def writable(self, text: str) -> str:
        """The text with plain letters in place of signs that the console's encoding lacks."""
        if self._unicode:
            return text
        return text.translate(PLAIN_SIGNS).encode(self.console.encoding, "replace").decode(self.console.encoding)

    def bar(self, columns: float, whole: bool = False) -> str:
        """A bar so many columns long; what is not nothing is seen."""
        if not self._unicode or whole:
            return ("█" if self._unicode else "#") * max(round(columns), 1)
        eighths = max(round(columns * 8), 1)
        return "█" * (eighths // 8) + (_EIGHTHS[eighths % 8] if eighths % 8 else "")

    def panel(self, title: str, colour: str, rows: Sequence[tuple[str, str]]) -> None:
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

    def rows(self, rows: Sequence[tuple[str, str]]) -> None:
        self.print(self._grid(rows))

    def title(self, text: str) -> None:
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

    def dim(self, text: str) -> None:
        if text:
            self.text(text, "dim")

    def text(self, text: str | Text, style: str = "") -> None:
        """Words that go on in the next line where there is no room."""
        self.print(text if isinstance(text, Text) else Text(self.writable(text), style=style))

    def line(self, line: Text) -> None:
        """One line, cut off where there is no room."""
        line.no_wrap, line.overflow = True, "crop"
        self.print(line)

    def print(self, what: Any) -> None:
        self.console.print(what, width=self.width)

    def _grid(self, rows: Sequence[tuple[str, str]]) -> Table:
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim", no_wrap=True)
        table.add_column(overflow="fold")
        for label, text in rows:
            table.add_row(self.writable(label), Text(self.writable(text)))
        return table


def _short_path(path: Path) -> str:
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)
