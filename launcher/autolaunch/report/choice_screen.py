"""A plan's choice in the terminal, and the answer to why something else was not chosen."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.cells import cell_len, set_cell_size
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from autolaunch.directories import shown
from autolaunch.report.choice_words import (
    MEMORY,
    PARTS,
    StageMemory,
    WayWords,
    command_of,
    decision_rows,
    different_rows,
    limit_in_sight,
    look_of,
    looked_at,
    memory_limit,
    memory_of_stages,
    memory_title,
    mfu_convention,
    pareto_front,
    parts_of,
    ranked_rows,
    rejected_rows,
    thinned,
)
from autolaunch.report.page import NARROW, Page, Phrases, rows_shown
from autolaunch.report.readable import (
    TimeUnit,
    difference,
    is_number,
    joined,
    of_limit,
    readable_bytes,
    share_of,
    step_time,
)
from autolaunch.report.settings_words import mesh_words, option_words

MOST_ALTERNATIVES = 10
MOST_REASONS = FEW_ALTERNATIVES = 3
"""On the short page."""

MOST_OF_FRONT = 8
MOST_RULES = 12

FITS = {"yes": "green", "tight": "yellow", "over": "red", "no": "red"}


def show_choice(choice: Mapping[str, Any], console: Console, *, full: bool = False) -> None:
    """Show what was chosen, what is predicted of it, why, and what else there is: on one page, or all of it.

    Args:
        choice: `planner.document`.
        full: every reason, part of a step, stage, alternative and rule; else the most telling ones.
    """
    page = Page(console)
    chosen = choice.get("chosen")
    if chosen:
        page.panel("plan", "cyan", decision_rows(choice))
        reasons = chosen.get("reasons") or ()
        if full:
            page.text(mfu_convention(choice), "dim")
        page.sentences("why", reasons if full else reasons[:MOST_REASONS])
        if full:
            _show_time(page, chosen)
        _show_memory(page, chosen, full)
    else:
        page.panel("plan: nothing fits", "red", decision_rows(choice))
    _show_ranking(page, choice, full)
    if full:
        _show_front(page, choice)
        _show_counts(page, choice)
    page.sentences("warnings", choice.get("warnings") or (), "yellow")


def show_written(choice: Mapping[str, Any], console: Console, written: Sequence[Path] = ()) -> None:
    """Show the command that runs the choice, and where it was written.

    Args:
        choice: `planner.document`.
        written: the plan, which the command runs, and its pages; without any, the command has the settings.
    """
    page = Page(console)
    page.command(command_of(choice, shown(written[0]) if written else ""))
    if not written:
        return
    first, *others = written
    if others:
        names = [item.name if item.parent == first.parent else shown(item) for item in others]
        page.rows([("written", ", ".join([shown(first), *names]))])
    else:
        page.text("More of it, with pictures: the same with --full. Why not another way: --why mp=4,pp=2.", "dim")


def show_why(explanation: Mapping[str, Any], console: Console) -> None:
    """Show why something was not chosen: where it stands, what rejects it, and where its time goes instead.

    Args:
        explanation: `asked`, `found`, `rank`, `of`, `overrides`, `seconds`, `chosen_seconds`, `parts_difference`,
            `memory_bytes`, `memory_limit_bytes`, `rejected` (`rule`, `reason`), `sentences`.
    """
    page = Page(console)
    exists = bool(explanation.get("found"))
    console.print()
    page.panel(f"why not {explanation['asked']}", "cyan" if exists else "yellow", _explanation_rows(explanation))
    refused = [item["reason"] for item in explanation.get("rejected") or ()]
    for sentence in explanation.get("sentences") or ():
        if not any(reason in sentence for reason in refused):  # said in the panel
            page.text(sentence)
    parts = parts_of(explanation.get("parts_difference"), PARTS)
    if exists and parts:
        _show_differences(page, parts)


# --- sections --------------------------------------------------------------------------------------------------------


def _show_time(page: Page, chosen: Mapping[str, Any]) -> None:
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


def _show_memory(page: Page, chosen: Mapping[str, Any], full: bool) -> None:
    """A bar for each stage of the pipeline; for the fullest one alone, unless all is to be shown."""
    stages = memory_of_stages(chosen)
    if not stages:
        return
    title = memory_title(stages)
    if not full and len(stages) > 1:
        title = "memory of a rank in the fullest stage of the pipeline"
        stages = [max(stages, key=lambda stage: stage.total)]
    limit, near = memory_limit(chosen), limit_in_sight(chosen, stages)
    page.title(title + (f", limit {readable_bytes(limit)}" if limit else ""))
    ranks, blocks = ("rank", *(stage.rank for stage in stages)), ("blocks", *(stage.blocks for stage in stages))
    sizes, shares = [stage.size for stage in stages], [stage.share for stage in stages]
    rank_wide, blocks_wide, size_wide, share_wide = (max(map(len, column)) for column in (ranks, blocks, sizes, shares))
    room = max(page.width - (rank_wide + blocks_wide + 4 if full else 0) - size_wide - share_wide - 4, 8)
    totals = [stage.total for stage in stages]
    scale = room / max(*totals, near or 0.0, 1.0)
    if full:
        page.line(Text(f"{'rank':>{rank_wide}}  {'blocks':>{blocks_wide}}", style="dim"))
    signs = set[str]()
    for index in rows_shown(len(stages), keep=totals.index(max(totals))):
        if index is None:
            page.line(Text(f"{'...':>{rank_wide}}", style="dim"))
            continue
        stage = stages[index]
        bar = _memory_bar(stage, near, scale, room)
        signs |= set(bar.plain)
        line = Text(f"{stage.rank:>{rank_wide}}  {stage.blocks:>{blocks_wide}}  " if full else "")
        line.append_text(bar)
        line.append(f"  {stage.size:>{size_wide}}  {stage.share:>{share_wide}}")
        page.line(line)
    legend = Text()
    for look in (look for look in MEMORY.values() if look.sign in signs):
        legend.append(look.sign, style=f"{look.ink} on {look.colour}").append(f" {look.words}  ")
    if near:
        legend.append("|", style="bold red").append(" limit")
    page.text(legend)


def _show_ranking(page: Page, choice: Mapping[str, Any], full: bool) -> None:
    rows, chosen = ranked_rows(choice)[: MOST_ALTERNATIVES + 1], choice.get("chosen")
    if len(rows) <= (1 if chosen else 0):
        return
    if full or not chosen:
        page.title("the choice and its alternatives" if chosen else "what comes closest")
        page.print(_ranking(page, rows, choice))
    elif others := sorted(_worth_a_line(different_rows(rows)), key=lambda row: row.get("fits") == "over"):
        page.title("alternatives")
        page.print(_ranking(page, others[:FEW_ALTERNATIVES], choice, short=True))


_SURE: dict[Any, int] = {"yes": 0, "tight": 1, "over": 2, "no": 3}
"""What is said of whether a way fits, the surest first."""


def _worth_a_line(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Of the ways behind the first one, which is chosen, those that somebody might want.

    None that takes longer and fits less surely, and none that takes more than twice as long: one that needs least
    memory may take twenty times.
    """
    chosen, *others = rows

    def is_worth(row: Mapping[str, Any]) -> bool:
        slower = row.get("slower_by")
        if not is_number(slower):
            return True
        return slower <= 1 and (slower < 0 or _SURE.get(row.get("fits"), 0) <= _SURE.get(chosen.get("fits"), 0))

    return [row for row in others if is_worth(row)]


