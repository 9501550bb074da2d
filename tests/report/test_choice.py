"""A planner's choice, and the answer to why not something else, in the terminal."""

from __future__ import annotations

import copy
import io
import math
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from autolaunch.report.choice_screen import MOST_REASONS, show_choice, show_why, show_written
from autolaunch.report.choice_words import PARTS, command_of, parts_of, thinned
from autolaunch.report.page import Phrases, rows_shown
from autolaunch.report.readable import TimeUnit, difference, share_of, step_time
from autolaunch.report.settings_words import mesh_name, mesh_words, option_differences, option_rows, option_words
from tests.report.choice_cases import (
    CHOICES,
    GIB,
    STRANGE,
    alternative,
    explanation,
    huge,
    nothing_fits,
    one_device,
    planned,
    refusal,
    usual,
)


def shown(show: Callable[[Console], None], width: int = 80, encoding: str = "utf-8") -> list[str]:
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    show(Console(file=file, width=width))
    file.seek(0)
    return [line.rstrip() for line in file.read().splitlines()]


def lines_of(choice: dict[str, Any], width: int = 80, encoding: str = "utf-8") -> list[str]:
    """All of a choice, and the command that runs it."""
    return page_of(choice, width, encoding, full=True)


def page_of(choice: dict[str, Any], width: int = 100, encoding: str = "utf-8", full: bool = False) -> list[str]:
    def show(console: Console) -> None:
        show_choice(choice, console, full=full)
        show_written(choice, console)

    return shown(show, width, encoding)


def section(lines: list[str], title: str) -> list[str]:
    start = next(index for index, line in enumerate(lines) if line.startswith(title)) + 1
    end = next((index for index in range(start, len(lines)) if not lines[index]), len(lines))
    return lines[start:end]


def ways_in(lines: list[str]) -> list[str]:
    """The first line of every alternative; what differs may go on in the next."""
    return [row for row in section(lines, "alternatives") if row[0].isdigit()]


@pytest.mark.parametrize("width", [60, 100])
def test_what_differs_is_shown_as_a_whole(width: int) -> None:
    rows = section(page_of(usual(), width), "alternatives")
    assert "vs chosen" in rows[0] and "…" not in "".join(rows)


@pytest.mark.parametrize("width", [60, 79, 80])
def test_names_of_schedules_are_whole(width: int) -> None:
    choice = usual()
    choice["alternatives"].insert(0, alternative("dp2xmp2xpp2xcp2", 4.5, 30.0, "pp=interleaved_zero_bubble"))
    for full in (True, False):
        assert "interleaved_zero_bubble" in "\n".join(page_of(choice, width, full=full))


def test_the_decision() -> None:
    assert lines_of(usual())[:11] == [
        "╭─ plan ───────────────────────────────────────────────────────────────────────╮",
        "│ model     llama 70b · 70.6B parameters · 1,024 × 8,192 tokens per step       │",
        "│ machines  h100 · 128 nodes × 8 devices · figures built in                    │",
        "│ mesh      dp 16 × mp 8 × pp 8 · 1,024 ranks                                  │",
        "│ dp        zero1 · optimizer state sharded                                    │",
        "│ mp        seq_parallel                                                       │",
        "│ pp        interleaved_1f1b · 5 stages per rank · 32 microbatches             │",
        "│ step      4.21 s predicted, 3.81 to 4.66 s within one standard deviation     │",
        "│ speed     1.99M tokens/s · MFU 43.1%                                         │",
        "│ memory    56.3 GiB of 74.0 GiB, 76% on the fullest rank                      │",
        "╰──────────────────────────────────────────────────────────────────────────────╯",
    ]


@pytest.mark.parametrize("case", CHOICES)
def test_what_is_shown_first_is_one_page(case: str) -> None:
    choice = CHOICES[case]()
    lines = page_of(choice)
    ran = lines.index("run it") if "run it" in lines else len(lines)
    of_the_command = len(lines) - ran - 3 if "run it" in lines else 0  # with a plan it is one line
    assert len(lines) - of_the_command <= 40
    if choice.get("chosen"):
        assert sum(line.startswith("- ") for line in section([*lines, "why"], "why")) <= MOST_REASONS
        assert "what was looked at" not in lines and "where a step's time goes" not in lines


