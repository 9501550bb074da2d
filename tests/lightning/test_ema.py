"""The moving average of weights beside what it is by its formula; `feature_cases.py` has it on every mesh."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from autolaunch_strategies import EMA, ConfigError, MeshStrategy


class Two(pl.LightningModule):
    """Two models, whose optimizers make their steps in turn; the weights after each step are kept."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.one, self.other = nn.Linear(4, 1), nn.Linear(4, 1)
        self.course: dict[str, list[torch.Tensor]] = {"one": [], "other": []}

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        optimizers: Any = self.optimizers()
        for name, optimizer in zip(self.course, optimizers, strict=True):
            optimizer.zero_grad()
            self.manual_backward(getattr(self, name)(batch).square().mean())
            optimizer.step()
            self.course[name].append(getattr(self, name).weight.detach().clone())

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        pass

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(model.parameters(), lr=0.1) for model in (self.one, self.other)]


def trained(directory: Path, epochs: int, path: Path | None = None) -> tuple[pl.Trainer, Two]:
    torch.manual_seed(1)
    module = Two()
    trainer = pl.Trainer(
        strategy=MeshStrategy("1"), accelerator="cpu", max_epochs=epochs, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=directory,
        callbacks=[EMA(decay=0.5, every_n_steps=2, start_step=3), Saves(directory)],
    )  # fmt: skip
    batches = torch.randn(7, 4, generator=torch.Generator().manual_seed(2))
    trainer.fit(module, DataLoader(list(batches)), ckpt_path=path)
    return trainer, module


class Saves(pl.Callback):
    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.save_checkpoint(self.directory / f"{trainer.current_epoch}.ckpt")


def test_each_of_several_optimizers_counts_its_own_steps(tmp_path: Path) -> None:
    """And goes on counting: the second epoch begins with a step of another parity."""
    _, module = trained(tmp_path, 2)
    for name, course in module.course.items():
        assert len(course) == 14
        average = course[4]
        for weight in course[6::2]:
            average = 0.5 * average + 0.5 * weight
        torch.testing.assert_close(getattr(module, name).weight, average)
    _, again = trained(tmp_path, 2, tmp_path / "0.ckpt")
    for name in module.course:
        torch.testing.assert_close(getattr(again, name).weight, getattr(module, name).weight)


def test_a_checkpoint_that_is_saved_when_training_has_ended_has_the_trained_weights_too(tmp_path: Path) -> None:
    """As in a script, and after a validation, whose weights are the averages already."""
    trainer, module = trained(tmp_path, 1)
    averages = [parameter.detach().clone() for parameter in module.parameters()]
    trainer.validate(module, DataLoader(list(torch.randn(2, 4))), verbose=False)
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    torch.testing.assert_close(list(module.parameters()), averages)
    _, again = trained(tmp_path, 2, tmp_path / "end.ckpt")
    _, straight = trained(tmp_path, 2)
    for name in module.course:
        torch.testing.assert_close(again.course[name], straight.course[name][7:])
        torch.testing.assert_close(getattr(again, name).weight, getattr(straight, name).weight)


class Fits(pl.LightningModule):
    def __init__(self, kind: type[torch.optim.Optimizer]) -> None:
        super().__init__()
        self.linear, self.kind = nn.Linear(4, 1), kind

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.linear(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return self.kind(self.linear.parameters(), lr=0.1)


@pytest.mark.parametrize("callbacks", [[], [EMA(decay=0.5)]])
def test_another_optimizer_does_not_go_on_from_the_averages(tmp_path: Path, callbacks: list[Any]) -> None:
    """The trained weights are in the state of the optimizer that it does not take up."""
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}

    def fit(kind: Any, epochs: int, callbacks: list[Any], path: Path | None = None) -> None:
        trainer = pl.Trainer(
            strategy=MeshStrategy("1", allow_on_resume=["optimizer"]), accelerator="cpu", max_epochs=epochs,
            enable_model_summary=False, callbacks=callbacks, **quiet,
        )  # fmt: skip
        trainer.fit(Fits(kind), DataLoader(list(torch.randn(6, 4))), ckpt_path=path)

    fit(torch.optim.SGD, 1, [EMA(decay=0.5), Saves(tmp_path)])
    with pytest.raises(ConfigError, match="holds averaged weights; those that were trained are with the state"):
        fit(torch.optim.Adam, 2, callbacks, tmp_path / "0.ckpt")


class StepsOfItsBase(torch.optim.SGD):
    """Torch runs the hooks of such an optimizer twice for a step, once there has been one of the base class."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def test_a_step_counts_once_where_a_class_calls_that_of_its_base() -> None:
    averages = []
    for kind in (torch.optim.SGD, StepsOfItsBase):
        pl.seed_everything(1, verbose=False)
        module = Fits(kind)
        trainer = pl.Trainer(
            accelerator="cpu", strategy=MeshStrategy(mesh="1"), callbacks=[EMA(decay=0.5)], max_steps=4, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(module, DataLoader(list(torch.randn(4, 4))))
        averages.append(module.linear.weight.detach().clone())
    torch.testing.assert_close(*averages)
