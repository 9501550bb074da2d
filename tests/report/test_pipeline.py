"""What people see of a pipeline: stages, schedule and idle share in plan, plan.yaml, summary.json and on the screen."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from autolaunch.config.command_line import parse
from autolaunch.config.compose import compose
from autolaunch.jobs.run import resolve_job
from autolaunch.launch.place import Place
from autolaunch.report.pipeline import foreseen_timeline, remarks, stage_table, with_expectation
from autolaunch.report.plan_file import read_plan
from autolaunch.report.schedule_screen import schedule_text
from autolaunch.tasks import plan
from autolaunch_strategies.pipeline import idle
from autolaunch_strategies.pipeline.idle import IdleClock
from autolaunch_strategies.schedules.schedule import build_schedule, timeline
from tests.support.commands import Commands

OPTIONS = (
    *("exact", "gpipe", "1f1b", "looped_bfs", "interleaved_1f1b", "interleaved_zero_bubble"),
    *("zbv_zero_bubble", "dualpipev"),
)
TINY = (
    *("data=synthetic", "data.seq_len=16", "data.batch_size=16", "data.vocab_size=64"),
    *("data.num_validation_sequences=16", "model.vocab_size=64", "model.hidden_size=32", "model.head_dim=8"),
    *("model.intermediate_size=48", "model.num_layers=4", "trainer.accelerator=cpu", "trainer.max_steps=4"),
    *("trainer.enable_progress_bar=false", "model.tie_embeddings=true"),
)


def planned(directory: Path, *arguments: str) -> str:
    """Plans in this process what the command would, and returns what it shows."""
    composed = compose(parse(["plan", *arguments, *TINY]))
    job = resolve_job(composed.config, composed.config.hydra, directory, None, composed.origin)
    directory.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as out:
        patch.setenv("COLUMNS", "100")
        plan.run(job, Place())
    return out.getvalue()


def shown(renderable: Any, width: int = 80) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width).print(renderable)
    return [line.rstrip() for line in out.getvalue().splitlines()]


# --- plan ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_is_planned(tmp_path: Path, option: str) -> None:
    screen = planned(tmp_path, f"pp={option}", "mesh=2x1x2")
    pp = read_plan(tmp_path / "plan.yaml")["reasons"]["pp"]
    schedule = build_schedule("gpipe" if option == "exact" else option, 2, 8)
    costs = [stage["share_of_work"] for stage in pp["stages"]]
    assert pp["expected_idle_share"] == round(timeline(schedule, stage_costs=costs).idle_share, 6)
    assert pp["idle_share_of_equal_stages"] == round(timeline(schedule).idle_share, 6)
    assert (pp["batch_of_rank"], pp["microbatches"], sum(costs)) == (8, 8, pytest.approx(1, abs=1e-3))
    assert json.loads((tmp_path / "summary.json").read_text())["pipeline"] == {
        "schedule": schedule.name,
        "loss": "exact" if option == "exact" else "microbatch",
        "stages": schedule.stages,
        "microbatches": 8,
        "expected_idle_share": pp["expected_idle_share"],
    }
    v_shaped = option in ("zbv_zero_bubble", "dualpipev")
    assert pp["stages"][-1]["ranks"] == "0-1"
    assert pp["stages"][0]["ranks"] == ("0-1" if v_shaped else "2-3")
    texts = [element.text or "" for element in ElementTree.parse(tmp_path / "schedule.svg").iter()]
    each = ", 2 stages each" if schedule.virtual_stages == 2 else ""
    assert f"{option}: 8 microbatches on 2 ranks{each}" in texts
    assert sum(", microbatch " in text for text in texts) == sum(map(len, schedule.actions))
    assert texts.count("loss of the whole batch") == (3 if option == "exact" else 0)  # two marks, a word
    expected = f"{option}, 8 microbatches · idle {pp['expected_idle_share']:.1%} expected"
    assert f"pipeline   {schedule.stages} stages · {expected}" in screen


def test_the_screen_of_a_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    screen = planned(tmp_path / "out", "pp=exact", "mesh=2x1x2")
    lines = [line.rstrip() for line in screen[screen.index("stage   ranks") :].splitlines()]
    assert lines == [
        "stage   ranks   parts                                    work   parameters",
        "──────────────────────────────────────────────────────────────────────────",
        "    0   2-3     model.embed_tokens, model.layers.0-1    46.9%        17.5k",
        "    1   0-1     model.layers.2-3, model.norm, lm_head   53.1%        17.6k",
        "stages 0 and 1 share model.model.embed_tokens.weight and sum its gradients",
        "",
        "exact: 8 microbatches on 2 ranks",
        " stage                                                                                          idle",
        "     0  0>>1>>2>>3>>4>5>>6>>7>>.............0<<<<<1<<<<<.2<<<<.3<<<<<.4<<<<<5<<<<<.6<<<<.7<<<<<  21%",
        "     1  ...0>>1>>2>>>3>>4>>5>>6>>>7>>0<<<<<<1<<<<<2<<<<<<3<<<<<4<<<<<<5<<<<<6<<<<<<7<<<<<......  10%",
        "> forward  < backward  . idle",
        "idle 15.2% of all ranks' time, with a backward as long as 2 forwards",
        "with stages of equal work it would be 11.1%",
        "the loss of the whole batch is computed between forwards and backwards",
        "",
        "written  out/plan.yaml, out/schedule.svg",
    ]


def test_a_plan_can_be_repeated(tmp_path: Path) -> None:
    planned(tmp_path / "first", "pp=interleaved_1f1b", "pp.virtual_stages=2", "mesh=2x1x2")
    planned(tmp_path / "again", f"experiment={tmp_path / 'first' / 'plan.yaml'}")
    first, again = (read_plan(tmp_path / name / "plan.yaml") for name in ("first", "again"))
    assert first["pp"]["schedule"] == "interleaved_1f1b"
    assert first["reasons"].pop("by_device")  # chosen the first time, read the second
    assert again == first


def test_ranks_in_another_order(tmp_path: Path) -> None:
    planned(tmp_path, "pp=1f1b", "mesh=2x1x2", "mesh.order=[dp,pp,cp,mp]")
    stages = read_plan(tmp_path / "plan.yaml")["reasons"]["pp"]["stages"]
    assert [stage["ranks"] for stage in stages] == ["1, 3", "0, 2"]


# --- a run -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", [pytest.param("exact", marks=pytest.mark.full), "1f1b"])
def test_a_run_measures_its_idle_share(tmp_path: Path, option: str) -> None:
    run = Commands(tmp_path, *TINY)("mesh=1x1x2", f"pp={option}")
    screen, found = run.screen, run.summary["pipeline"]
    assert found["expected_idle_share"] == run.plan["reasons"]["pp"]["expected_idle_share"]
    assert 0.05 < found["expected_idle_share"] < 0.3
    assert 0 < found["measured_idle_share"] < 1
    assert f"{option}, 8 microbatches · idle {found['expected_idle_share']:.1%} expected" in screen
    measured, expected = found["measured_idle_share"], found["expected_idle_share"]
    assert f"pipeline    idle {measured:.1%} of the time ({expected:.1%} expected)" in screen


class Moments:
    """Stands in for the clock: every call is at the next of some moments."""

    def __init__(self, *moments: float) -> None:
        self.moments = iter(moments)

    def perf_counter(self) -> float:
        return next(self.moments)


def clock_of(monkeypatch: pytest.MonkeyPatch, *moments: float) -> IdleClock:
    monkeypatch.setattr(idle, "time", Moments(*moments))
    return IdleClock(torch.device("cpu"))


def test_only_passes_within_steps_count(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = clock_of(monkeypatch, 0, 1, 3, 6, 7, 10)
    with clock.busy():  # validation, say
        pass
    clock.begin()
    with clock.busy():
        pass
    clock.start()
    clock.start()
    clock.stop()
    clock.stop()
    clock.end()
    assert clock.seconds() == (3, 10)


def test_a_step_that_failed_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = clock_of(monkeypatch, 0, 1, 100, 101, 103, 104)
    assert clock.seconds() == (0, 0)
    clock.begin()
    clock.start()
    clock.begin()
    with clock.busy():
        pass
    clock.end()
    assert clock.seconds() == (2, 4)


def test_first_steps_are_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [50, 50, 10, 20]
    starts = itertools.accumulate(lengths, initial=0)
    clock = clock_of(
        monkeypatch, *(t for at, long in zip(starts, lengths, strict=False) for t in (at, at, at + 4, at + long))
    )
    for _ in lengths:
        clock.begin()
        with clock.busy():
            pass
        clock.end()
    assert clock.seconds() == (4, 15)


# --- what is expected ------------------------------------------------------------------------------------------------


def account(shares: list[float], **pp: Any) -> dict[str, Any]:
    stages = [
        {
            "stage": number,
            "pipe_rank": number,
            "ranks": str(len(shares) - 1 - number),
            "units": [f"layers.{number}"],
            "share_of_work": share,
            "parameters": 1000 * number,
        }
        for number, share in enumerate(shares)
    ]
    return {"blocks": {"found": ["a", "b"]}, "recompute": {"mode": "none"}, "pp": {"stages": stages, **pp}}


def job(schedule: str = "gpipe", **changes: Any) -> dict[str, Any]:
    pp = {"name": "mine", "loss": "microbatch", "schedule": schedule}
    return {"mesh": {"dp": 2}, "data": {"batch_size": 8, "microbatches": 2}, "pp": pp, **changes}


def test_stages_of_unequal_work() -> None:
    found = foreseen_timeline(account([0.25, 0.75]), job())
    assert found is not None
    # Forwards of 0.5 and 1.5, backwards of 1 and 3, two microbatches: 0.5 + 2 * 1.5 + 2 * 3 + 1 on the longest way.
    assert found.length == pytest.approx(10.5)
    assert found.idle_shares == pytest.approx((1 - 3 / 10.5, 1 - 9 / 10.5))
    figures = with_expectation(account([0.25, 0.75], cuts=["behind a"]), job(), found)["pp"]
    assert {name: figures[name] for name in list(figures)[:4]} == {
        "batch_of_rank": 2,
        "microbatches": 2,
        "expected_idle_share": 0.428571,
        "idle_share_of_equal_stages": 0.333333,
    }
    rows = shown(schedule_text(found, 60))[2:4]
    assert [row[-4:] for row in rows] == [" 71%", " 14%"]
    assert rows[0].startswith("     0  0>1>....")
    assert rows[1].startswith("     1  ..0>>>>>>1>>>>>>0<<<")


@pytest.mark.parametrize(
    ("shares", "blocks", "options", "said"),
    [
        pytest.param([0.5, 0.5], 8, {}, [], id="equal"),
        pytest.param([0.4, 0.6], 4, {}, ["with stages of equal work it would be 33.3%"], id="as-even-as-blocks-are"),
        pytest.param(
            [0.4, 0.6],
            8,
            {},
            ["with stages of equal work it would be 33.3%; pp.split=balanced cuts by work"],
            id="better-by-work",
        ),
        pytest.param(
            [0.4, 0.6], 8, {"split_spec": ["a"]}, ["with stages of equal work it would be 33.3%"], id="cut-by-hand"
        ),
    ],
)
def test_what_is_remarked(shares: list[float], blocks: int, options: dict[str, Any], said: list[str]) -> None:
    config = job()
    config["pp"] |= {"split": "even", **options}
    described = account(shares, loss="microbatch") | {"blocks": {"found": [str(number) for number in range(blocks)]}}
    found = foreseen_timeline(described, config)
    assert found is not None
    assert list(remarks(with_expectation(described, config, found), config)) == said


@pytest.mark.parametrize(
    ("schedule", "changes", "name", "microbatches"),
    [
        pytest.param("1f1b", {"data": {"batch_size": 12}}, "1f1b", 6, id="batch"),
        pytest.param("1f1b", {"data": {"_target_": "my.Data", "batch_size": 12}}, "1f1b", 8, id="own-data"),
        pytest.param("1f1b", {"module": {"_target_": "my.Module"}}, "1f1b", 8, id="own-module"),
        pytest.param("dualpipev", {}, "forward_then_backward", 2, id="too-few-samples"),
    ],
)
def test_microbatches_of_the_jobs_batch(schedule: str, changes: dict[str, Any], name: str, microbatches: int) -> None:
    found = foreseen_timeline(account([0.5, 0.5]), job(schedule, **changes))
    assert found is not None
    assert (found.schedule.name, found.schedule.microbatches) == (name, microbatches)


def test_recomputed_blocks_make_the_backward_longer() -> None:
    recomputed = account([0.5, 0.5]) | {"recompute": {"mode": 2, "blocks": {"a": "full"}}}
    found = foreseen_timeline(recomputed, job())
    assert found is not None
    assert shown(schedule_text(found, 80))[-1].endswith("with a backward as long as 2.5 forwards")


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.csv"
    file.write_text("0F0,0F1,,0B0,,0B1\n,1F0,1B0,1F1,1B1\n")
    found = foreseen_timeline(account([0.5, 0.5]), job(str(file)))
    assert found is not None
    assert shown(schedule_text(found, 80))[0] == "mine.csv: 2 microbatches on 2 ranks"
    assert foreseen_timeline({"blocks": {}}, job()) is None


# --- on the screen ---------------------------------------------------------------------------------------------------


def test_the_table_of_stages() -> None:
    shared = {"head.weight": [0, 1], "a": [0, 1, 2, 3, 4], "b": [0, 1], "c": [0, 1], "d": [0, 1]}
    assert shown(stage_table(account([0.25, 0.75], shared=shared)["pp"])) == [
        "stage   ranks   parts       work   parameters",
        "─────────────────────────────────────────────",
        "    0   1       layers.0   25.0%            0",
        "    1   0       layers.1   75.0%        1,000",
        "stages 0 and 1 share head.weight and sum its gradients",
        "5 stages share a and sum its gradients",
        "stages 0 and 1 share b and sum its gradients",
        "stages 0 and 1 share c and sum its gradients",
        "shared parameters beyond these: 1, named in plan.yaml",
    ]


def test_many_stages_are_folded() -> None:
    rows = shown(stage_table(account([0.05] * 20)["pp"]))[2:]
    assert [row.split()[0] for row in rows] == [*map(str, range(8)), "...", *map(str, range(12, 20))]
