"""Pictures of a planner's choice, and the page that holds them."""

from __future__ import annotations

import itertools
import math
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path
from random import Random
from typing import Any

import pytest

from autolaunch.report.choice_html import write_choice
from autolaunch.report.choice_pictures import memory_svg, time_svg
from autolaunch.report.choice_words import MEMORY, PARTS
from autolaunch.report.pareto_picture import pareto_svg
from autolaunch.report.settings_words import option_words
from autolaunch.report.svg import round_numbers_apart, text_width
from autolaunch_strategies.planner.document import document
from tests.report.choice_cases import CHOICES, GIB, STRANGE, huge, nothing_fits, one_device, planned, strange, usual

SVG = "{http://www.w3.org/2000/svg}"
PICTURES = {"time": time_svg, "memory": memory_svg, "pareto": pareto_svg}


def texts(root: ElementTree.Element) -> list[str]:
    return ["".join(text.itertext()) for text in root.iter(f"{SVG}text")]


def bars(root: ElementTree.Element) -> list[ElementTree.Element]:
    return [shape for shape in root.iter(f"{SVG}rect") if about(shape)]


def about(shape: ElementTree.Element) -> str:
    return shape.findtext(f"{SVG}title", "")


def number(shape: ElementTree.Element, key: str) -> float:
    return float(shape.get(key, "nan"))


def box(text: ElementTree.Element) -> tuple[float, float, float, float]:
    """Where words are in a wide font: left, top, right, bottom of their small letters' line."""
    words = "".join(text.itertext())
    size = float(text.get("font-size", 12))
    wide, x, y = text_width(words, size, bool(text.get("font-weight"))), number(text, "x"), number(text, "y")
    left = x - {"end": wide, "middle": wide / 2}.get(text.get("text-anchor", ""), 0.0)
    return left, y - 0.8 * size, left + wide, y + 0.2 * size


def check_words(root: ElementTree.Element) -> None:
    """No words leave the picture, lie over other words or, in a plot, over a point."""
    boxes = {text: box(text) for text in root.iter(f"{SVG}text")}
    for text, (left, top, right, bottom) in boxes.items():
        assert min(left, top) >= 0, text.text
        assert right <= number(root, "width") and bottom <= number(root, "height"), text.text
        for point in (shape for shape in root.iter(f"{SVG}circle") if about(shape)):
            x, y = number(point, "cx"), number(point, "cy")
            away = math.hypot(max(left - x, x - right, 0), max(top - y, y - bottom, 0))
            assert away >= number(point, "r") - 0.01, (text.text, about(point))
    for (one, (left, top, right, bottom)), (other, second) in itertools.combinations(boxes.items(), 2):
        apart = right <= second[0] + 0.01 or second[2] <= left + 0.01 or bottom <= second[1] or second[3] <= top
        assert apart, (one.text, other.text)


@pytest.mark.parametrize("name", PICTURES)
@pytest.mark.parametrize("case", CHOICES)
def test_pictures_are_whole(name: str, case: str) -> None:
    text = PICTURES[name](CHOICES[case]())
    if not text:
        assert (name, case) in {("memory", "nothing-fits"), ("pareto", "nothing-fits"), ("pareto", "one-device")}
        return
    root = ElementTree.fromstring(text)
    width, height = number(root, "width"), number(root, "height")
    assert root.get("viewBox") == f"0 0 {width:.0f} {height:.0f}"
    assert text.count("http") == 1  # the namespace
    assert "nan" not in text and "inf" not in text.replace("information", "")
    for shape in root.iter(f"{SVG}rect"):
        assert number(shape, "x") >= 0 or shape.get("x") is None
        assert number(shape, "width") > 0
        if shape.get("x"):
            assert number(shape, "x") + number(shape, "width") <= width + 0.01
            assert number(shape, "y") + number(shape, "height") <= height
    check_words(root)


@pytest.mark.parametrize("name", PICTURES)
def test_the_same_choice_gives_the_same_bytes(name: str) -> None:
    assert PICTURES[name](usual()) == PICTURES[name](usual())


