"""A pipeline schedule in the terminal and as SVG."""

from __future__ import annotations

import io
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

import pytest
from rich.console import Console

from autolaunch.report.schedule_screen import schedule_text
from autolaunch.report.schedule_svg import write_schedule_svg
from autolaunch_strategies.config import SCHEDULES
from autolaunch_strategies.schedules.schedule import Timeline, build_schedule, timeline


def drawn(name: str, ranks: int, microbatches: int, virtual_stages: int | None = None) -> Timeline:
    return timeline(build_schedule(name, ranks, microbatches, virtual_stages))


def lines(picture: Timeline, width: int) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width).print(schedule_text(picture, width))
    return [line.rstrip() for line in out.getvalue().splitlines()]


def rows(picture: Timeline, width: int) -> list[str]:
    """The signs alone, without stages and idle shares."""
    return [line[8:-5] for line in lines(picture, width) if line.endswith("%")]


def test_bars_with_numbers() -> None:
    assert lines(drawn("1f1b", 3, 4), 54) == [
        "1f1b: 4 microbatches on 3 ranks",
        " stage                                       idle",
        "     0  0>1>2>........0<<<3>1<<<..2<<<..3<<<  33%",
        "     1  ..0>1>....0<<<2>1<<<3>2<<<..3<<<....  33%",
        "     2  ....0>0<<<1>1<<<2>2<<<3>3<<<........  33%",
        "> forward  < backward  . idle",
        "idle 33.3% of all ranks' time, with a backward as long",
        "as 2 forwards",
    ]


def test_all_kinds() -> None:
    assert lines(drawn("dualpipev", 2, 4), 80) == [
        "dualpipev: 4 microbatches on 2 ranks, 2 stages each",
        "stages                                                     idle",
        "  0, 3  0>1>2>0>0(0=1>3>1<<<2>0<<<2<<<3>..1<<<3<<<2(2=3(3=   4%",
        "  1, 2  ..0>0>1>1>2>0<<<2>0<<<3>1<<<3>1<<<2<<<2<<<3(3(3=3=   4%",
        "> forward  < backward  ( backward for inputs  = backward for weights  . idle",
        "idle 4.0% of all ranks' time, with a backward as long as 2 forwards",
    ]


def test_more_actions_than_columns() -> None:
    picture = drawn("1f1b", 2, 64)
    text = lines(picture, 80)
    assert max(map(len, text)) <= 80
    assert text[-1] == "a column is 2.9 forwards long; signs of a kind are in proportion to its time"
    for row, idle in zip(rows(picture, 80), picture.idle_shares, strict=True):
        signs = Counter(row)
        assert set(signs) == {">", "<", "."}
        assert abs(signs["<"] - 2 * signs[">"]) <= 3  # twice as long, and alike everywhere
        assert abs(signs["."] / len(row) - idle) < 0.03


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 2), (2, 4), (4, 64), (24, 48)])
@pytest.mark.parametrize("width", [50, 200])
def test_it_fits_into_the_terminal(name: str, ranks: int, microbatches: int, width: int) -> None:
    picture = drawn(name, ranks, microbatches)
    assert len({len(row) for row in rows(picture, width)}) == 1
    assert max(len(line) for line in lines(picture, width)) <= width


def test_of_many_ranks_some_are_left_out() -> None:
    shown = [line[:6].strip() for line in lines(drawn("1f1b", 24, 24), 80)[2:-3]]
    assert shown == ["0", "1", "2", "3", "4", "...", "11", "12", "...", "19", "20", "21", "22", "23"]
    assert len(rows(drawn("1f1b", 16, 16), 80)) == 16


# --- SVG ---------------------------------------------------------------------------------------------------------

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 2), (2, 8), (16, 64)])
def test_the_svg_shows_every_action(name: str, ranks: int, microbatches: int, tmp_path: Path) -> None:
    picture = drawn(name, ranks, microbatches)
    path = write_schedule_svg(picture, tmp_path / "new" / "schedule.svg")
    assert [file.name for file in path.parent.iterdir()] == ["schedule.svg"]
    root = ElementTree.parse(path).getroot()
    width, height = float(root.get("width", "")), float(root.get("height", ""))
    assert root.get("viewBox") == f"0 0 {width:.0f} {height:.0f}"
    bars = [shape for shape in root.iter(f"{SVG}rect") if shape.find(f"{SVG}title") is not None]
    assert len(bars) == len(picture.bars)
    ends: dict[str, float] = {}
    for bar in sorted(bars, key=lambda bar: float(bar.get("x", ""))):
        x, y, wide = float(bar.get("x", "")), bar.get("y", ""), float(bar.get("width", ""))
        assert ends.get(y, 0) < x and wide > 0 and x + wide < width  # never one over the other
        ends[y] = x + wide
    assert len(ends) == ranks
    words = [text.text or "" for text in root.iter(f"{SVG}text")]
    assert "time in forward passes of one microbatch" in words
    assert Counter(words)[f"{picture.idle_shares[0]:.1%}"] == list(picture.idle_shares).count(picture.idle_shares[0])
    for text in root.iter(f"{SVG}text"):
        assert 0 < float(text.get("x", "")) < width and 0 < float(text.get("y", "")) < height


def test_the_unit_of_the_axis_is_a_forward(tmp_path: Path) -> None:
    schedule = build_schedule("zbv_zero_bubble", 2, 4)
    in_forwards = write_schedule_svg(timeline(schedule), tmp_path / "forwards.svg").read_text()
    in_seconds = write_schedule_svg(timeline(schedule, 0.25, 0.5), tmp_path / "seconds.svg").read_text()
    assert in_forwards == in_seconds


def test_the_svg_needs_nothing_else_and_takes_any_file_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("in").mkdir()
    Path("in/a&b<c.csv").write_text("0F0,,0B0\n,1F0,1B0\n")
    picture = timeline(build_schedule("in/a&b<c.csv", 2))
    text = write_schedule_svg(picture, "schedule.svg").read_text()
    assert "a&amp;b&lt;c.csv: 1 microbatch on 2 ranks" in text
    assert text.count("http") == 1  # the namespace
    assert lines(picture, 80)[0] == "a&b<c.csv: 1 microbatch on 2 ranks"


def test_what_was_there_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "schedule.svg"
    path.write_text("old")
    write_schedule_svg(drawn("gpipe", 2, 2), path)
    assert path.read_text().startswith("<svg")
