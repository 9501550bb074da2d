"""Which checkpoints are kept: the best by what a validation said of them, and the newest."""

from __future__ import annotations

import os
import shutil
import signal
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
from autolaunch_strategies.checkpoint import sharded
from autolaunch_strategies.checkpoint.files import complete_checkpoints, write_manifest


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


class Breaks(pl.Callback):
    """Makes a weight infinite from the third step on."""

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        if trainer.global_step >= 3:
            torch.nn.init.constant_(pl_module.linear.bias, float("inf"))  # type: ignore[arg-type]  # a part, by its name


def trained(
    directory: Path,
    steps: int,
    interval: int,
    ckpt_path: Path | None = None,
    *further: pl.Callback,
    strategy: MeshStrategy | None = None,
    **keys: Any,
) -> Checkpoints:
    """What has kept the checkpoints of a training."""
    keys = {"mode": "min", "monitor": None, "keep_last": 2, "every_n_steps": None, "every_minutes": None, **keys}
    measured: Any = SimpleNamespace(catch_up=lambda: None, not_finite_since=None)
    checkpoints = Checkpoints(directory, keys, measured)
    trainer = pl.Trainer(
        strategy=strategy or MeshStrategy("1"), accelerator="cpu", max_steps=steps, max_epochs=-1,
        val_check_interval=interval, num_sanity_val_steps=0, limit_val_batches=1, logger=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=directory.parent,
        callbacks=[checkpoints, *further],
    )  # fmt: skip
    data = DataLoader(torch.randn(12, 2)), DataLoader(torch.randn(1, 2))
    trainer.fit(Valley(), *data, ckpt_path=ckpt_path)
    return checkpoints


def kept(directory: Path) -> list[int]:
    return sorted(int(path.stem.removeprefix("step_")) for path in directory.iterdir())


def test_weights_that_are_not_finite_take_no_other_checkpoints_place(tmp_path: Path) -> None:
    """Also where no step is logged that would tell it."""
    checkpoints = trained(tmp_path / "checkpoints", 6, 12, None, Breaks(), every_n_steps=1)
    assert kept(tmp_path / "checkpoints") == [1, 2]
    assert checkpoints.last_model_path.endswith("step_0000002.ckpt")


def test_checkpoints_of_another_run_are_not_removed(tmp_path: Path) -> None:
    """Also where this one goes on, and from another place; its own, over restarts, are."""
    directory = tmp_path / "checkpoints"
    for step in (90, 91):
        (directory / f"step_{step:07d}.ckpt").mkdir(parents=True)
        write_manifest(directory / f"step_{step:07d}.ckpt", step, "1")
    trained(directory, 3, 12, every_n_steps=1)
    assert kept(directory) == [2, 3, 90, 91]
    trained(directory, 4, 12, directory / "step_0000003.ckpt")
    assert kept(directory) == [3, 4, 90, 91]
    trained(directory, 6, 12, directory / "step_0000003.ckpt", every_n_steps=2)  # which writes 4 again
    assert kept(directory) == [4, 6, 90, 91]
    trained(tmp_path / "other", 7, 12, directory / "step_0000006.ckpt")
    assert (kept(directory), kept(tmp_path / "other")) == ([4, 6, 90, 91], [7])


@pytest.mark.parametrize("interval", [2, 3])
def test_a_save_between_validations_takes_no_place_among_the_best(tmp_path: Path, interval: int) -> None:
    """By time, by a signal or at the end: the value that lightning still shows is of other weights.

    One right before its validation, of the same step, has the value of that.
    """
    checkpoints = trained(tmp_path / "checkpoints", 11, interval, monitor="valley", every_minutes=1e-9)
    assert kept(tmp_path / "checkpoints") == [interval, 2 * interval, 11]
    assert Path(checkpoints.best_model_path).stem == f"step_{interval:07d}"


def test_leftovers_of_killed_runs_are_removed(tmp_path: Path) -> None:
    """Not those of others; and what nothing has taken the place of gets its name back."""
    for name in ("step_0000009.ckpt.writing", "step_0000008.ckpt.replaced", "others.ckpt.writing"):
        (tmp_path / name).mkdir()
    (tmp_path / "step_0000007.ckpt.replaced").mkdir()
    write_manifest(tmp_path / "step_0000007.ckpt.replaced", 7, "1")
    trained(tmp_path, 1, 12)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"step_0000007.ckpt", "step_0000001.ckpt", "others.ckpt.writing"}


def test_a_run_goes_on_from_what_was_to_be_replaced(tmp_path: Path) -> None:
    """It has its own name again, and is one of the run's; what was to be removed does not come back."""
    trained(tmp_path, 3, 12)
    replaced, removed = (tmp_path / f"step_000000{name}" for name in ("3.ckpt.replaced", "2.ckpt.removed"))
    shutil.copytree(tmp_path / "step_0000003.ckpt", removed)
    (tmp_path / "step_0000003.ckpt").rename(replaced)
    trained(tmp_path, 5, 12, complete_checkpoints(tmp_path)[-1])
    assert kept(tmp_path) == [3, 5]


class Ends(pl.Callback):
    """Training ends after the third step, at a signal, a failure or by itself, when the disk is full."""

    def __init__(self, by: str, patch: pytest.MonkeyPatch) -> None:
        self.by, self.patch = by, patch

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 3:
            trainer.strategy.checkpoints.finish()
            self.patch.setattr(sharded, "write_manifest", full)
            if self.by == "a failure":
                raise ValueError("wrong")
            if self.by == "a signal":
                os.kill(os.getpid(), signal.SIGTERM)


def full(*args: Any) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("by", ["a signal", "a failure", "itself"])
@pytest.mark.filterwarnings("ignore:.*could not write")
def test_what_is_not_written_in_the_background_is_not_said_to_be(
    by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy = MeshStrategy("1", asynchronous_checkpoints=True)
    strategy.stop_signals = (signal.SIGTERM,)
    ends = Ends(by, monkeypatch)
    with pytest.raises(ValueError if by == "a failure" else RuntimeError) as ended:
        trained(tmp_path, 4 if by == "itself" else 9, 12, None, ends, strategy=strategy, every_n_steps=2, keep_last=1)
    told = "\n".join([str(ended.value), *ended.value.__notes__])
    assert "No space left on device" in told and "saved" not in told
    (newest,) = complete_checkpoints(tmp_path)
    assert newest.name == "step_0000002.ckpt" and f"the newest whole checkpoint is {newest}" in told