def test_bars_are_as_long_as_their_times() -> None:
    choice = usual()
    root = ElementTree.fromstring(time_svg(choice))
    rows = {y: list(row) for y, row in itertools.groupby(bars(root), key=lambda bar: number(bar, "y"))}
    assert len(rows) == 6
    drawn = [choice["chosen"], *choice["alternatives"]][:6]
    scale = 520 / drawn[5]["seconds"]
    for row, way in zip(rows.values(), drawn, strict=True):
        known = [(name, seconds) for name in PARTS if (seconds := way["parts"].get(name, 0.0))]
        for bar, (name, seconds) in zip(row, known, strict=True):
            assert about(bar).startswith(PARTS[name].words + ": ")
            assert bar.get("fill") == PARTS[name].colour
            assert number(bar, "width") == pytest.approx(seconds * scale, abs=1.01)
        for one, other in itertools.pairwise(row):
            assert number(one, "x") + number(one, "width") <= number(other, "x") + 0.01
    words = texts(root)
    assert "4.21 s · chosen" in words and "4.90 s · +16.4%" in words
    assert "dp64xmp8xcp2" in words and "hsdp, 8 replicas, ring" in words


def test_what_takes_many_times_as_long_is_not_drawn() -> None:
    choice = usual()
    choice["alternatives"][-1] |= {"seconds": 900.0, "slower_by": 212.8}
    assert "900" not in time_svg(choice)


def test_times_of_a_tiny_step_have_their_unit() -> None:
    words = texts(ElementTree.fromstring(time_svg(one_device())))
    assert "104 us · chosen" in words and "time of a step, us" in words and "100" in words


def test_memory_is_drawn_against_the_limit() -> None:
    choice = usual()
    root = ElementTree.fromstring(memory_svg(choice))
    limit = next(path for path in root.iter(f"{SVG}path") if path.get("stroke-dasharray"))
    at = float(limit.get("d", "").removeprefix("M").split()[0])
    rows = [list(row) for _, row in itertools.groupby(bars(root), key=lambda bar: number(bar, "y"))]
    assert len(rows) == 8
    for row, stage in zip(rows, choice["chosen"]["stages"], strict=True):
        left, right = number(row[0], "x"), number(row[-1], "x") + number(row[-1], "width")
        assert (right - left) / (at - left) == pytest.approx(stage["total"] / (74 * GIB), abs=0.01)
    assert "limit 74.0 GiB" in texts(root)
    assert [words for words in texts(root) if words in {look.words for look in MEMORY.values()}][-6:] == [
        look.words for look in MEMORY.values()
    ]


def test_memory_of_64_stages_shows_each_of_them() -> None:
    words = texts(ElementTree.fromstring(memory_svg(huge())))
    assert {"0", "31", "63"} <= set(words)
    assert "76.3 GiB · 103%" in words


def test_points_where_the_mesh_changes_have_names() -> None:
    for case in ("usual", "huge", "strange"):
        words = texts(ElementTree.fromstring(pareto_svg(CHOICES[case]())))
        assert 2 <= sum("xpp" in word for word in words) <= 9


OVERRIDES = (
    *("dp=hsdp", "dp.replicate=16", "mp=seq_parallel", "pp=interleaved_zero_bubble", "pp.virtual_stages=16"),
    *("pp.microbatches=1024", "pp.split_spec={model.layers.1: END}", "cp=usp", "cp.ulysses=8", "recompute=selective"),
    *("data.microbatches=64", "mp.plan=/a/path/that/goes/on/and/on/and/on/and/on/and/on/and/on/and/on/plan.yaml"),
)