def test_the_page_has_the_fullest_stage_and_three_other_ways() -> None:
    lines = page_of(usual())
    bar, legend = section(lines, "memory of a rank in the fullest stage of the pipeline, limit 74.0 GiB")
    assert bar.endswith("|  56.3 GiB  76%") and legend.startswith("P parameters  G gradients")
    ways = [row.split() for row in ways_in(lines)]
    assert [way[1] for way in ways] == ["dp8xmp8xpp16", "dp64xmp8xcp2", "dp128xmp8"]  # of each mesh one
    assert " ".join(ways[0]).endswith("4.44 s +5.5% 44.0 GiB yes")


def test_the_page_has_what_may_not_fit_last_and_leaves_out_what_takes_much_longer() -> None:
    """Nor does it name what takes longer and fits less surely than the choice."""
    choice = usual()
    choice["alternatives"][1] |= {"fits": "over", "slower_by": -0.02}
    choice["alternatives"][2]["slower_by"] = 19.0
    ways = [(row.split()[1], row.split()[-1]) for row in ways_in(page_of(choice))]
    assert ways == [("dp64xmp8xcp2", "yes"), ("dp128xmp8", "yes"), ("dp32xmp8xpp4", "over")]
    choice["chosen"]["fits"] = "tight"
    ways = [(row.split()[1], row.split()[-1]) for row in ways_in(page_of(choice))]
    assert ways == [("dp32xmp4xpp8", "tight"), ("dp64xmp8xcp2", "yes"), ("dp128xmp8", "yes")]


def test_where_the_time_goes() -> None:
    rows = section(lines_of(usual()), "where a step's time goes")
    assert rows[0].startswith("matrix products          2.31 s  55%  ████")
    assert [row[:23].strip() for row in rows] == [
        "matrix products",
        "attention",
        "elementwise work",
        "exchange over mp",
        "sends between stages",
        "waiting in the pipeline",
        "exchange over dp",
        "optimizer",
        "fixed costs",
    ]
    longest = rows[0].count("█")
    assert abs(rows[3].count("█") / longest - 0.55 / 2.31) < 0.05
    assert rows[4].endswith("<1%  ▍")  # what is little is seen


def test_memory_of_stages_against_the_limit() -> None:
    rows = section(lines_of(usual()), "memory of a rank in each stage of the pipeline, limit 74.0 GiB")
    assert rows[1].endswith("|  56.3 GiB  76%")
    bar = rows[1].split()[2]
    assert abs((len(bar) - bar.count(".") - 1) / len(bar) - 56.3 / 74) < 0.03
    assert abs(bar.count("A") / len(bar) - 40 / 74) < 0.03
    assert [("L" in row) for row in rows[1:9]] == [False] * 7 + [True]
    assert rows[9] == "P parameters  G gradients  O optimizer  A activations  L loss  + other  | limit"


def test_memory_beyond_the_limit() -> None:
    bars = section(lines_of(huge(), 100), "memory of a rank in each stage")
    assert "|+" in bars[1] and bars[1].endswith("103%")
    assert [row.split()[0] for row in bars[1:-1]] == [
        *"01234", "...", "31", "32", "...", *["59", "60", "61", "62", "63"]
    ]  # fmt: skip


def test_memory_far_below_the_limit_is_shown_against_the_largest() -> None:
    bars = section(lines_of(one_device()), "memory of a rank, limit 4.0 GiB")
    assert set(bars[1].split()[2]) == {"P"}
    assert bars[-1] == "P parameters"


def test_alternatives_say_what_differs() -> None:
    rows = [line.split() for line in section(lines_of(usual(), 100), "the choice and its alternatives")[2:]]
    assert rows[0] == ["1", "dp16xmp8xpp8", "chosen", "4.21", "s", "56.3", "GiB", "yes"]
    assert " ".join(rows[1]) == "2 dp16xmp8xpp8 64 microbatches - within the noise 4.18 s -0.7% 66.1 GiB yes"
    assert " ".join(rows[2]) == "3 dp32xmp8xpp4 4.31 s +2.4% 71.9 GiB tight"
    assert " ".join(rows[5]) == "6 dp64xmp8xcp2 hsdp, 8 replicas, ring 4.90 s +16.4% 70.0 GiB yes"


