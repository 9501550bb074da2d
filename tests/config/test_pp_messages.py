"""Command lines with a pipeline: what is wrong with them, told before a process starts, and who cuts the batch."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from autolaunch import check, cli
from autolaunch.command_line import parse
from autolaunch.compose import compose
from autolaunch.jobs import resolve_job
from autolaunch_strategies.config import PP_NAMES, SCHEDULES, PipelineParallel, parallel_config

ALL = "gpipe, 1f1b, looped_bfs, interleaved_1f1b, interleaved_zero_bubble, zbv_zero_bubble, dualpipev"
SPLIT_ALLOWED = "a prefix of numbered blocks, a list of names and prefixes, {name or pattern: BEGINNING | END}, or null"

FILES = {
    "good.csv": "0F0,0F1,,0B0,0B1\n,1F0,1B0,1F1,1B1\n",
    "three.csv": "0F0,0B0\n1F0,1B0\n2F0,2B0\n",
    "bad.csv": "0F0,0X0\n1F0,1B0\n",
}

WRONG = [
    pytest.param(
        ["mesh=2x2x2", "pp=none"],
        "mesh=2x2x2 with pp=none: the mesh has 2 ranks along pp, but pp=none uses only one\n"
        f"  allowed: pp=exact, or a schedule for losses that are means over samples: pp={ALL}\n"
        "  write:   pp=exact",
        id="none",
    ),
    pytest.param(
        ["mesh=1x1x2", "pp=1f1"],
        "pp=1f1: pp has no option '1f1'; did you mean 1f1b?\n"
        "  allowed: 1f1b, dualpipev, exact, gpipe, interleaved_1f1b, interleaved_zero_bubble, looped_bfs, none, "
        "zbv_zero_bubble\n"
        "  write:   pp=1f1b",
        id="option",
    ),
    pytest.param(
        ["mesh=1x1x2", "pp=1f1b", "pp.loss=exact"],
        "pp.loss=exact with pp.schedule=1f1b: exact works with gpipe alone: the loss of the whole batch comes after "
        "all forwards and before all backwards\n"
        "  allowed: pp.schedule=gpipe; or pp.loss=microbatch, if the loss is a mean over samples\n"
        "  write:   pp.loss=microbatch",
        id="exact-with-another-schedule",
    ),
    pytest.param(
        ["pp=1f1b", "pp.schedule=1f2b"],
        f"pp.schedule=1f2b: no such schedule; did you mean 1f1b?\n"
        f"  allowed: {ALL}, or the path of a CSV file\n"
        "  write:   pp.schedule=1f1b",
        id="schedule-that-no-mesh-has",
    ),
    pytest.param(
        ["mesh=1x1x2", "pp.loss=micro_batch", "pp.split=fair", "pp.microbatches=0"],
        "pp.loss=micro_batch: not one of the choices\n"
        "  allowed: exact, microbatch\n"
        "  write:   pp.loss=microbatch\n"
        "pp.microbatches=0: out of range\n"
        "  allowed: 1 or more\n"
        "pp.split=fair: not one of the choices\n"
        "  allowed: even, balanced",
        id="values",
    ),
    pytest.param(
        ["mesh=1x1x2", "pp.microbatch=4"],
        "pp.microbatch=4: no such key; did you mean pp.microbatches?\n  write:   pp.microbatches=4",
        id="key",
    ),
    pytest.param(
        ["mesh=1x1x8"],
        "mesh=1x1x8 with model=llama: 4 layers cannot fill 8 pipeline stages\n"
        "  allowed: pp of size 4 or less, or more layers",
        id="layers",
    ),
    pytest.param(
        ["mesh=1x1x4", "pp=interleaved_1f1b"],
        "mesh=1x1x4 with model=llama and pp=interleaved_1f1b: 4 layers cannot fill 4 x 2 pipeline stages\n"
        "  allowed: pp of size 2 or less, or more layers",
        id="layers-of-virtual-stages",
    ),
    pytest.param(
        ["mesh=1x1x2", "pp=looped_bfs", "pp.virtual_stages=5"],
        "mesh=1x1x2 with model=llama and pp=looped_bfs: 4 layers cannot fill 2 x 5 pipeline stages\n"
        "  allowed: a schedule with one stage per rank",
        id="layers-of-many-virtual-stages",
    ),
    pytest.param(
        ["mesh=1x1x2", "pp=1f1b", "pp.virtual_stages=2"],
        "pp.virtual_stages=2 with pp.schedule=1f1b: 1f1b has exactly 1 stage per rank\n"
        "  allowed: pp.virtual_stages=1\n"
        "  write:   pp.virtual_stages=1",
        id="virtual-stages",
    ),
    pytest.param(
        ["mesh=1x1x4", "pp=1f1b", "pp.microbatches=2"],
        "pp.microbatches=2 with pp.schedule=1f1b: 1f1b needs at least as many microbatches as there are stages, 4\n"
        "  allowed: pp.microbatches of 4 or more\n"
        "  write:   pp.microbatches=4",
        id="microbatches-of-a-schedule",
    ),
    pytest.param(
        ["mesh=1x1x4", "pp=1f1b", "data.microbatches=2"],
        "data.microbatches=2 with pp.schedule=1f1b: 1f1b needs at least as many microbatches as there are stages, 4\n"
        "  allowed: data.microbatches of 4 or more\n"
        "  write:   data.microbatches=4",
        id="microbatches-of-a-schedule-by-the-other-key",
    ),
    pytest.param(
        ["mesh=2x1x2", "pp.microbatches=3"],
        "pp.microbatches=3: a rank's batch of 8 sequences cannot be cut into 3 equal microbatches "
        "(data.batch_size=16 over 2 data parallel ranks)\n"
        "  allowed: pp.microbatches of 1, 2, 4, 8\n"
        "  write:   pp.microbatches=2",
        id="microbatches-of-a-batch",
    ),
    pytest.param(
        ["mesh=1x1x2", "data.microbatches=3"],
        "data.microbatches=3: a rank's batch of 16 sequences cannot be cut into 3 equal microbatches "
        "(data.batch_size=16 over 1 data parallel rank)\n"
        "  allowed: data.microbatches of 1, 2, 4, 8, 16\n"
        "  write:   data.microbatches=2",
        id="microbatches-of-a-batch-by-the-other-key",
    ),
    pytest.param(
        ["mesh=2x1x2", "pp=1f1b", "pp.microbatches=8", "data.microbatches=4"],
        "pp.microbatches=8: a rank's batch of 2 sequences cannot be cut into 8 equal microbatches "
        "(data.batch_size=16 over 2 data parallel ranks in 4 accumulated batches)\n"
        "  allowed: pp.microbatches of 2\n"
        "  write:   pp.microbatches=2",
        id="microbatches-of-an-accumulated-batch",
    ),
    pytest.param(
        ["mesh=2x1x2", "pp.microbatches=2", "data.microbatches=3"],
        "data.batch_size=16: 16 sequences cannot be shared evenly by 2 data parallel ranks in 3 microbatches\n"
        "  allowed: multiples of 2 x 3 = 6\n"
        "  write:   data.batch_size=12 or data.batch_size=18",
        id="accumulation-beside-microbatches",
    ),
    pytest.param(
        ["mesh=2x1x4", "pp=1f1b", "data.batch_size=6"],
        "data.batch_size=6 with pp.schedule=1f1b: 1f1b needs at least 4 microbatches on 4 ranks of pp, but a rank's "
        "batch has 3 sequences (data.batch_size=6 over 2 data parallel ranks)\n"
        "  allowed: data.batch_size of 8 or more, or pp.schedule=gpipe\n"
        "  write:   data.batch_size=8",
        id="batch-too-small",
    ),
    pytest.param(
        ["mesh=1x1x2", "pp=1f1b", "pp.schedule=absent.csv"],
        f"pp.schedule=absent.csv: no such file\n  allowed: the path of a CSV file, or {ALL}",
        id="file",
    ),
    pytest.param(
        ["mesh=1x1x2", "pp=1f1b", "pp.schedule=three.csv"],
        "pp.schedule=three.csv: the file has 3 rows, but the mesh has 2 ranks along pp\n"
        "  allowed: one row per rank of pp",
        id="file-for-another-mesh",
    ),
    pytest.param(
        ["mesh=1x1x2", "pp=1f1b", "pp.schedule=bad.csv"],
        "pp.schedule=bad.csv, row 1, column 2: 0X0: not a step of a schedule\n"
        "  allowed: stage, F, B, I or W, and microbatch: 0F0, 1B3; an empty cell is idle time",
        id="file-with-a-mistake",
    ),
    pytest.param(
        ["mesh=1x1x2", "pp.split_spec={model.layers.1: MIDDLE}"],
        "pp.split_spec={model.layers.1: MIDDLE}: MIDDLE is no split point\n"
        "  allowed: BEGINNING (before it), END (behind it)",
        id="split-point",
    ),
    pytest.param(
        ["mesh=1x1x2", "pp.split_spec=4"],
        f"pp.split_spec=4: does not say where to cut\n  allowed: {SPLIT_ALLOWED}",
        id="split-by-number",
    ),
    pytest.param(
        ["+pp.split_spec.model.layers.1=END"],
        "pp.split_spec.model.layers.1: dots in a key of the command line make groups of keys, not a name of a module\n"
        "  allowed: names in braces\n"
        "  write:   'pp.split_spec={model.layers.1: END}'",
        id="split-with-dots",
    ),
    pytest.param(
        ["pp.split_spec={model.layers.[0-1]: END}"],
        "pp.split_spec={model.layers.[0-1]: END}: Hydra cannot read this value\n"
        "  allowed: a backslash before each bracket in the name of a key\n"
        "  write:   'pp.split_spec={model.layers.\\[0-1\\]: END}'",
        id="split-by-a-pattern-in-brackets",
    ),
]


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["autolaunch"])
    monkeypatch.setattr(check, "visible_devices", lambda accelerator: ("cpu", None))
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    return tmp_path


@pytest.mark.parametrize(("argv", "message"), WRONG)
def test_one_message_and_nothing_else(
    argv: list[str], message: str, workplace: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code = cli.run(argv)
    assert capfd.readouterr().err == message + "\n"
    assert code == 2
    assert sorted(path.name for path in workplace.iterdir()) == sorted(FILES)


def job(*argv: str) -> dict[str, Any]:
    """The config of the resolved job of a command line."""
    composed = compose(parse(argv))
    assert composed.errors == []
    return resolve_job(composed.config, composed.config.hydra, Path.cwd() / "run").config


@pytest.mark.parametrize(
    ("typed", "accumulated", "pipelined"),
    [
        pytest.param(["mesh=2x1x2"], 1, None, id="nothing said"),
        pytest.param(["mesh=2x1x2", "data.microbatches=4"], 1, 4, id="data.microbatches"),
        pytest.param(["mesh=2x1x2", "pp.microbatches=2"], 1, 2, id="pp.microbatches"),
        pytest.param(["mesh=2x1x2", "data.microbatches=4", "pp.microbatches=2"], 4, 2, id="both"),
        pytest.param(["mesh=4", "data.microbatches=4"], 4, None, id="no pipeline"),
        pytest.param(["mesh=4", "pp=none", "data.microbatches=4"], 4, None, id="none"),
        pytest.param(["mesh=pp-1", "launch.devices=2", "data.microbatches=4"], 1, 4, id="the devices that are left"),
    ],
)
def test_a_batch_is_cut_by_the_pipeline_or_accumulated(
    typed: list[str], accumulated: int, pipelined: int | None, workplace: Path
) -> None:
    """The loader, lightning's accumulation and the strategy read these two keys."""
    config = job(*typed)
    assert config["data"]["microbatches"] == accumulated
    assert (config["pp"] or {"microbatches": None})["microbatches"] == pipelined


