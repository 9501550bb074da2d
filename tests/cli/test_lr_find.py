"""`autolaunch lr_find`: the curve of one process on every mesh, a suggestion, and nothing else that is kept."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch import LightningModule

from autolaunch.cli import run
from autolaunch.tasks.lr_find import RisingRates, suggestion
from autolaunch_strategies.config import ConfigError
from tests.support.commands import Commands, Run
from tests.support.messages import Told, assert_only_told

pytestmark = pytest.mark.timeout(400)


def test_the_rate_where_the_loss_falls_fastest_is_suggested() -> None:
    rates = [10 ** (power / 10) for power in range(-60, 1)]
    curve = [3 - math.tanh(math.log10(rate) + 3) + 100 * max(0.0, rate - 0.3) for rate in rates]
    assert suggestion(rates, curve) == pytest.approx(1e-3)
    assert suggestion(rates, [*curve[:50], math.nan]) == pytest.approx(1e-3)
    assert suggestion(rates, [1.0 + rate for rate in rates]) is None
    assert suggestion(rates, curve[:2]) is None


def test_keys_that_have_no_effect_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    always = [f"output_dir={tmp_path / 'run'}", "trainer.accelerator=cpu"]
    assert run([*always, "lr_find.steps=5"]) == 2
    assert_only_told(
        capsys.readouterr().err, Told("lr_find.steps=5", "fit", allowed="the line without it; autolaunch lr_find")
    )
    assert run(["lr_find", *always, "lr_find.max=1e-9"]) == 2
    assert_only_told(capsys.readouterr().err, Told("lr_find.max=1e-9", "lr_find.min=1e-06", allowed="a larger rate"))


def test_a_step_that_tells_no_loss_is_refused() -> None:
    """As one that optimizes by hand may be."""
    measured: Any = SimpleNamespace(latest=SimpleNamespace(loss=None))
    trainer: Any = SimpleNamespace(global_step=1)
    with pytest.raises(ConfigError, match="training_step of LightningModule has returned no loss"):
        RisingRates(1e-3, 1.0, 10, measured).on_train_batch_end(trainer, LightningModule(), None, None, 0)


def _curve(run: Run) -> list[dict[str, float]]:
    with (run.directory / "lr_find.csv").open(newline="") as file:
        return [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]


@pytest.mark.every  # half a minute; a line of docs/running.md is in full
def test_the_curve_is_that_of_one_process_on_every_mesh(tmp_path: Path) -> None:
    command = Commands(
        tmp_path,
        *("model.num_layers=2", "model.hidden_size=32", "model.intermediate_size=64", "model.num_heads=4"),
        *("model.num_kv_heads=2", "data=synthetic", "data.seq_len=16", "data.batch_size=12", "data.microbatches=2"),
        *("lr_find.min=1e-4", "lr_find.max=10", "lr_find.steps=16", "scheduler.warmup_steps=3"),
        *("trainer.accelerator=cpu", "optimizer=sgd", "trainer.gradient_clip_val=null"),
    )
    alone = command("lr_find", "mesh=1")
    expected = _curve(alone)
    factor = (10 / 1e-4) ** (1 / 15)
    assert [row["lr"] for row in expected] == pytest.approx([1e-4 * factor**step for step in range(len(expected))])
    assert 8 < len(expected) <= 16 and alone.summary["suggested_lr"] > 1e-3
    assert f"optimizer.lr={alone.summary['suggested_lr']:.2g}" in alone.screen
    assert not (alone.directory / "checkpoints").exists()
    # The rates that were used are those that are written: metrics.csv has them from the optimizer itself.
    assert [row["lr"] for row in alone.rows] == pytest.approx([row["lr"] for row in expected])
    for mesh in (("mesh=3",), ("mesh=1x2",), ("mesh=1x1x2", "pp=1f1b")):
        found = command("lr_find", *mesh)
        assert found.summary["suggested_lr"] == pytest.approx(alone.summary["suggested_lr"])
        curve = _curve(found)
        assert len(curve) == len(expected)
        for row, wanted in zip(curve, expected, strict=True):
            assert row == pytest.approx(wanted, rel=1e-4)
