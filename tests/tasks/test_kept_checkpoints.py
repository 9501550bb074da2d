"""Which checkpoints are kept: the best by what a validation said of them, and the newest."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from autolaunch.tasks.checkpoints import Checkpoints
from autolaunch_strategies import MeshStrategy


class Valley(pl.LightningModule):
    """Worse after each validation."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.linear(batch).square().mean()

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("valley", float(self.global_step))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("interval", [2, 3])
def test_a_save_between_validations_takes_no_place_among_the_best(tmp_path: Path, interval: int) -> None:
    """By time, by a signal or at the end: the value that lightning still shows is of other weights.

    One right before its validation, of the same step, has the value of that.
    """
    keys = {"mode": "min", "monitor": "valley", "keep_last": 2, "every_n_steps": None, "every_minutes": 1e-9}
    steps: Any = SimpleNamespace(catch_up=lambda: None, not_finite_since=None)
    checkpoints = Checkpoints(tmp_path / "checkpoints", keys, steps)
    trainer = pl.Trainer(
        strategy=MeshStrategy("1"), accelerator="cpu", max_steps=11, val_check_interval=interval,
        num_sanity_val_steps=0, limit_val_batches=1, logger=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=tmp_path, callbacks=[checkpoints],
    )  # fmt: skip
    trainer.fit(Valley(), DataLoader(torch.randn(12, 2)), DataLoader(torch.randn(1, 2)))
    kept = sorted(int(path.stem.removeprefix("step_")) for path in (tmp_path / "checkpoints").iterdir())
    assert kept == [interval, 2 * interval, 11]
    assert Path(checkpoints.best_model_path).stem == f"step_{interval:07d}"