@pytest.mark.parametrize(
    ("width", "expected"),
    [
        (80, ["hsdp, 8 replicas, interleaved_zero_bubble, ring - needs least memory"]),
        (24, ["hsdp, 8 replicas,", "interleaved_zero_bubble,", "ring - needs least", "memory"]),
        (23, ["hsdp, 8 replicas,", "interleaved_zero_bubble", "ring - needs least", "memory"]),
    ],
)
def test_options_go_on_in_the_next_line_between_them_alone(width: int, expected: list[str]) -> None:
    options = Phrases(["hsdp", "8 replicas", "interleaved_zero_bubble", "ring"], "needs least memory")
    assert shown(lambda console: console.print(options), width) == expected


def test_what_less_memory_costs_leaves_out_what_costs_nothing() -> None:
    rows = section(lines_of(usual(), 100), "what less memory costs")[2:]
    assert len(rows) == 8
    assert rows[0].split()[0] == "dp8xmp8xpp16" and rows[0].endswith("44.0 GiB")
    assert rows[-1].endswith("8.0 GiB")
    assert "what less memory costs" not in lines_of(one_device())


def test_reasons_counts_and_warnings() -> None:
    lines = lines_of(usual())
    assert section(lines, "why")[0] == "- mp 8 fills a node: its exchange stays within the fast domain of 8 devices."
    text = "\n".join(lines)
    ways = "41,400 ways considered: 9,712 fit, 4,568 may fit, 27,120 do not; of those to choose from, 27 within 1%"
    assert ways in " ".join(text.split())
    assert "\n27,120  virtual_stages\n 3,211  heads % mp\n" in text
    assert section(lines, "warnings")[0].startswith("- The figures of h100 are built in")
    assert "MFU: flops of matrix products and attention" in text


def test_the_command_runs_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "my plans" / "plan.yaml"
    lines = shown(lambda console: show_written(usual(), console, [path, path.with_name("plan.html")]))
    assert section(lines, "run it") == [
        "autolaunch '+plan=\"my plans/plan.yaml\"'",
        "written  my plans/plan.yaml, plan.html",
    ]


@pytest.mark.parametrize("case", ["usual", "huge", "strange"])
def test_the_command_without_a_plan_can_be_copied(case: str) -> None:
    choice = CHOICES[case]()
    typed = "\n".join(section(lines_of(choice), "run it"))
    assert shlex.split(typed.replace("\\\n", "")) == ["autolaunch", *choice["chosen"]["overrides"]]
    assert command_of(choice)[1:] == [shlex.quote(item) for item in choice["chosen"]["overrides"]]


def test_nothing_fits() -> None:
    lines = lines_of(nothing_fits())
    assert lines[0].startswith("╭─ plan: nothing fits ─")
    assert "what comes closest" in lines
    assert "run it" not in lines
    assert " no" in lines[9] or any(line.endswith(" no") for line in lines)


@pytest.mark.parametrize("case", CHOICES)
@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("encoding", ["utf-8", "ascii", "cp1252"])
def test_it_fits_into_the_terminal(case: str, width: int, encoding: str) -> None:
    lines = lines_of(CHOICES[case](), width, encoding)
    if "run it" in lines:  # a command is broken between words alone, so that it can be copied
        del lines[lines.index("run it") :]
    assert max(map(cell_len, lines)) <= width


def test_markup_in_names_is_shown_as_it_is() -> None:
    text = "\n".join(lines_of(CHOICES["strange"](), 120))
    assert STRANGE in text


def test_the_choice_is_not_changed() -> None:
    choice = usual()
    before = copy.deepcopy(choice)
    lines_of(choice)
    assert choice == before


# --- why not something else ------------------------------------------------------------------------------------------


def test_why_not_what_is_slower() -> None:
    assert shown(lambda console: show_why(explanation(), console)) == [
        "",
        "╭─ why not mp=4,pp=2 ──────────────────────────────────────────────────────────╮",
        "│ nearest  dp 128 × mp 4 × pp 2 · fsdp · seq_parallel · 1f1b · 4 microbatches  │",
        "│ place    412 of 9,712 that fit, fastest first                                │",
        "│ step     5.31 s predicted; the chosen way takes 4.21 s (+26.1%)              │",
        "│ memory   70.2 GiB of 74.0 GiB, 95%                                           │",
        "╰──────────────────────────────────────────────────────────────────────────────╯",
        "It takes 26 % longer: parameters are gathered between nodes in every microbatch.",
        "",
        "a step's time against what was chosen",
        "exchange over mp  -0.21 s                        ████|",
        "exchange over dp  +1.29 s                            |██████████████████████████",
        "fixed costs       +0.02 s                            |█",
    ]