def any_choice(random: Random) -> dict[str, Any]:
    """Ways of any number, any distance from each other and any distance from the limit, some at the same place."""

    def way(seconds: float, memory: float) -> dict[str, Any]:
        shares = {name: random.choice([0.0, random.random() ** 3]) for name in PARTS} | {"compute": 1.0}
        return {
            "seconds": seconds,
            "memory_bytes": memory,
            "mesh": f"{random.choice([1, 2, 16, 128])}x{random.choice([1, 8])}x{random.choice([1, 4, 16])}",
            "overrides": random.sample(OVERRIDES, random.randrange(len(OVERRIDES))),
            "parts": {name: share * seconds / sum(shares.values()) for name, share in shares.items()},
        }

    limit = random.choice([24, 80]) * GIB
    seconds, memory = random.choice([1e-4, 0.3, 4.0, 900.0]), limit * random.uniform(0.02, 1.2)
    front = []
    for _ in range(random.choice([2, 3, 5, 10, 20, 40, 90])):
        front.append(way(seconds, memory))
        seconds *= 1 + random.choice([0.001, 0.02, 0.3]) * random.random()
        memory *= 1 - random.choice([0.0, 0.01, 0.1, 0.4]) * random.random()
    others = [
        way(random.choice(front)["seconds"] * random.uniform(1, 1.3), memory * random.uniform(1, 9))
        for _ in range(random.choice([0, 5, 10]))
    ]
    stages = [
        {"pipe_rank": rank, "blocks": random.randrange(100), **kinds, "total": sum(kinds.values())}
        for rank in range(random.choice([1, 8, 20, 128]))
        for kinds in [{name: random.choice([0.0, limit * random.random() ** 3]) for name in MEMORY}]
    ]
    chosen = {**random.choice([*front, *others]), "memory_limit_bytes": limit, "stages": stages}
    return {"chosen": random.choice([chosen, chosen, None]), "pareto": front, "alternatives": others}


@pytest.mark.parametrize("seed", range(30))
def test_words_in_pictures_of_anything_are_apart(seed: int) -> None:
    choice = any_choice(Random(seed))
    pictures = [ElementTree.fromstring(text) for draw in PICTURES.values() if (text := draw(choice))]
    for root in pictures:
        check_words(root)
    assert not choice["chosen"] or any(word.startswith("chosen: ") for word in texts(pictures[-1]))


@pytest.mark.parametrize("devices", [8, 64])
def test_words_in_pictures_of_what_the_planner_says_are_apart(devices: int) -> None:
    choice = document(planned(devices))
    for draw in PICTURES.values():
        check_words(ElementTree.fromstring(draw(choice)))
    chosen_options = ", ".join(option_words(choice["chosen"]["overrides"]))
    assert chosen_options in " ".join(texts(ElementTree.fromstring(time_svg(choice))))  # none of them is cut off


def test_the_plot_shows_every_way() -> None:
    choice = usual()
    root = ElementTree.fromstring(pareto_svg(choice))
    points = [shape for shape in root.iter(f"{SVG}circle") if about(shape)]
    assert len(points) == len(choice["pareto"]) + len(choice["alternatives"]) + 1
    front = sorted(points[len(choice["alternatives"]) : -1], key=lambda point: number(point, "cx"))
    assert [number(point, "cy") for point in front] == sorted(number(point, "cy") for point in front)  # less memory
    assert about(points[-1]).startswith("dp16xmp8xpp8, zero1, ") and about(points[-1]).endswith(": 4.21 s, 56.3 GiB")
    assert "chosen: dp16xmp8xpp8" in texts(root)


def test_ways_that_are_nearly_as_fast_stay_apart_from_each_other() -> None:
    choice = usual()
    choice["pareto"][-1]["seconds"] = 421.0
    root = ElementTree.fromstring(pareto_svg(choice))
    assert {"50", "100", "200", "400"} <= set(texts(root))
    points = (shape for shape in root.iter(f"{SVG}circle") if about(shape))
    places = {about(shape).rpartition(": ")[2]: number(shape, "cx") for shape in points}
    fastest, chosen, slowest = (places[key] for key in ("4.18 s, 66.1 GiB", "4.21 s, 56.3 GiB", "421.00 s, 8.0 GiB"))
    assert (chosen - fastest) / (slowest - fastest) == pytest.approx(math.sqrt(0.03 / 416.82), abs=1e-4)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        pytest.param(7.05, 107, [10, 20, 30, 50, 70, 100], id="far-apart"),
        pytest.param(390, 1150, [400, 440, 500, 600, 800, 1000], id="near"),
        pytest.param(4.18, 4.21, [4.18, 4.182, 4.185, 4.19, 4.2, 4.21], id="nearly-the-same"),
        pytest.param(4.2, 4.2, [4.2], id="the-same"),
    ],
)
def test_numbers_at_an_axis(low: float, high: float, expected: list[float]) -> None:
    def place(number: float) -> float:
        return 430 * math.sqrt((number - low) / (high - low)) if high > low else 0.0

    numbers = round_numbers_apart(low, high, place, 48)
    assert numbers == expected


