"""summary.json: the figures of a run."""

from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from autolaunch import cli
from autolaunch.job import ResolvedJob
from autolaunch.jobs import start
from autolaunch.launch.end import RunEnd
from autolaunch.report.metrics import StepMetrics
from autolaunch.report.metrics_csv import MetricsCsv
from autolaunch.report.summary import collect_summary
from autolaunch.report.summary_file import write_summary

KEYS = [
    "task",
    "status",
    "world_size",
    "mesh",
    "steps",
    "loss",
    "tokens_per_second",
    "step_time_s",
    "peak_memory_bytes",
    "parameters",
    "checkpoint",
    "seconds",
]


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.linear(batch).pow(2).mean()

    validation_step = training_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trainer(directory: Path, *callbacks: pl.Callback) -> pl.Trainer:
    return pl.Trainer(
        accelerator="cpu",
        max_steps=5,
        logger=False,
        callbacks=[*callbacks],
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=len(callbacks) > 1,
        default_root_dir=directory,
    )


def data() -> DataLoader[Any]:
    return DataLoader(torch.randn(20, 4), batch_size=2)


def test_a_finished_fit(tmp_path: Path) -> None:
    step_metrics = StepMetrics()
    run = trainer(tmp_path, step_metrics, ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=5))
    run.fit(Model(), data())
    summary = collect_summary(run, step_metrics, time.time(), task="fit")
    assert list(summary) == [*KEYS, "counted"]
    assert step_metrics.latest is not None
    exact = {
        "task": "fit",
        "status": "finished",
        "world_size": 1,
        "mesh": "1",
        "steps": 5,
        "loss": step_metrics.latest.loss,  # lightning's default of 50 steps between rows leaves only the last
        "parameters": 5,
        "checkpoint": str(tmp_path / "step=5.ckpt"),
        "counted": "samples",
    }
    assert {key: summary[key] for key in exact} == exact
    assert summary["peak_memory_bytes"] > 2**20
    assert min(summary["tokens_per_second"], summary["step_time_s"]) > 0
    path = write_summary(tmp_path / "run", summary)
    assert json.loads(path.read_text()) == summary
    assert [item.name for item in path.parent.iterdir()] == ["summary.json"]


def test_an_evaluation_and_a_failure(tmp_path: Path) -> None:
    run = trainer(tmp_path)
    run.validate(Model(), data(), verbose=False)
    found = collect_summary(run, None, time.time(), task="validate", metrics={"val_loss": torch.tensor(0.5)})
    assert list(found) == [*KEYS, "metrics"]
    assert (found["metrics"], found["steps"], found["loss"]) == ({"val_loss": 0.5}, 0, None)
    failed = collect_summary(run, StepMetrics(), time.time(), task="fit", status="failed", error="out of luck")
    assert (failed["status"], failed["error"], failed["step_time_s"]) == ("failed", "out of luck", None)


@pytest.mark.parametrize(
    ("losses", "are_its_own", "expected"),
    [
        pytest.param([5.5, 4.5], True, (2, 4.5), id="its-own-rows"),
        pytest.param([5.5, math.nan], True, (2, None), id="not-a-number"),
        pytest.param([5.5, None], True, (2, None), id="no-loss"),
        pytest.param([], True, (None, None), id="no-row"),
        pytest.param([5.5, 4.5], False, (None, None), id="rows-of-an-earlier-run"),
    ],
)
def test_a_first_rank_that_was_ended_before_its_summary(
    losses: list[float | None],
    are_its_own: bool,
    expected: tuple[int | None, float | None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The parent tells of the steps that metrics.csv knows: rank 0 ends with the rank that failed, at any moment."""

    def measure(directory: Path) -> None:
        file = MetricsCsv(directory)
        file.open(0)
        for step, loss in enumerate(losses, 1):
            file.begin_row(step)
            file.add({"loss": loss, "tokens": 8 * step})
        file.finalize("failed")
        with file.path.open("a") as stream:
            stream.write("3,4.")

    def run(job: ResolvedJob, *, isolated: bool = False) -> RunEnd:
        if are_its_own:
            measure(job.output_dir)
        return RunEnd("failed", 1, message="rank 1 of 2 failed: ValueError: unlucky\nlog: ...")

    monkeypatch.setattr(start, "run", run)
    monkeypatch.setattr(sys, "argv", ["autolaunch"])
    monkeypatch.chdir(tmp_path)
    if not are_its_own:
        measure(tmp_path)
    assert cli.run(["fit", "mesh=2", "trainer.accelerator=cpu", f"output_dir={tmp_path}", "ckpt_path=last"]) == 1
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert list(summary) == [*KEYS, "error", "restarts"]
    assert (summary["status"], summary["steps"], summary["loss"]) == ("failed", *expected)
    assert summary["error"] == "rank 1 of 2 failed: ValueError: unlucky"


def test_what_json_cannot_hold_becomes_null(tmp_path: Path) -> None:
    path = write_summary(tmp_path, {"loss": math.nan, "metrics": {"a": math.inf, "b": 1.5}})
    assert json.loads(path.read_text()) == {"loss": None, "metrics": {"a": None, "b": 1.5}}


@pytest.mark.parametrize(
    ("steps", "every", "expected"),
    [
        pytest.param(2, 1, 1.5, id="too-few-for-warm-up"),
        pytest.param(7, 1, 5.5, id="first-3"),
        pytest.param(100, 1, 55.5, id="first-tenth"),
        pytest.param(100, 20, 60.5, id="rows-that-touch-the-warm-up"),
    ],
)
def test_the_median_leaves_warm_up_out(steps: int, every: int, expected: float) -> None:
    """Step n takes n seconds and one token."""
    metrics = StepMetrics()
    for last in range(every, steps + 1, every):
        metrics.steps.append(last)
        metrics.steps_timed.append(every)
        metrics.seconds.append(sum(range(last - every + 1, last + 1)))
        metrics.tokens_timed.append(every)
    assert metrics.median_step_time() == expected