def _show_front(page: Page, choice: Mapping[str, Any]) -> None:
    """What less memory costs, if there are ways beside the chosen one that nothing beats in both."""
    chosen = choice.get("chosen") or {}
    if not is_number(chosen.get("seconds")):
        return
    front = [
        point
        for point in pareto_front(choice)
        if point["seconds"] > chosen["seconds"] and point["memory_bytes"] < chosen["memory_bytes"]
    ]
    if front:
        page.title("what less memory costs")
        page.print(_ranking(page, thinned(front, MOST_OF_FRONT), choice, numbered=False))


def _ranking(
    page: Page, rows: Sequence[Mapping[str, Any]], choice: Mapping[str, Any], numbered: bool = True, short: bool = False
) -> Table:
    """Ways to run it as a table; of all but the chosen one, the options that are other than there.

    On a narrow terminal the options stand below the mesh: beside it is no room for the name of a schedule.

    Args:
        short: without a line below the head.
    """
    look: dict[str, Any] = {"show_edge": False, "pad_edge": False, "collapse_padding": True, "padding": (0, 1)}
    table = Table(box=None if short else page.box, header_style="dim", **look)
    if numbered:
        table.add_column("", justify="right", no_wrap=True)
    heads, is_narrow = ["mesh", "what differs" if choice.get("chosen") else "options"], page.width < NARROW
    if is_narrow:
        table.add_column(", ".join(heads), overflow="fold", ratio=1)
    else:
        table.add_column(heads[0], overflow="fold")
        table.add_column(heads[1], overflow="fold", ratio=1)
    table.add_column("time", justify="right", no_wrap=True)
    table.add_column("vs chosen", justify="right", no_wrap=True)
    table.add_column("memory", justify="right", no_wrap=True)
    if numbered:
        table.add_column("fits", no_wrap=True)
    for number, way in enumerate(WayWords.of(rows, choice), start=1):
        phrases = [] if way.chosen else [page.writable(option) for option in way.options]  # the panel says the chosen's
        options: RenderableType = Phrases(phrases, page.writable(way.note), "" if way.chosen else "dim")
        way_cells: list[RenderableType] = [Text(page.writable(way.mesh)), options]
        if is_narrow:
            way_cells = [Group(*way_cells) if phrases or way.note else way_cells[0]]
        cells: list[RenderableType] = [*way_cells, way.time, way.slower, way.memory]
        if numbered:
            cells = [str(number), *cells, Text(way.fits, style=FITS.get(way.fits, ""))]
        table.add_row(*cells, style="bold" if way.chosen else "")
    return table