# --- the page --------------------------------------------------------------------------------------------------------

EMPTY = {"meta", "br"}


class Page(HTMLParser):
    """Checks that tags are closed in order, and keeps words by tag."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.words: dict[str, list[str]] = {}
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert not any(key in ("src", "href") or key.startswith("on") for key, _ in attrs)
        self.seen.append(tag)
        if tag not in EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and data.strip():
            self.words.setdefault(self.open[-1], []).append(data.strip())


@pytest.mark.parametrize("case", CHOICES)
def test_the_page_is_well_formed_and_needs_nothing_else(case: str, tmp_path: Path) -> None:
    paths = write_choice(tmp_path, CHOICES[case]())
    text = paths[-1].read_text(encoding="utf-8")
    assert paths[-1].name == "plan.html" and text.startswith("<!DOCTYPE html>")
    page = Page(text)
    assert "script" not in page.seen and "link" not in page.seen and "img" not in page.seen
    assert "url(" not in text and "@import" not in text
    assert page.seen.count("svg") == len(paths) - 1
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(path.name for path in paths)


def test_what_the_page_says(tmp_path: Path) -> None:
    *pictures, path = write_choice(tmp_path / "new", usual())
    assert [picture.name for picture in pictures] == ["time.svg", "memory.svg", "pareto.svg"]
    page = Page(path.read_text(encoding="utf-8"))
    assert page.words["h1"] == ["Plan for llama 70b"]
    assert "dp 16 × mp 8 × pp 8 · 1,024 ranks" in page.words["dd"]
    assert page.words["pre"] == ["autolaunch +plan=plan.yaml"]
    assert page.words["code"][0].startswith("mesh=16x8x8 dp=zero1 ")
    assert len(page.words["li"]) == 3
    assert {"4.21 s", "+16.4%", "71.9 GiB", "tight", "27,120", "heads % mp"} <= set(page.words["td"])
    assert any(note.startswith("MFU: flops of matrix products") for note in page.words["p"])


def test_strange_names_are_words_and_not_tags(tmp_path: Path) -> None:
    *pictures, path = write_choice(tmp_path, strange())
    text = path.read_text(encoding="utf-8")
    assert "<script" not in text
    page = Page(text)
    assert page.words["h1"] == [f"Plan for {STRANGE}"]
    assert STRANGE in page.words["td"] and STRANGE in page.words["li"]
    for picture in pictures:
        ElementTree.parse(picture)
    assert any(STRANGE in words for words in texts(ElementTree.parse(pictures[0]).getroot()))


def test_signs_that_xml_forbids_are_replaced(tmp_path: Path) -> None:
    choice = usual()
    choice["alternatives"][0]["mesh"] = choice["model"]["name"] = "a\x00b\x1bc"
    *pictures, path = write_choice(tmp_path, choice)
    assert any("a\ufffdb\ufffdc" in words for words in texts(ElementTree.parse(pictures[0]).getroot()))
    assert "\x00" not in path.read_text(encoding="utf-8")


def test_the_same_choice_gives_the_same_files(tmp_path: Path) -> None:
    first = [path.read_bytes() for path in write_choice(tmp_path / "a", usual())]
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "plan.html").write_text("old")
    assert [path.read_bytes() for path in write_choice(tmp_path / "b", usual())] == first


def test_pictures_of_an_earlier_choice_do_not_remain(tmp_path: Path) -> None:
    write_choice(tmp_path, usual())
    assert [path.name for path in write_choice(tmp_path, nothing_fits())] == ["time.svg", "plan.html"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plan.html", "time.svg"]
