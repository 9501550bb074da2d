"""examples/dpo: the same training on every mesh, with a reference that was written before or an adapter that is off."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
import torch

from tests import ROOT
from tests.support.commands import Commands, assert_same_curve
from tests.support.ranks import start

pytestmark = [pytest.mark.timeout(900), pytest.mark.full]


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> Commands:
    directory = tmp_path_factory.mktemp("dpo")
    shutil.copytree(ROOT / "examples" / "dpo", directory, dirs_exist_ok=True)
    commands = Commands(
        directory,
        *("--config-dir", "conf", "experiment=dpo", "trainer.accelerator=cpu", "trainer.max_steps=4"),
        timeout=400,
    )
    made = start([sys.executable, "dpo.py", "tiny"], 120, cwd=directory, env=commands.environment)
    assert made.returncode == 0, made.stdout
    return commands


def _predicted(command: Commands) -> Path:
    return command("predict", "mesh=1x1x2", "data.batch_size=8").directory / "predictions"


@pytest.mark.every  # a minute; lines of docs/fine_tuning.md run the example every day
def test_a_reference_that_was_written_before(command: Commands) -> None:
    predicted = _predicted(command)
    parts = [torch.load(file, weights_only=True) for file in sorted(predicted.iterdir())]
    assert torch.cat([part["pair"] for part in parts]).tolist() == list(range(72))
    reference = f"data.reference={predicted}"
    alone = command("mesh=1", reference)
    # The policy is the reference before its first step.
    assert alone.rows[0]["loss"] == pytest.approx(torch.log(torch.tensor(2.0)).item(), rel=1e-5)
    for mesh in (
        ("mesh=2",),
        ("mesh=1x2",),
        ("mesh=1x1x2", "pp=1f1b", "pp.microbatches=2"),
        ("mesh=cp2",),
    ):
        assert_same_curve(command(*mesh, reference), alone)
    learned = command("mesh=1", reference, "module.beta=1", "module.lr=1e-2", "trainer.max_steps=48").rows
    first, last = (sum(row["loss"] for row in rows) / 16 for rows in (learned[:16], learned[32:]))
    assert last < first - 0.1
    without = command("mesh=1", code=1)
    assert "there is no reference" in without.screen


@pytest.mark.every  # examples/dpo itself: the reference that was written before shows the same
def test_a_reference_without_the_adapter(command: Commands) -> None:
    pytest.importorskip("peft")
    adapter = ("module.adapter=true", "module.lr=1e-2")
    alone = command("mesh=1", *adapter)
    assert alone.rows[0]["loss"] == pytest.approx(torch.log(torch.tensor(2.0)).item(), rel=1e-5)
    # With its adapter off, the model says at every step what it said before training.
    assert_same_curve(command("mesh=1", *adapter, f"data.reference={_predicted(command)}"), alone)
    for mesh in (("mesh=2",), ("mesh=1x2",)):
        assert_same_curve(command(*mesh, *adapter), alone)