def _show_counts(page: Page, choice: Mapping[str, Any]) -> None:
    sentence, rejected = looked_at(choice), rejected_rows(choice.get("counts"), MOST_RULES)
    if not sentence and not rejected:
        return
    page.title("what was looked at")
    page.text(sentence)
    if rejected:
        table = Table.grid(padding=(0, 2))
        table.add_column(justify="right", no_wrap=True)
        table.add_column(overflow="fold")
        for number, rule in rejected:
            table.add_row(number, Text(page.writable(rule)))
        page.text("settings that were not considered, by rule:")
        page.print(table)


def _show_differences(page: Page, parts: Sequence[tuple[str, float]]) -> None:
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


def _memory_bar(stage: StageMemory, limit: float | None, scale: float, room: int) -> Text:
    """The kinds of memory one after another, the room up to the limit, and the limit."""
    bar, reached, column = Text(), 0.0, 0
    for name, amount in stage.kinds:
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


def _seen(parts: Iterable[tuple[str, float]], unit: TimeUnit) -> list[tuple[str, float]]:
    """Those that are not written as nothing."""
    return [(name, seconds) for name, seconds in parts if abs(seconds) / unit.seconds * 10**unit.digits >= 0.5]


def _names(page: Page, parts: Iterable[tuple[str, float]]) -> list[str]:
    names = [page.writable(look_of(name, PARTS).words) for name, _ in parts]
    return [set_cell_size(name, min(cell_len(name), 28)) for name in names]


def _padded(name: str, names: Sequence[str]) -> str:
    return set_cell_size(name, max(map(cell_len, names)))
