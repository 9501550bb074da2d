"""Searches whose trials really run, in processes of their own: two ranks from end to end, and faults as they happen."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from autolaunch import launch
from autolaunch.command_line import parse
from autolaunch.compose import compose
from autolaunch.jobs import resolve_job
from autolaunch.search.leftovers import contained
from autolaunch.search.outcome import read_outcome
from autolaunch.sweep import JobEnd
from autolaunch_strategies.planner.trials import HANG
from tests import ROOT

SMALL = ["data=synthetic", "data.seq_len=16", "trainer.accelerator=cpu"]
FAULTY = ["model=custom", "model._target_=search_faulty_model.Faulty"]

pytestmark = pytest.mark.timeout(400)


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    path = os.pathsep.join(str(ROOT / name) for name in ("launcher", "strategies", "tests"))
    own = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(tmp_path / "cache"), "COLUMNS": "150"}
    return os.environ | own


def autolaunch(environment: dict[str, str], directory: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "autolaunch", *argv]
    return subprocess.run(command, env=environment, cwd=directory, capture_output=True, text=True, timeout=360)


def results(directory: Path) -> list[dict[str, str]]:
    with (directory / "out" / "results.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_two_ranks(environment: dict[str, str], tmp_path: Path) -> None:
    """Ways to use two ranks; then the best, as it was typed, for two steps."""
    typed = ["-m", "search=auto", "mesh=2,1x2", "recompute=none", "data.microbatches=1", "output_dir=out"]
    typed += ["trainer.max_steps=2", "search.trials=3", "search.rounds=2", "search.noise=0.5", *SMALL]
    end = autolaunch(environment, tmp_path, *typed)
    assert end.returncode == 0, end.stdout + end.stderr
    rows = results(tmp_path)
    assert {row["status"] for row in rows} == {"measured"}, rows
    # The third is left out where the machine's figures say that it cannot win.
    assert len({row["overrides"] for row in rows}) in (2, 3)
    assert all(float(row["measured_s"]) > 0 and float(row["predicted_s"]) > 0 for row in rows)
    assert all(row["steps"] == ("3" if row["round"] == "0" else "6") for row in rows)
    again = autolaunch(environment, tmp_path, *typed)
    assert again.returncode == 0 and "trials are known from before" in again.stdout
    assert results(tmp_path) == rows
    assert len(list((tmp_path / "out" / "trials").iterdir())) == len(rows)
    best = autolaunch(environment, tmp_path, "experiment=out/best.yaml", "output_dir=run", "checkpoint.enabled=false")
    assert best.returncode == 0, best.stdout + best.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["steps"], summary["world_size"], summary["status"]) == (2, 2, "finished")


def test_faults(environment: dict[str, str], tmp_path: Path) -> None:
    """Of one rank's five ways to cut its batch four go wrong, each in its own manner; the fifth is found."""
    faults = {"16": "killed", "8": "nan", "4": "crash", "2": "memory"}
    typed = ["-m", "search=auto", "mesh=1", "recompute=none", "data.microbatches=1,2,4,8,16", "output_dir=out"]
    typed += ["search.trials=5", "search.rounds=1", "search.steps=2", *SMALL, *FAULTY]
    end = autolaunch(environment | {"FAULTS": json.dumps(faults)}, tmp_path, *typed)
    assert end.returncode == 0, end.stdout + end.stderr
    rows = results(tmp_path)
    said = {row["overrides"].split("data.microbatches=")[1]: (row["status"], row["reason"]) for row in rows}
    assert said["16"][0] == "measured"
    expected = {
        "1": ("out of memory", "killed by SIGKILL"),
        "2": ("not a number", "is nan"),
        "4": ("crash", "ValueError: boom"),
        "8": ("out of memory", "CUDA out of memory"),
    }
    for number, (status, words) in expected.items():
        assert said[number][0] == status and words in said[number][1], said
        assert said[number][1] in end.stdout
    statuses = [row["status"] for row in rows]
    assert (statuses.count("not a number"), statuses.count("crash"), len(rows)) == (2, 2, 7)
    assert "run the best:" in end.stdout


def test_a_hang_leaves_nothing_behind(
    environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PYTHONPATH", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, environment[name])
    monkeypatch.setenv("FAULTS", '{"16": "hang"}')
    monkeypatch.syspath_prepend(str(ROOT / "tests"))
    composed = compose(parse(["mesh=1", *SMALL, *FAULTY, "trainer.max_steps=9", "checkpoint.enabled=false"]))
    job = resolve_job(composed.config, composed.config.hydra, tmp_path)
    job.config["search"] = {"name": "auto", "timeout": 25.0}
    started = time.monotonic()
    with contained():
        end = launch.run(job, isolated=True)
    assert 25 <= time.monotonic() - started < 55
    assert (end.status, end.exit_code) == ("timed_out", 1)
    assert end.message.startswith("not over after 25 s (search.timeout)\nwhere rank 0 is:\n")
    assert "go_wrong" in end.message
    JobEnd(0, [], end.status, end.exit_code, str(tmp_path), end.message).write()
    outcome = read_outcome(tmp_path, 7)
    assert (outcome.status, outcome.reason) == (HANG, "not over after 25 s (search.timeout)")
    assert not left_over()


def left_over() -> list[str]:
    """Command lines of processes that a hanging trial has started."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = entry.read_bytes().split(b"\0")
        except OSError:
            continue
        if b"left over of a trial" in words:
            found.append(b" ".join(words).decode())
    return found
