"""The number by which a sweeper compares jobs: any that they have logged, by default what the swept keys change."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from autolaunch import cli
from autolaunch.job import ResolvedJob
from autolaunch.jobs import start
from autolaunch.jobs.objective import objective_of, value_for_sweeper
from autolaunch.launch.end import RunEnd
from autolaunch_strategies.config import ConfigError
from tests.support.messages import Told, assert_only_told

ROWS = "step,loss,lr,step_time_s,val_loss,accuracy\n1,3.0,0.1,9.0,,\n2,2.0,0.1,9.0,2.5,0.25\n3,1.0,0.1,9.0,,\n"
SUMMARY = {"status": "finished", "loss": 1.0, "step_time_s": 0.5, "tokens_per_second": None}


def _job(directory: Path, rows: str = ROWS) -> Path:
    directory.mkdir()
    (directory / "metrics.csv").write_text(rows)
    (directory / "summary.json").write_text(json.dumps(SUMMARY))
    return directory


@pytest.mark.parametrize(
    ("search", "swept", "expected"),
    [
        ({}, ["optimizer.lr"], 2.5),
        ({}, ["mesh", "optimizer.lr"], 2.5),
        ({}, ["data.batch_size"], 2.5),
        ({}, [], 2.5),
        ({}, ["mesh", "mp.plan", "recompute", "data.microbatches"], 0.5),
        ({"objective": "step_time_s"}, ["optimizer.lr"], 0.5),
        ({"objective": "accuracy", "direction": "maximize"}, ["mesh"], 0.25),
    ],
)
def test_what_jobs_are_compared_by(search: dict[str, str], swept: list[str], expected: float, tmp_path: Path) -> None:
    objective_of(search, swept).write(tmp_path)
    assert value_for_sweeper(tmp_path, _job(tmp_path / "0"), 0) == expected
    worst = -math.inf if "direction" in search else math.inf
    assert value_for_sweeper(tmp_path, tmp_path / "0", 1) == worst


def test_without_validation_it_is_the_loss_of_training_for_all_jobs(tmp_path: Path) -> None:
    objective_of(None, ["optimizer.lr"]).write(tmp_path)
    rows = ROWS.replace("val_loss", "other")
    assert value_for_sweeper(tmp_path, _job(tmp_path / "0", rows), 0) == 1.0
    assert value_for_sweeper(tmp_path, _job(tmp_path / "1"), 0) == 1.0
    assert value_for_sweeper(tmp_path, _job(tmp_path / "2", ROWS.replace("1.0", "nan")), 0) == 1.0
    objective_of({"objective": "val_los"}, []).write(tmp_path)
    with pytest.raises(ConfigError) as error:
        value_for_sweeper(tmp_path, tmp_path / "1", 0)
    told = Told("search.objective=val_los", "did you mean val_loss", write="search.objective=val_loss")
    assert_only_told(error.value, told)


def test_optuna_looks_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    import yaml

    def trained(job: ResolvedJob, *, isolated: bool = False) -> RunEnd:
        lr = job.config["optimizer"]["lr"]
        rows = f"step,loss,val_loss,accuracy\n1,9,{(lr - 0.5) ** 2},{(lr - 0.5) ** 2}\n"
        (job.output_dir / "metrics.csv").write_text(rows)
        (job.output_dir / "summary.json").write_text(json.dumps({"status": "finished", "step_time_s": lr}))
        return RunEnd("finished", 0)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["autolaunch"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(start, "run", trained)
    line = ["-m", "search=optuna", "optimizer.lr=0.1,0.5,0.9", "hydra.sweeper.n_trials=3"]
    grid = "hydra/sweeper/sampler=grid"
    best: Callable[[str], float] = lambda name: yaml.safe_load(  # noqa: E731  # one expression, used twice
        Path(name, "optimization_results.yaml").read_text()
    )["best_params"]["optimizer.lr"]
    assert cli.run([*line, grid, "output_dir=a"]) == 0
    assert "minimize the validation loss" in capfd.readouterr().err
    assert best("a") == 0.5
    assert cli.run([*line, grid, "output_dir=b", "search.objective=accuracy", "search.direction=maximize"]) == 0
    assert best("b") in (0.1, 0.9)
    capfd.readouterr()
    assert cli.run([*line, grid, "output_dir=c", "search.objective=f1"]) == 2
    _, where, message = capfd.readouterr().err.partition("search.objective=f1")  # behind what Optuna says
    assert_only_told(
        where + message, Told("search.objective=f1", "logged", allowed="step, loss, val_loss, accuracy, step_time_s")
    )
    assert cli.run(["-m", "search=auto", "search.objective=loss", "output_dir=d"]) == 2
    assert_only_told(capfd.readouterr().err, Told("search.objective=loss", "fastest", write="search.objective=null"))
