"""What a checkpoint says of the run that wrote it, and what a run that goes on from it is told or refused."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from autolaunch_strategies import ConfigError, MeshStrategy
from autolaunch_strategies.checkpoint.files import MANIFEST, complete_checkpoints, read_manifest, write_manifest
from autolaunch_strategies.checkpoint.record import changes, record_of, told
from autolaunch_strategies.mesh.process_group import leave_process_group
from tests.lightning.modules import AutoEncoder
from tests.support.messages import assert_told


@pytest.fixture(scope="module", autouse=True)
def process_group() -> Iterator[None]:
    """Trainers of this file leave no process group to those of other files."""
    yield
    leave_process_group()


def test_nested_changes_are_told_part_by_part() -> None:
    there = {"model": {"width": 3, "rope": {"theta": 1e4, "scale": 2}, "old": 1}, "seed": 0, "gone": 1}
    here = {"model": {"width": 3, "rope": {"theta": 5e5, "scale": 2}}, "seed": 0, "new": 2}
    assert changes(there, here) == {
        "model": "rope.theta 10000.0 there, 500000.0 here; old 1 there, not said here",
    }
    assert changes(there, there) == {}
    assert changes({}, here) == {}


def test_what_is_told(tmp_path: Path) -> None:
    there, here = (
        {"seed": 0, "seq_len": 8, "optimizer.lr": 1.0},
        {"seed": 1, "seq_len": 8, "optimizer.lr": 0.5, "data": {}},
    )
    assert list(told(tmp_path, there, here, ["seed", "seq_len"])) == [
        f"{tmp_path} does not say which data it was written with: that could not be compared",
        f"going on with another seed (0 there, 1 here) than {tmp_path}, as allowed",
        f"going on with another optimizer.lr (1.0 there, 0.5 here) than {tmp_path}",
        f"allowed to be another, but the same as in {tmp_path}: seq_len",
    ]
    assert list(told(tmp_path, there, there, [])) == []


@pytest.mark.parametrize("run", ['"x"', "[]", "null", "3"])
def test_a_record_that_is_none(run: str, tmp_path: Path) -> None:
    (tmp_path / "meta.pt").write_bytes(b"x")
    write_manifest(tmp_path, 3, "1", run={"seed": 1})
    assert record_of(tmp_path) == {"seed": 1}
    text = (tmp_path / MANIFEST).read_text()
    (tmp_path / MANIFEST).write_text(json.dumps({**json.loads(text), "run": json.loads(run)}))
    assert record_of(tmp_path) == {}


# --- in scripts ----------------------------------------------------------------------------------------------------


class WithSGD(AutoEncoder):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def batches(size: int = 4) -> DataLoader:
    generator = torch.Generator().manual_seed(0)
    return DataLoader(TensorDataset(torch.randn(24, 16, generator=generator), torch.zeros(24)), batch_size=size)


def trainer(steps: int, accumulate: int = 1, **strategy: Any) -> pl.Trainer:
    return pl.Trainer(
        strategy=MeshStrategy("1", **strategy), accelerator="cpu", max_steps=steps, logger=False,
        accumulate_grad_batches=accumulate, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("record") / "two.ckpt"
    run = trainer(2, recorded={"seed": 3, "data": {"version": 1}, "precision": "32-true"})
    run.fit(AutoEncoder(), batches())
    run.save_checkpoint(path)
    return path


def test_the_manifest_says_which_run_it_was(saved: Path) -> None:
    assert record_of(saved) == {
        "seed": 3, "data": {"version": 1}, "precision": "32-true", "optimizer": "torch.optim.Adam", "batch_size": 4,
    }  # fmt: skip
    assert json.loads((saved / MANIFEST).read_text())["written"] > 1.7e9


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [item.getMessage() for item in caplog.records if item.name == "autolaunch_strategies.lightning.checkpoints"]


def refused(saved: Path, module: pl.LightningModule, data: DataLoader, **options: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        trainer(4, **options).fit(module, data, ckpt_path=str(saved))
    return caught.value


def test_another_optimizer_is_refused(saved: Path) -> None:
    assert_told(
        refused(saved, WithSGD(), batches()),
        f"ckpt_path={saved}", "optimizer (torch.optim.Adam there, torch.optim.SGD here)",
        write="resume.allow=[optimizer], in a script MeshStrategy(allow_on_resume=['optimizer'])",
    )  # fmt: skip


@pytest.mark.parametrize(("size", "accumulate", "here"), [(8, 1, 8), (4, 3, 12)])
def test_another_batch_size_is_refused(size: int, accumulate: int, here: int, saved: Path) -> None:
    error = refused(saved, AutoEncoder(), batches(size), accumulate=accumulate)
    line = "resume.allow=[batch_size], in a script MeshStrategy(allow_on_resume=['batch_size'])"
    assert_told(error, f"ckpt_path={saved}", f"batch_size (4 there, {here} here)", write=line)


def test_the_same_batch_in_other_parts_goes_on_between_epochs(saved: Path) -> None:
    data = batches(2)
    with pytest.raises(ConfigError, match="draws other samples"):  # in the middle of an epoch
        trainer(4, accumulate=2).fit(AutoEncoder(), data, ckpt_path=str(saved))
    run = trainer(4, accumulate=2, data_position="start_over")
    run.fit(AutoEncoder(), data, ckpt_path=str(saved))
    assert run.global_step == 4


def test_what_a_script_records_is_compared_too(saved: Path) -> None:
    error = refused(saved, WithSGD(), batches(), recorded={"seed": 4, "data": {"version": 2}})
    assert_told(error, f"ckpt_path={saved}", "seed (3 there, 4 here)", "version 1 there, 2 here", write=None)
    assert error.write.startswith("resume.allow=[optimizer,seed,data], ")


def test_what_is_allowed_goes_on_and_is_told(saved: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = trainer(4, allow_on_resume=["optimizer", "seed"], recorded={"seed": 3, "precision": "bf16-true"})
    module = WithSGD()
    with caplog.at_level(logging.INFO, "autolaunch_strategies.lightning.checkpoints"):
        run.fit(module, batches(), ckpt_path=str(saved))
    assert run.global_step == 4
    lines = said(caplog)
    assert len(lines) == 3
    assert "as allowed; the optimizer begins without state" in lines[0]
    assert "precision (32-true there, bf16-true here)" in lines[1]
    assert lines[2].endswith(": seed")
    state = next(iter(run.optimizers[0].state.values()))
    assert set(state) == {"momentum_buffer"}


def test_a_checkpoint_without_a_record_goes_on_with_one_line(
    saved: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = trainer(2)
    run.fit(AutoEncoder(), batches())
    run.save_checkpoint(path := tmp_path / "old.ckpt")
    manifest = json.loads((path / MANIFEST).read_text())
    (path / MANIFEST).write_text(json.dumps({key: manifest[key] for key in ("step", "mesh", "files")} | {"format": 2}))
    with caplog.at_level(logging.INFO, "autolaunch_strategies.lightning.checkpoints"):
        trainer(4).fit(WithSGD(), batches(), ckpt_path=str(path))
    assert said(caplog) == [f"{path} does not say which optimizer it was written with: that could not be compared"]


def test_only_training_is_compared(saved: Path) -> None:
    trainer(4).validate(WithSGD(), batches(8), ckpt_path=str(saved), verbose=False)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        MeshStrategy("1", allow_on_resume=["optimiser"])
    assert_told(caught.value, "allow_on_resume=['optimiser']", write="MeshStrategy(allow_on_resume=['optimizer'])")
    with pytest.raises(ConfigError, match="no plain data"):
        MeshStrategy("1", recorded={"data": object()})


def test_a_clock_that_is_behind_does_not_put_new_checkpoints_behind_old_ones(saved: Path, tmp_path: Path) -> None:
    ahead = read_manifest(saved)["written"] + 3600
    run = trainer(2)
    run.fit(AutoEncoder(), batches())
    run.save_checkpoint(first := tmp_path / "first.ckpt")
    write_manifest(first, 2, "1", written=ahead)
    run = trainer(3)
    run.fit(AutoEncoder(), batches(), ckpt_path=str(first))
    run.save_checkpoint(second := tmp_path / "a-second.ckpt")
    assert complete_checkpoints(tmp_path) == [first, second]


class Thaws(pl.callbacks.BaseFinetuning):
    def freeze_before_training(self, pl_module: pl.LightningModule) -> None:
        self.freeze(pl_module.encoder)

    def finetune_function(self, pl_module: pl.LightningModule, epoch: int, optimizer: torch.optim.Optimizer) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.encoder, optimizer)


class Thawed(AutoEncoder):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(item for item in self.parameters() if item.requires_grad)


def test_groups_that_a_file_of_plain_lightning_does_not_name_are_told(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
        "enable_model_summary": False, "max_epochs": 2,
    }  # fmt: skip
    plain = pl.Trainer(devices=1, callbacks=Thaws(), **options)
    plain.fit(Thawed(), batches())
    plain.save_checkpoint(tmp_path / "plain.ckpt")
    again = pl.Trainer(strategy=MeshStrategy("1"), callbacks=Thaws(), **{**options, "max_epochs": 3})
    with pytest.raises(ConfigError, match=r"more parameters of optimizer 0.*a callback added groups"):
        again.fit(Thawed(), batches(), ckpt_path=str(tmp_path / "plain.ckpt"), weights_only=False)
