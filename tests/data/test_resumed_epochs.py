"""An epoch that is gone on with in batches of another size, or over other sequences: where it ends, at which rates."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from autolaunch.data.module import TokenDataModule
from autolaunch.data.windows import Parts
from autolaunch.models.language_model import OptimizedModule
from autolaunch.tasks.optimizer_as_typed import OptimizerAsTyped
from autolaunch_strategies import MeshStrategy
from tests.data.test_loader import Numbered, SaveAt

pytestmark = pytest.mark.filterwarnings("ignore")

Step = tuple[int, int, list[int]]
"""Epoch, number of the step in the run, and its sequences."""


class Seen(OptimizedModule):
    """Keeps the steps with their rates, and after which steps it was validated."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(1, 1), {"name": "sgd", "lr": 1.0}, {"name": "linear"}, -1)
        self.steps: list[Step] = []
        self.rates: list[float] = []
        self.validated: list[int] = []

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        sequences = batch["input_ids"][:, 0].tolist()
        if self.steps and self.steps[-1][1] == self.global_step:
            self.steps[-1][2].extend(sequences)
        else:
            self.steps.append((self.current_epoch, self.global_step, sequences))
            self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        return self.model(torch.zeros(1, 1)).sum()

    def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        self.validated.append(self.global_step)


def opened(count: int, weights: tuple[tuple[int, float], ...] = ()) -> Parts:
    return Parts(Numbered(count), Numbered(1), weights=weights)


def train(
    batch_size: int,
    *callbacks: pl.Callback,
    count: int = 72,
    microbatches: int = 1,
    weights: tuple[tuple[int, float], ...] = (),
    resume: Path | None = None,
    **options: Any,
) -> Seen:
    module = Seen()
    data = TokenDataModule(partial(opened, count, weights), batch_size=batch_size, microbatches=microbatches, seed=3)
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    trainer = pl.Trainer(
        strategy=MeshStrategy("1", allow_on_resume=["batch_size", "seq_len", "data"]),
        accelerator="cpu",
        callbacks=[*callbacks, OptimizerAsTyped()],
        accumulate_grad_batches=microbatches,
        num_sanity_val_steps=0,
        **{**dict.fromkeys(quiet, False), "max_epochs": 2, **options},
    )
    trainer.fit(module, datamodule=data, ckpt_path=resume)
    return module


def of_epoch(module: Seen, epoch: int) -> list[int]:
    return [sequence for number, _, sequences in module.steps if number == epoch for sequence in sequences]


@pytest.mark.parametrize(
    ("before", "saved", "now", "left", "microbatches"),
    [
        pytest.param(6, 4, 12, 4, 1, id="larger"),
        pytest.param(6, 10, 12, 1, 2, id="larger, one step left"),
        pytest.param(12, 2, 6, 8, 2, id="smaller"),
    ],
)
def test_an_epoch_goes_on_in_batches_of_another_size(
    before: int, saved: int, now: int, left: int, microbatches: int, tmp_path: Path
) -> None:
    path, options = tmp_path / "saved", {"microbatches": microbatches, "val_check_interval": 0.5}
    first = train(before, SaveAt(saved, path), max_epochs=1, **options)
    rest = train(now, resume=path, **options)
    epoch = 72 // now
    end = saved + left + epoch
    assert [step for _, step, _ in rest.steps] == list(range(saved, end))
    assert sorted(of_epoch(first, 0)[: saved * before] + of_epoch(rest, 0)) == list(range(72))
    assert sorted(of_epoch(rest, 1)) == list(range(72))
    halves = [saved + left + half for half in (-epoch // 2, 0, epoch // 2, epoch)]
    assert rest.validated == [step for step in halves if step > saved]
    assert rest.rates == pytest.approx([1 - step / end for step in range(saved, end)])


@pytest.mark.parametrize("ended", [True, False])
def test_a_run_that_went_on_so_is_resumed_as_any_other(ended: bool, tmp_path: Path) -> None:
    train(6, SaveAt(4, tmp_path / "4"), max_steps=4)
    whole = train(12, SaveAt(6, tmp_path / "6"), resume=tmp_path / "4")
    if ended:
        train(12, SaveAt(6, tmp_path / "ended"), resume=tmp_path / "4", max_steps=6)
    rest = train(12, resume=tmp_path / ("ended" if ended else "6"))
    assert rest.steps == whole.steps[2:] and rest.rates == whole.rates[2:]
    assert rest.validated == whole.validated == [8, 14]


@pytest.mark.parametrize("weights", [False, True])
def test_other_sequences_are_gone_on_with_at_the_same_share_of_them(weights: bool, tmp_path: Path) -> None:
    """Half as many, as where they are twice as long."""
    train(6, SaveAt(4, tmp_path / "4"), weights=((24, 1.0), (48, 2.0)) if weights else ())
    rest = train(
        6, count=36, weights=((12, 1.0), (24, 2.0)) if weights else (), resume=tmp_path / "4", val_check_interval=0.5
    )
    assert [epoch for epoch, *_ in rest.steps] == [0] * 4 + [1] * 6
    assert rest.validated == [5, 8, 11, 14]
    assert rest.rates[-1] == pytest.approx(1 / 14)
    whole = train(6, count=36, weights=((12, 1.0), (24, 2.0)) if weights else ())
    assert [item[2] for item in rest.steps] == [item[2] for item in whole.steps[2:]]


@pytest.mark.parametrize("weights", [False, True])
def test_an_epoch_that_was_under_way_has_a_step_left(weights: bool, tmp_path: Path) -> None:
    """Else less than one was left: its end is trained on with some of what was seen, and validated."""
    sources = ((24, 1.0), (48, 2.0)) if weights else ()
    train(6, SaveAt(11, tmp_path / "11"), max_steps=11, weights=sources)
    rest = train(12, resume=tmp_path / "11", weights=sources)
    assert [epoch for epoch, *_ in rest.steps] == [0] + [1] * 6
    assert rest.validated == [12, 18]
    if not weights:
        assert len(set(of_epoch(rest, 0))) == 12


def test_in_the_second_epoch(tmp_path: Path) -> None:
    train(6, SaveAt(16, tmp_path / "16"), max_steps=16)
    rest = train(12, resume=tmp_path / "16")
    assert [epoch for epoch, *_ in rest.steps] == [1] * 4
    assert rest.validated == [20]


def test_between_epochs(tmp_path: Path) -> None:
    train(6, SaveAt(12, tmp_path / "12"), max_epochs=1)
    rest = train(12, resume=tmp_path / "12")
    assert [epoch for epoch, *_ in rest.steps] == [1] * 6
    assert rest.rates == pytest.approx([1 - step / 18 for step in range(12, 18)])


@pytest.mark.parametrize(("limit", "left"), [(0.5, 1), (6, 4)])
def test_epochs_that_the_trainer_shortens(limit: float, left: int, tmp_path: Path) -> None:
    """Four of six batches of 6 are two of three of 12, or of six."""
    train(6, SaveAt(4, tmp_path / "4"), max_steps=4, limit_train_batches=limit)
    rest = train(12, resume=tmp_path / "4", limit_train_batches=limit)
    assert [epoch for epoch, *_ in rest.steps].count(0) == left
    assert rest.validated == [4 + left, 4 + left + (3 if limit == 0.5 else 6)]
