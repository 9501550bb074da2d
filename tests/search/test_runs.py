"""Searches whose trials really run, in processes of their own: two ranks from end to end, and faults as they happen."""

from __future__ import annotations

import csv
import json
import time
from pathlib import Path

import pytest

from autolaunch.config.command_line import parse
from autolaunch.config.compose import compose
from autolaunch.jobs import start
from autolaunch.jobs.ends import JobEnd
from autolaunch.jobs.run import resolve_job
from autolaunch.launch.containment import contained
from autolaunch.search.outcome import read_outcome
from autolaunch_strategies.planner.trials import HANG
from tests.support.commands import Commands, Run
from tests.support.ranks import environment

SMALL = ["data=synthetic", "data.seq_len=16", "trainer.accelerator=cpu"]
FAULTY = ["model=custom", "model._target_=tests.search.faulty_model.Faulty"]

pytestmark = pytest.mark.timeout(400)


def commands(directory: Path, **extra: str) -> Commands:
    """Commands with a cache of their own: what searches have measured elsewhere is not known."""
    return Commands(directory, timeout=360, XDG_CACHE_HOME=str(directory / "cache"), COLUMNS="150", **extra)


def results(run: Run) -> list[dict[str, str]]:
    with (run.directory / "results.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.full
def test_two_ranks(tmp_path: Path) -> None:
    """Two ways to use two ranks, measured twice; then the best, as it was typed, for two steps."""
    command, out = commands(tmp_path), tmp_path / "out"
    typed = ["-m", "search=auto", "mesh=2,1x2", "recompute=none", "data.microbatches=1", *SMALL]
    # No more than two are tried, and one that takes twice as long still gets into the second round.
    typed += ["trainer.max_steps=2", "search.trials=2", "search.rounds=2", "search.noise=0.99"]
    run = command(*typed, into=out)
    rows = results(run)
    assert {row["status"] for row in rows} == {"measured"}, rows
    assert "up to 2 of them are tried for 3 steps and more" in run.screen
    first, again = ([row["overrides"] for row in rows if row["round"] == number] for number in "01")
    assert len(set(first)) == len(first) == 2
    # In the second round one runs before and behind the other, or it says why there is none.
    beaten = "stopped after round 1: the next best is slower" in run.screen
    assert (len(again), set(again)) == ((0, set()) if beaten else (3, set(first)))
    assert all(float(row["measured_s"]) > 0 and float(row["predicted_s"]) > 0 for row in rows)
    assert all(row["steps"] == ("3" if row["round"] == "0" else "6") for row in rows)
    repeated = commands(tmp_path)(*typed, into=out)
    assert "2 trials are known from before" in repeated.screen
    assert results(repeated) == rows
    assert len(list((out / "trials").iterdir())) == len(rows)
    best = command(f"experiment={out / 'best.yaml'}", "checkpoint.enabled=false").summary
    assert (best["steps"], best["world_size"], best["status"]) == (2, 2, "finished")


@pytest.mark.every  # the sweeper's own tests have one every day
def test_faults(tmp_path: Path) -> None:
    """Of one rank's five ways to cut its batch four go wrong, each in its own manner; the fifth is found."""
    command = commands(tmp_path, FAULTS=json.dumps({"16": "killed", "8": "nan", "4": "crash", "2": "memory"}))
    typed = ["-m", "search=auto", "mesh=1", "recompute=none", "data.microbatches=1,2,4,8,16"]
    run = command(*typed, "search.trials=5", "search.rounds=1", "search.steps=2", *SMALL, *FAULTY)
    rows = results(run)
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
        assert said[number][1] in run.screen
    statuses = [row["status"] for row in rows]
    assert (statuses.count("not a number"), statuses.count("crash"), len(rows)) == (2, 2, 7)
    assert "run the best:" in run.screen


TIMEOUT = 12
"""Seconds that the trial which hangs is given: even a busy machine has begun its steps by then."""


@pytest.mark.full
def test_a_hang_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment(FAULTS='{"16": "hang"}').items():
        monkeypatch.setenv(name, value)
    composed = compose(parse(["mesh=1", *SMALL, *FAULTY, "trainer.max_steps=9", "checkpoint.enabled=false"]))
    job = resolve_job(composed.config, composed.config.hydra, tmp_path)
    job.config["search"] = {"name": "auto", "timeout": float(TIMEOUT)}
    started = time.monotonic()
    with contained():
        end = start.run(job, isolated=True)
    assert TIMEOUT <= time.monotonic() - started < TIMEOUT + 30
    assert (end.status, end.exit_code) == ("timed_out", 1)
    assert end.message.startswith(f"not over after {TIMEOUT} s (search.timeout)\nwhere the ranks are:\n")
    assert "go_wrong" in end.message
    JobEnd(0, [], end.status, end.exit_code, str(tmp_path), end.message).write()
    outcome = read_outcome(tmp_path, 7)
    assert (outcome.status, outcome.reason) == (HANG, f"not over after {TIMEOUT} s (search.timeout)")
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
