"""`autolaunch calibrate` measures, writes what the planner reads, and survives what fails while it measures."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from autolaunch import cli
from autolaunch.machine.this_machine import machine_file
from autolaunch.tasks.calibrate import job as calibrate
from autolaunch.tasks.calibrate import measure as calibration
from autolaunch_strategies.planner.constants import Constants
from autolaunch_strategies.planner.hardware import COLLECTIVES, Hardware, hardware_from
from autolaunch_strategies.planner.measure import Bench
from tests import ROOT

_FIT = ("before_fit", "after_fit")

pytestmark = pytest.mark.timeout(240)

Calibrate = Callable[[str], tuple[int, Path]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Calibrate:
    """Calibrates two ranks by a function of calibrate_cases.py; returns (exit code, output directory)."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.chdir(tmp_path)

    def start(case: str) -> tuple[int, Path]:
        monkeypatch.setattr(calibrate, "MEASURING", f"tests.tasks.calibrate_cases:{case}")
        directory = tmp_path / case
        words = ["calibrate", "cluster=localx2", f"output_dir={directory}"]
        return cli.run(words), directory

    return start


def _read(path: Path) -> Hardware:
    return hardware_from(yaml.safe_load(path.read_text(encoding="utf-8")))


@pytest.mark.every  # a minute; below all is measured but what fails
def test_what_is_measured_is_a_cluster(run: Calibrate, capsys: pytest.CaptureFixture[str]) -> None:
    code, directory = run("quick")
    assert code == 0, capsys.readouterr().err
    hardware = _read(directory / "cluster.yaml")
    assert (hardware.device, hardware.nodes, hardware.devices_per_node) == ("cpu", 1, 2)
    assert hardware.processors == len(os.sched_getaffinity(0))
    assert set(hardware.curves) == set(COLLECTIVES)
    for curves in hardware.curves.values():
        for curve in curves:
            assert curve.ranks == 2
            assert list(curve.seconds) == sorted(curve.seconds)
            assert curve.seconds[0] > 0
    assert set(hardware.flops) == {"fp32", "bf16"}
    assert 1e8 < hardware.memory_bytes_per_s < 1e12
    assert hardware.constants.kernel_s != Constants().kernel_s
    assert hardware.constants.hidden_dp < 1.01
    assert hardware.origin == "calibrated with 2 ranks and fitted to 2 trainings"
    summary = json.loads((directory / "summary.json").read_text(encoding="utf-8"))
    assert summary["status"] == "finished" and summary["failed"] == {}
    assert [row["training"] for row in summary["trainings"]] == ["dp, small batch", "dp level 3"]
    assert all(row["seconds"] > 0 for row in summary["trainings"])
    assert summary["seconds"] > sum(row["seconds"] for row in summary["trainings"])
    wrong = {key: sum(math.log(row[key] / row["seconds"]) ** 2 for row in summary["trainings"]) for key in _FIT}
    assert wrong["after_fit"] < wrong["before_fit"]

    # The same file serves as cluster=<file>, and as cluster=local from now on.
    capsys.readouterr()
    assert cli.run(["--cfg", "job", "-p", "cluster", "cluster=quick/cluster.yaml"]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert hardware_from(shown) == hardware
    assert machine_file("cpu", 2).is_file()
    assert cli.run(["--cfg", "job", "-p", "cluster", "cluster=localx2"]) == 0
    here = yaml.safe_load(capsys.readouterr().out)
    assert here["origin"] == hardware.origin
    assert hardware_from(here).curves == hardware.curves
    # With another number of ranks it is the nearest guess, and says so.
    assert cli.run(["--cfg", "job", "-p", "cluster", "cluster=localx4"]) == 0
    other = yaml.safe_load(capsys.readouterr().out)
    assert other["devices_per_node"] == 4
    assert other["origin"] == f"{hardware.origin}, and not with 4"


class _OneRank(Bench):
    def __init__(self) -> None:
        self.ranks = 1


@pytest.mark.parametrize(
    ("begun", "each", "trainings"),
    [
        (10.0, 1.0, 16),  # begins 10 s after the command; the last one may end after 26.5 s, two before the limit
        (10.0, 3.0, 5),  # a sixth would end after 28 s
        (24.0, 1.0, 8),  # slow to begin: a few seconds of trainings all the same
        (60.0, 5.0, 2),
    ],
)
def test_trainings_end_in_time(begun: float, each: float, trainings: int, monkeypatch: pytest.MonkeyPatch) -> None:
    now = begun
    monkeypatch.setattr(calibration.time, "time", lambda: now)
    clock, done = calibration._Clock(0.0, _OneRank()), 0
    while not clock.is_late():
        now, done = now + each, done + 1
    assert done == trainings


def test_one_failing_probe_leaves_the_rest(run: Calibrate, capfd: pytest.CaptureFixture[str]) -> None:
    code, directory = run("faulty")
    told = capfd.readouterr()
    assert code == 0, told.err
    text = (directory / "cluster.yaml").read_text(encoding="utf-8")
    assert "# Not measured, left as guessed: reduce_scatter: OSError: no more reductions today" in text
    assert "# Not measured, left as guessed: training dp, small batch: " in text
    hardware = _read(directory / "cluster.yaml")
    assert set(hardware.curves) == set(COLLECTIVES) - {"reduce_scatter"}
    assert hardware.origin == "calibrated with 2 ranks and fitted to 1 training"
    assert "not measured: reduce_scatter" in told.out


def test_a_rank_that_dies_is_one_message(run: Calibrate, capsys: pytest.CaptureFixture[str]) -> None:
    started = time.monotonic()
    code, directory = run("crash")
    assert code == 1
    message = capsys.readouterr().err
    assert "rank 1 of 2 failed: it left with exit code 7" in message.splitlines()[0]
    assert not (directory / "cluster.yaml").exists()
    assert not machine_file("cpu", 2).exists()
    assert time.monotonic() - started < 90


@pytest.mark.parametrize(
    ("cluster", "reason"),
    [
        ("h100x8", "cluster: h100, 1 x 8 cuda: calibrate measures the machine that it runs on"),
        ("cpu cluster.nodes=2", "cluster: cpu, 2 x 8 cpu: calibrate measures the machine that it runs on; start it on"),
    ],
)
def test_another_machine_is_refused(
    cluster: str, reason: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = f"calibrate cluster={cluster} trainer.accelerator=cpu output_dir={tmp_path / 'out'}".split()
    assert cli.run(words) != 0
    assert capsys.readouterr().err.startswith(reason)