def test_why_not_what_is_refused() -> None:
    lines = shown(lambda console: show_why(refusal(), console))
    assert lines[2] == "│ rejected  8 key heads can't be shared out over 16 ranks                      │"
    assert len(lines) == 4  # what the panel says is not said again


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
@pytest.mark.parametrize("width", [60, 80, 120])
def test_why_not_fits_into_the_terminal(encoding: str, width: int) -> None:
    for case in (explanation(), refusal(), explanation() | {"asked": STRANGE, "sentences": [STRANGE]}):
        assert max(map(cell_len, shown(lambda console, case=case: show_why(case, console), width, encoding))) <= width


# --- words and numbers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "value", "expected"),
    [
        pytest.param(step_time, 1.04e-4, "104 us", id="microseconds"),
        pytest.param(step_time, 0.0312, "31.2 ms", id="milliseconds"),
        pytest.param(step_time, 0.99996, "1.00 s", id="rounds-up-to-a-second"),
        pytest.param(step_time, 4.2149, "4.21 s", id="seconds"),
        pytest.param(step_time, 1004.2, "1,004 s", id="many-seconds"),
        pytest.param(step_time, math.inf, "?", id="no-time"),
        pytest.param(TimeUnit.of(4.21).write, 1234.5, "1,234 s", id="long-in-a-precise-unit"),
        pytest.param(difference, 0.0449, "+4.5%", id="percent"),
        pytest.param(difference, -0.007, "-0.7%", id="faster"),
        pytest.param(difference, 1.37, "x 2.4", id="times"),
        pytest.param(difference, 143.2, "x 144", id="many-times"),
        pytest.param(difference, None, "?", id="unknown"),
        pytest.param(mesh_name, "16x8x1x2", "dp16xmp8xcp2", id="by-shape"),
        pytest.param(mesh_name, {"dp": 2, "pp": 4}, "dp2xpp4", id="by-sizes"),
        pytest.param(mesh_name, "my mesh", "my mesh", id="no-mesh"),
        pytest.param(mesh_words, "1x1x4", "pp 4", id="in-words"),
        pytest.param(mesh_words, "1", "1 device", id="one-device"),
    ],
)
def test_numbers(function: Callable[[Any], str], value: Any, expected: str) -> None:
    assert function(value) == expected


@pytest.mark.parametrize(
    ("part", "whole", "expected"), [(0.004, 1, "<1%"), (0, 1, "0%"), (1, 0, "0%"), (0.55, 1, "55%")]
)
def test_shares(part: float, whole: float, expected: str) -> None:
    assert share_of(part, whole) == expected


def test_options_in_words() -> None:
    overrides = ["mesh=2x2x2x4", "dp=hsdp", "dp.replicate=2", "mp=auto", "pp=1f1b", "pp.microbatches=8"]
    overrides += [
        "pp.split_spec={layers.1: END}",
        "cp=usp",
        "cp.ulysses=2",
        "recompute=3",
        "data.microbatches=1",
        "+x=1",
    ]
    assert option_words(overrides) == [
        "hsdp", "2 replicas", "auto", "1f1b", "8 microbatches", "balanced cuts", "usp", "ulysses of 2",
        "recompute every 3 blocks", "x=1",
    ]  # fmt: skip
    assert option_rows(overrides)[0] == (
        "dp",
        "hsdp · 2 replicas · parameters, gradients, optimizer state sharded within replicas",
    )
    assert option_rows(overrides)[-2:] == [("recompute", "every 3 blocks"), ("x", "x=1")]
    assert option_words(["mesh=1x4", "dp=ddp", "mp=auto"]) == ["auto"]  # nothing to share out over dp


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        pytest.param(["mesh=2x1x2", "dp=zero1", "pp=1f1b", "pp.microbatches=4", "recompute=full"], [], id="the-same"),
        pytest.param(["mesh=2x1x2", "dp=zero1", "pp=1f1b", "pp.microbatches=8", "recompute=none"],
                     ["8 microbatches", "no recompute"], id="off"),
        pytest.param(["mesh=4", "dp=zero1", "recompute=full", "data.microbatches=1"], [], id="no-axis"),
        pytest.param(["mesh=4", "dp=zero1", "recompute=full", "data.microbatches=4"], [], id="as-many-otherwise"),
    ],
)  # fmt: skip
def test_differences_of_options(overrides: list[str], expected: list[str]) -> None:
    chosen = ["mesh=2x1x2", "dp=zero1", "pp=1f1b", "pp.microbatches=4", "recompute=full", "data.microbatches=1"]
    assert option_differences(overrides, chosen) == expected


