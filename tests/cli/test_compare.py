"""`autolaunch compare`: equal runs are said to be, and of three planted faults it says where they sit."""

from __future__ import annotations

from pathlib import Path

import pytest

from autolaunch.cli import run
from autolaunch.report.comparison import read_run
from tests.support.commands import Commands
from tests.support.messages import Told, assert_only_told

FAULTS = """
import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import nn


class ByRank(nn.Module):
    def forward(self, x):
        return x * (1.01 if dist.is_initialized() and dist.get_rank() else 1)


class Net(pl.LightningModule):
    def __init__(self, fault=""):
        super().__init__()
        middle = ByRank() if fault == "module" else nn.Tanh()
        self.fault, self.net = fault, nn.Sequential(nn.Linear(4, 8), middle, nn.Linear(8, 1))

    def transfer_batch_to_device(self, batch, device, index):
        shift = self.fault == "data" and dist.is_initialized() and dist.get_rank()
        return {**batch, "input_ids": batch["input_ids"] + 1} if shift else batch

    def training_step(self, batch, batch_idx):
        x = batch["input_ids"].float() / 100
        loss = (self.net(x) - x.sum(1, keepdim=True)).square()
        return loss.sum() / 8 if self.fault == "sum" else loss.mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)
"""


def test_what_can_not_be_compared_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    empty = str(tmp_path / "empty")
    one = "there is one run"
    for words, told in (
        (["compare", "mesh=2"], Told("autolaunch compare mesh=2", one, write="autolaunch compare mesh=1,2x2x2")),
        (["compare", empty], Told(f"autolaunch compare {empty}", one, write="autolaunch compare mesh=1,2x2x2")),
        (["compare", empty, empty], Told(empty, "no loss in its metrics.csv", allowed="the directory of a run")),
        (
            ["compare", empty, empty, "mesh=2"],
            Told(
                "mesh=2",
                "finished runs",
                allowed="compare.tolerance=1e-4, a number",
                write=f"autolaunch compare {empty} {empty}",
            ),
        ),
        (
            ["compare", "--config-dir", empty, "mesh=2"],
            Told("autolaunch compare mesh=2", one, write="autolaunch compare mesh=1,2x2x2"),
        ),
        (["fit", "compare.steps=3"], Told("compare.steps=3", "no effect with fit", write="compare.steps=5")),
    ):
        assert run([*words, f"output_dir={tmp_path / 'run'}"] if words[0] == "fit" else words) == 2
        assert_only_told(capsys.readouterr().err, told)


@pytest.mark.full
@pytest.mark.timeout(300)
def test_equal_runs_are_equal_in_all_that_is_kept(tmp_path: Path) -> None:
    small = ("model.num_layers=2", "model.hidden_size=32", "model.intermediate_size=64", "model.num_heads=4")
    compare = Commands(
        tmp_path,
        *(*small, "model.num_kv_heads=2", "data=synthetic", "data.seq_len=16", "data.batch_size=8"),
        *("mp=seq_parallel", "pp=1f1b", "cp=ring", "recompute=full", "compare.steps=2", "trainer.accelerator=cpu"),
        timeout=240,
    )
    ended = compare("compare", "mesh=1,1x2x1x2,2x1x2")
    assert (
        "compared with mesh=1, 2 steps" in ended.screen
        and ended.screen.count(" in loss and gradient norm, and in weights") == 2
    )
    alone, *others = (read_run(ended.directory / str(number), str(number)) for number in range(3))
    outputs = set(alone.steps[0]["output"])
    for other in others:
        assert len(other.steps) == 3  # the weights after the last step, too
        for expected, found in zip(alone.steps, other.steps, strict=True):
            for kind, table in expected.items():
                # What holds parts of both stages has no output that one of them sees.
                assert table.keys() - found[kind].keys() <= ({"model", "model.model"} if kind == "output" else set())
                for name in table.keys() & found[kind].keys():
                    assert found[kind][name] == pytest.approx(table[name], rel=1e-4, abs=1e-6), (kind, name)
    assert {"model.model.embed_tokens", "model.model.layers.1.mlp.down_proj", "model.lm_head"} <= outputs
    runs = [str(ended.directory / number) for number in ("0", "1")]
    assert run(["compare", *runs]) == 0 and run(["compare", *runs, "compare.tolerance=0"]) == 1


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("fault", "place", "cause"),
    [
        ("data", "input_ids in the batch", "other data, or another order"),
        ("module", "output of net.1 (ByRank)", "ByRank computes something else"),
        ("sum", "gradient of net.2.bias", "all gradients are 0.5 times as large"),
    ],
)
def test_a_planted_fault_is_found(tmp_path: Path, fault: str, place: str, cause: str) -> None:
    (tmp_path / "faults.py").write_text(FAULTS)
    compare = Commands(
        tmp_path,
        *("module._target_=faults.Net", f"module.fault={fault}", "data=synthetic", "data.seq_len=4"),
        *("data.batch_size=8", "trainer.accelerator=cpu"),
    )
    screen = compare("compare", "mesh=1,2", "compare.steps=2", code=1).screen
    assert "mesh=2  differs at step 1" in screen
    assert f"first in: {place}" in screen and f"likely: {cause}" in screen