def test_an_accumulating_data_module_of_ones_own_keeps_its_arguments(workplace: Path) -> None:
    config = job("mesh=1x1x2", "data=custom", "data._target_=autolaunch.data.Mine", "+data.microbatches=4")
    assert config["data"]["microbatches"] == 4
    assert config["pp"]["microbatches"] is None


def test_a_schedule_in_a_file_is_found_from_everywhere(workplace: Path) -> None:
    assert job("mesh=1x1x2", "pp=1f1b", "pp.schedule=good.csv")["pp"]["schedule"] == str(workplace / "good.csv")


@pytest.mark.parametrize("name", ["exact", *SCHEDULES])
def test_every_option_fits_the_mesh_of_the_readme(name: str, workplace: Path) -> None:
    config = job("mesh=2x2x2", f"pp={name}")
    assert PipelineParallel(**config["pp"]) == PP_NAMES[name]
    assert parallel_config("2x2x2", mp="auto", pp=name).check() == []


def test_a_pipeline_of_one_rank_is_none(workplace: Path) -> None:
    """What belongs to a mesh with more ranks is left alone, a file that is not there included."""
    config = job("mesh=2", "pp=1f1b", "pp.microbatches=7", "pp.schedule=absent.csv")
    assert config["pp"]["microbatches"] == 7


def test_info_says_what_each_schedule_does(workplace: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["--info", "pp"]) == 0
    page = " ".join(capfd.readouterr().out.split())
    for name in ("exact", "none", *SCHEDULES):
        assert f"pp={name} " in page
    assert "pp=1f1b A forward and a backward in turn" in page
    assert "pp.split_spec null Where to cut" in page