def test_settings_below_an_option_that_went() -> None:
    chosen = ["mesh=1x1x2", "pp=interleaved_1f1b", "pp.virtual_stages=4", "pp.split_spec={a: END}"]
    assert option_differences(["mesh=1x1x2", "pp=interleaved_1f1b"], chosen) == ["usual stages per rank", "even cuts"]
    assert option_differences(["mesh=1x1x2", "pp=gpipe"], chosen) == ["gpipe"]


def test_words_for_parts_are_those_of_the_planner() -> None:
    from autolaunch_strategies.planner.reasons import PART_WORDS
    from autolaunch_strategies.planner.time import PARTS as ALL

    assert {name: look.words for name, look in PARTS.items()} == {**PART_WORDS, "optimizer": "optimizer"}
    assert tuple(PARTS) == ALL


def test_parts_are_in_one_order_and_none_is_lost() -> None:
    parts = {"unknown": 1.0, "bubble": 0.0, "attention": 2.0, "compute": 3.0, "broken": math.nan}
    assert parts_of(parts, PARTS) == [("compute", 3.0), ("attention", 2.0), ("unknown", 1.0)]


@pytest.mark.parametrize("number", [9, 10, 15, 16, 23, 100])
def test_thinning_keeps_the_ends_and_as_many_as_asked(number: int) -> None:
    assert thinned(list(range(5)), 8) == [0, 1, 2, 3, 4]
    kept = thinned(list(range(number)), 8)
    assert len(set(kept)) == 8 and {0, number - 1} <= set(kept) and kept == sorted(kept)


def test_of_many_rows_some_are_left_out() -> None:
    assert rows_shown(16) == list(range(16))
    assert rows_shown(17) == [0, 1, 2, 3, 4, None, 7, 8, None, 12, 13, 14, 15, 16]
    assert rows_shown(64, keep=40)[7:11] == [32, None, 40, None]


def test_sizes_are_binary() -> None:
    choice = usual()
    choice["chosen"]["memory_bytes"] = 1.5 * GIB
    assert any("1.5 GiB of 74.0 GiB, 2% on the fullest rank" in line for line in lines_of(choice))


# --- with the planner ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("devices", [1, 4, 64])
def test_what_the_planner_says_is_shown(devices: int, tmp_path: Path) -> None:
    from autolaunch.report.choice_html import write_choice
    from autolaunch_strategies.planner.document import document
    from autolaunch_strategies.planner.explain import why

    plan = planned(devices)
    choice = document(plan)
    lines = lines_of(choice, 100)
    assert max(map(cell_len, lines[: lines.index("run it")])) <= 100
    assert any(mesh_words(choice["chosen"]["mesh"]) in line for line in lines[:5])
    parts = section(lines, "where a step's time goes")
    assert len(parts) <= len(PARTS) and not any(sign in "".join(parts) for sign in "?-")
    assert {row.split("  ")[0] for row in parts} <= {look.words for look in PARTS.values()}
    assert [path.name for path in write_choice(tmp_path, choice)][-1] == "plan.html"
    for asked in ({"mp": 2}, {"mp": 7}, {"recompute": "full"}):
        answer = why(plan, asked).to_dict()
        assert max(map(cell_len, shown(lambda console, answer=answer: show_why(answer, console)))) <= 80


def test_nothing_here_needs_torch() -> None:
    code = (
        "import sys, autolaunch.report.choice_html, autolaunch.report.choice_screen; assert 'torch' not in sys.modules"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, timeout=60)
