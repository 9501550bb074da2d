"""Command lines with a pipeline: what is wrong with them, told before a process starts, and who cuts the batch."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from autolaunch import cli
from autolaunch.config import across_keys, arithmetic
from autolaunch.config.command_line import parse
from autolaunch.config.compose import compose
from autolaunch.jobs.run import resolve_job
from autolaunch_strategies.apply.check import config_errors
from autolaunch_strategies.config import PP_NAMES, SCHEDULES, PipelineParallel, parallel_config
from tests.support.messages import Told, assert_only_told
from tests.support.tiers import one_in

ALL = "gpipe, 1f1b, looped_bfs, interleaved_1f1b, interleaved_zero_bubble, zbv_zero_bubble, dualpipev"

FILES = {
    "good.csv": "0F0,0F1,,0B0,0B1\n,1F0,1B0,1F1,1B1\n",
    "three.csv": "0F0,0B0\n1F0,1B0\n2F0,2B0\n",
    "bad.csv": "0F0,0X0\n1F0,1B0\n",
}

WRONG = [
    pytest.param(
        ["mesh=2x2x2", "pp=none"],
        Told(
            "mesh=2x2x2 with pp=none",
            "2 ranks along pp",
            allowed=("pp=exact", f"pp={ALL}"),
            write="pp=exact",
        ),
        id="none",
    ),
    pytest.param(
        ["mesh=1x1x2", "pp=1f1"],
        Told(
            "pp=1f1",
            "1f1b",
            allowed="1f1b, dualpipev, exact, gpipe, interleaved_1f1b, interleaved_zero_bubble, looped_bfs, "
            "none, zbv_zero_bubble",
            write="pp=1f1b",
        ),
        id="option",
    ),
    pytest.param(
        ["mesh=1x1x2", "pp=1f1b", "pp.loss=exact"],
        Told(
            "pp.loss=exact with pp.schedule=1f1b",
            "exact",
            "gpipe",
            allowed=("pp.schedule=gpipe", "pp.loss=microbatch"),
            write="pp.loss=microbatch",
        ),
        id="exact-with-another-schedule",
    ),
    pytest.param(
        ["pp=1f1b", "pp.schedule=1f2b"],
        Told("pp.schedule=1f2b", "1f1b", allowed=(ALL, "CSV file"), write="pp.schedule=1f1b"),
        id="schedule-that-no-mesh-has",
    ),
    pytest.param(
        ["mesh=1x1x2", "pp.loss=micro_batch", "pp.split=fair", "pp.microbatches=0"],
        [
            Told("pp.loss=micro_batch", "choices", allowed="exact, microbatch", write="pp.loss=microbatch"),
            Told("pp.microbatches=0", "out of range", allowed="1 or more"),
            Told("pp.split=fair", "choices", allowed="even, balanced"),
        ],
        id="values",
    ),
    pytest.param(
        ["mesh=1x1x2", "pp.microbatch=4"],
        Told("pp.microbatch=4", "pp.microbatches", write="pp.microbatches=4"),
        id="key",
    ),
    pytest.param(
        ["mesh=1x1x8"],
        Told("mesh=1x1x8 with model=llama", "4 layers", "8 pipeline stages", allowed=("pp of size 4 or less",)),
        id="layers",
    ),
    pytest.param(
        ["mesh=1x1x4", "pp=interleaved_1f1b"],
        Told(
            "mesh=1x1x4 with model=llama and pp=interleaved_1f1b",
            "4 layers",
            "4 x 2 pipeline stages",
            allowed=("pp of size 2 or less",),
            write="pp=1f1b",
        ),
        id="layers-of-virtual-stages",
    ),
    pytest.param(
        ["mesh=1x1x4", "pp=interleaved_1f1b"],
        Told(
            "mesh=1x1x4 with model=llama and pp=interleaved_1f1b",
            "4 layers",
            allowed=("one stage per rank",),
            write="pp=1f1b",
        ),
        id="layers-of-a-schedule-with-virtual-stages",
    ),
    pytest.param(
        ["mesh=1x1x2", "pp=looped_bfs", "pp.virtual_stages=5"],
        Told("mesh=1x1x2 with model=llama and pp=looped_bfs", "4 layers", "2 x 5 pipeline stages"),
        id="layers-of-many-virtual-stages",
    ),
    pytest.param(
        ["mesh=1x1x2", "pp=1f1b", "pp.virtual_stages=2"],
        Told(
            "pp.virtual_stages=2 with pp.schedule=1f1b",
            "1f1b",
            "exactly 1 stage",
            allowed="pp.virtual_stages=1",
            write="pp.virtual_stages=1",
        ),
        id="virtual-stages",
    ),
    pytest.param(
        ["mesh=1x1x4", "pp=1f1b", "pp.microbatches=2"],
        Told(
            "pp.microbatches=2 with pp.schedule=1f1b",
            "1f1b",
            "stages",
            "4",
            allowed="pp.microbatches of 4 or more",
            write="pp.microbatches=4",
        ),
        id="microbatches-of-a-schedule",
    ),
    pytest.param(
        ["mesh=1x1x4", "pp=1f1b", "data.microbatches=2"],
        Told(
            "data.microbatches=2 with pp.schedule=1f1b",
            "1f1b",
            "stages",
            "4",
            allowed="data.microbatches of 4 or more",
            write="data.microbatches=4",
        ),
        id="microbatches-of-a-schedule-by-the-other-key",
    ),
    pytest.param(
        ["mesh=2x1x2", "pp.microbatches=3"],
        Told(
            "pp.microbatches=3",
            "8 sequences",
            "3 equal microbatches",
            "data.batch_size=16",
            "2 data parallel ranks",
            allowed="pp.microbatches of 1, 2, 4, 8",
            write="pp.microbatches=2",
        ),
        id="microbatches-of-a-batch",
    ),
    pytest.param(
        ["mesh=1x1x2", "data.microbatches=3"],
        Told(
            "data.microbatches=3",
            "16 sequences",
            "3 equal microbatches",
            "data.batch_size=16",
            "1 data parallel rank",
            allowed="data.microbatches of 1, 2, 4, 8, 16",
            write="data.microbatches=2",
        ),
        id="microbatches-of-a-batch-by-the-other-key",
    ),
    pytest.param(
        ["mesh=2x1x2", "pp=1f1b", "pp.microbatches=8", "data.microbatches=4"],
        Told(
            "pp.microbatches=8",
            "2 sequences",
            "8 equal microbatches",
            "data.batch_size=16",
            "2 data parallel ranks",
            "4 accumulated batches",
            allowed="pp.microbatches of 2",
            write="pp.microbatches=2",
        ),
        id="microbatches-of-an-accumulated-batch",
    ),
    pytest.param(
        ["mesh=2x1x2", "pp.microbatches=2", "data.microbatches=3"],
        Told(
            "data.batch_size=16",
            "16 sequences",
            "2 data parallel ranks",
            "3 microbatches",
            allowed="multiples of 2 x 3 = 6",
            write="data.batch_size=12 or data.batch_size=18",
        ),
        id="accumulation-beside-microbatches",
    ),
    pytest.param(
        ["mesh=2x1x4", "pp=1f1b", "data.batch_size=6"],
        Told(
            "data.batch_size=6 with pp.schedule=1f1b",
            "1f1b",
            "4 microbatches",
            "4 ranks of pp",
            "3 sequences",
            "data.batch_size=6",
            "2 data parallel ranks",
            allowed="data.batch_size of 8 or more, or pp.schedule=gpipe",
            write="data.batch_size=8",
        ),
        id="batch-too-small",
    ),
    pytest.param(
        ["mesh=1x1x2", "pp=1f1b", "pp.schedule=absent.csv"],
        Told("pp.schedule=absent.csv", "no such file", allowed=(ALL,)),
        id="file",
    ),
    pytest.param(
        ["mesh=1x1x2", "pp=1f1b", "pp.schedule=three.csv"],
        Told("pp.schedule=three.csv", "3 rows", "2 ranks along pp"),
        id="file-for-another-mesh",
    ),
    pytest.param(
        ["mesh=1x1x2", "pp=1f1b", "pp.schedule=bad.csv"],
        Told("pp.schedule=bad.csv, row 1, column 2: 0X0", "not a step", allowed=("F, B, I or W", "0F0")),
        id="file-with-a-mistake",
    ),
    pytest.param(
        ["mesh=1x1x2", "pp.split_spec={model.layers.1: MIDDLE}"],
        Told("pp.split_spec={model.layers.1: MIDDLE}", "MIDDLE", allowed=("BEGINNING", "END")),
        id="split-point",
    ),
    pytest.param(
        ["mesh=1x1x2", "pp.split_spec=4"],
        Told("pp.split_spec=4", "where to cut", allowed=("BEGINNING", "END", "null")),
        id="split-by-number",
    ),
    pytest.param(
        ["+pp.split_spec.model.layers.1=END"],
        Told("pp.split_spec.model.layers.1", "dots", "name of a module", write="'pp.split_spec={model.layers.1: END}'"),
        id="split-with-dots",
    ),
    pytest.param(
        ["pp.split_spec={model.layers.[0-1]: END}"],
        Told(
            "pp.split_spec={model.layers.[0-1]: END}",
            "cannot read",
            write="'pp.split_spec={model.layers.\\[0-1\\]: END}'",
        ),
        id="split-by-a-pattern-in-brackets",
    ),
]


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["autolaunch"])
    for module in (across_keys, arithmetic):
        monkeypatch.setattr(module, "visible_devices", lambda accelerator: ("cpu", None))
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    return tmp_path


@pytest.mark.parametrize(("argv", "told"), one_in(2, WRONG))
def test_one_message_and_nothing_else(
    argv: list[str], told: Told | list[Told], workplace: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code = cli.run(argv)
    assert_only_told(capfd.readouterr().err, told)
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
    assert config_errors(parallel_config("2x2x2", mp="auto", pp=name)) == []


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
