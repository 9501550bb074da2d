"""Batches through a real Trainer: order, resume at any microbatch, random numbers of workers."""

from __future__ import annotations

import dataclasses
import random
from functools import partial
from itertools import chain, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn

from autolaunch.config.schema import DATA
from autolaunch.data import build_data
from autolaunch.data.loader import PositionedLoader
from autolaunch.data.module import TokenDataModule
from autolaunch.data.order import BatchOrder
from autolaunch.data.windows import Parts
from autolaunch_strategies.config import ConfigError, parallel_config
from tests.support.messages import Told, assert_only_told, assert_told

pytestmark = pytest.mark.filterwarnings("ignore")


class Numbered:
    """Sequence i is the number i, three times."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def tokens(self, indices: np.ndarray) -> np.ndarray:
        return np.repeat(indices[:, None], 3, axis=1)


class OnRank(SingleDeviceStrategy):
    """One process that takes the share of one rank of several; like MeshStrategy it restores after its setup."""

    restore_checkpoint_after_setup = True

    def __init__(self, dp_rank: int, dp_size: int) -> None:
        super().__init__("cpu")
        self.dp_rank, self.dp_size = dp_rank, dp_size


class Recorder(LightningModule):
    def __init__(self, ask_for_steps: bool = False) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.ask_for_steps = ask_for_steps
        self.batches: list[list[int]] = []
        self.validated: list[list[int]] = []
        self.predicted: list[list[int]] = []

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.ask_for_steps:
            assert self.trainer.estimated_stepping_batches > 0
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        self.batches.append(batch["input_ids"][:, 0].tolist())
        return self.weight * 1.0

    def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        self.validated.append(batch["input_ids"][:, 0].tolist())

    def predict_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        self.predicted.append(batch["input_ids"][:, 0].tolist())


class SaveAt(Callback):
    def __init__(self, step: int, path: Path) -> None:
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == self.step and not self.path.exists():
            trainer.save_checkpoint(self.path)


def open_numbered(training: int, validation: int) -> Parts:
    return Parts(Numbered(training), Numbered(validation))


def numbered_data(microbatches: int = 2, workers: int = 0, training: int = 33, validation: int = 0) -> TokenDataModule:
    """Four steps of eight sequences per epoch; one is left over."""
    return TokenDataModule(
        partial(open_numbered, training, validation),
        batch_size=8,
        microbatches=microbatches,
        seed=3,
        num_workers=workers,
    )


def train(
    steps: int,
    *,
    data: TokenDataModule | None = None,
    resume: Path | None = None,
    strategy: SingleDeviceStrategy | None = None,
    model: Recorder | None = None,
    **options: Any,
) -> Recorder:
    model = model or Recorder()
    data = data or numbered_data()
    limits = {"max_steps": steps, "max_epochs": -1, **options}
    trainer = Trainer(
        accelerator="cpu",
        strategy=strategy or "auto",
        accumulate_grad_batches=data.microbatches,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **limits,
    )
    trainer.fit(model, datamodule=data, ckpt_path=resume)
    return model


def expected(steps: range, microbatches: int = 2, dp_rank: int = 0, dp_size: int = 1) -> list[list[int]]:
    order = BatchOrder(33, 8, microbatches, 3, True, dp_rank, dp_size)
    return [order.indices(number).tolist() for number in range(steps.start * microbatches, steps.stop * microbatches)]


def test_lightning_hands_out_the_order_over_epochs() -> None:
    assert train(11).batches == expected(range(11))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    "saved",
    [
        pytest.param(3, id="within the first epoch"),
        pytest.param(4, id="at the end of the first epoch"),
        pytest.param(6, id="within the second epoch"),
        pytest.param(8, id="at the end of the second epoch"),
    ],
)
@pytest.mark.parametrize("by", ["steps", "epochs"])
def test_resume_goes_on_with_the_next_batch(tmp_path: Path, saved: int, workers: int, by: str) -> None:
    limits = {} if by == "steps" else {"max_steps": -1, "max_epochs": 3}
    checkpoint = tmp_path / "a.ckpt"
    before = train(12, data=numbered_data(workers=workers), callbacks=[SaveAt(saved, checkpoint)], **limits)
    assert before.batches == expected(range(12))
    after = train(12, data=numbered_data(workers=workers), resume=checkpoint, **limits)
    assert after.batches == expected(range(saved, 12))


@pytest.mark.parametrize(
    "end", [pytest.param({"max_steps": 4}, id="steps"), pytest.param({"max_steps": -1, "max_epochs": 1}, id="epochs")]
)
def test_resume_of_a_run_that_ended_with_an_epoch(tmp_path: Path, end: dict[str, int]) -> None:
    model, data, checkpoint = Recorder(), numbered_data(), tmp_path / "a.ckpt"

    class SaveAtEnd(Callback):
        def on_train_end(self, trainer: Trainer, *_: Any) -> None:
            trainer.save_checkpoint(checkpoint)

    train(4, model=model, data=data, callbacks=[SaveAtEnd()], **end)
    longer = {"max_epochs": 3} if "max_epochs" in end else {"max_steps": 12}
    assert train(12, resume=checkpoint, **{**end, **longer}).batches == expected(range(4, 12))


@pytest.mark.parametrize("dp_size", [1, 4])
def test_resume_on_another_dp_size(tmp_path: Path, dp_size: int) -> None:
    checkpoint = tmp_path / "a.ckpt"
    first = train(3, strategy=OnRank(1, 2), callbacks=[SaveAt(3, checkpoint)])
    assert first.batches == expected(range(3), dp_rank=1, dp_size=2)
    for rank in range(dp_size):
        resumed = train(9, strategy=OnRank(rank, dp_size), resume=checkpoint)
        assert resumed.batches == expected(range(3, 9), dp_rank=rank, dp_size=dp_size)


def test_resume_with_another_number_of_workers(tmp_path: Path) -> None:
    checkpoint = tmp_path / "a.ckpt"
    train(3, data=numbered_data(workers=2), callbacks=[SaveAt(3, checkpoint)])
    assert train(6, data=numbered_data(workers=0), resume=checkpoint).batches == expected(range(3, 6))


@pytest.mark.parametrize("workers", [0, 2])
def test_resume_when_the_loader_was_made_before_the_checkpoint_was_read(tmp_path: Path, workers: int) -> None:
    checkpoint = tmp_path / "a.ckpt"
    limits = {"max_epochs": 3}
    train(12, model=Recorder(ask_for_steps=True), callbacks=[SaveAt(3, checkpoint)], **limits)
    data = numbered_data(workers=workers)
    model = Recorder(ask_for_steps=True)
    resumed = train(12, data=data, model=model, resume=checkpoint, strategy=OnRank(0, 1), **limits)
    assert resumed.batches == expected(range(3, 12))


def test_resume_with_other_microbatches_is_refused(tmp_path: Path) -> None:
    checkpoint = tmp_path / "a.ckpt"
    train(3, callbacks=[SaveAt(3, checkpoint)])
    with pytest.raises(ConfigError) as caught:
        train(6, data=numbered_data(microbatches=4), resume=checkpoint)
    assert str(caught.value) == (
        "data.microbatches=4: the checkpoint counts its position in steps of 2 microbatches\n"
        "  allowed: the number of microbatches that the checkpoint was written with\n"
        "  write:   data.microbatches=2"
    )


@pytest.mark.parametrize(
    ("pipelined", "write"),
    [
        pytest.param(4, "data.microbatches=2 pp.microbatches=2", id="microbatches said"),
        pytest.param(None, "data.microbatches=2 pp.microbatches=3", id="microbatches chosen"),
    ],
)
def test_resume_with_a_pipeline_that_took_the_microbatches(pipelined: int | None, write: str, tmp_path: Path) -> None:
    checkpoint = tmp_path / "a.ckpt"
    train(3, callbacks=[SaveAt(3, checkpoint)])
    strategy = OnRank(0, 1)
    strategy.parallel = parallel_config("1x1x3", pp={"microbatches": pipelined})
    with pytest.raises(ConfigError) as caught:
        train(6, data=numbered_data(microbatches=1), resume=checkpoint, strategy=strategy)
    assert str(caught.value) == (
        "ckpt_path: the checkpoint counts its position in steps of 2 accumulated batches, this run in steps of 1\n"
        "  allowed: the accumulation that the checkpoint was written with: data.microbatches, "
        "beside pp.microbatches if above 1\n"
        f"  write:   {write}"
    )


def test_short_epochs_of_the_trainer_go_on_through_the_data() -> None:
    assert train(6, limit_train_batches=6).batches == expected(range(6))


@pytest.mark.parametrize("overfit", [4, 0.5])
def test_overfitting_repeats_the_first_batches(overfit: float) -> None:
    seen = train(6, overfit_batches=overfit).batches
    assert seen == expected(range(2)) * 3  # 4 of the 8 microbatches of an epoch


def test_a_new_fit_begins_at_the_beginning(tmp_path: Path) -> None:
    data, checkpoint = numbered_data(), tmp_path / "a.ckpt"
    train(3, data=data, callbacks=[SaveAt(3, checkpoint)])
    assert train(5, data=data, resume=checkpoint).batches == expected(range(3, 5))
    assert train(2, data=data).batches == expected(range(2))


@pytest.mark.parametrize("workers", [0, 2])
def test_other_tasks_take_all_sequences_in_order(workers: int) -> None:
    """A loader as of one process, of whose batches `MeshStrategy` gives each rank its part."""
    model, data = Recorder(), numbered_data(validation=11, workers=workers)
    train(4, model=model, data=data, strategy=OnRank(1, 2))
    trainer = Trainer(accelerator="cpu", strategy=OnRank(1, 2), logger=False, enable_progress_bar=False)
    trainer.predict(model, datamodule=data)
    # Batches of 8 / 2.
    assert model.validated == model.predicted == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]


class RandomNumbers:
    """Sequences that show the random numbers of the process that makes them."""

    def __len__(self) -> int:
        return 64

    def tokens(self, indices: np.ndarray) -> np.ndarray:
        drawn = [random.getrandbits(40), np.random.randint(2**31), int(torch.randint(2**40, ()))]
        return np.tile(np.array(drawn, np.int64), (len(indices), 1))


def test_workers_draw_alike_on_ranks_of_a_replica_and_not_elsewhere() -> None:
    def drawn(dp_rank: int, seed: int = 0) -> list[tuple[int, ...]]:
        loader = PositionedLoader(RandomNumbers(), BatchOrder(64, 4, 1, seed, True, dp_rank, 2), num_workers=2)
        both = zip(range(4), loader, strict=False)
        return [(*batch["input_ids"][0].tolist(), int(batch["labels"][0, -1])) for _, batch in both]

    torch.manual_seed(1)
    first = drawn(0)
    torch.manual_seed(2)
    assert drawn(0) == first
    everything = first + drawn(1) + drawn(0, seed=1)
    for generator in zip(*everything, strict=True):
        assert len(set(generator)) == len(generator)


@pytest.mark.parametrize("workers", [0, 1])
def test_loading_leaves_the_random_numbers_of_training_alone(workers: int) -> None:
    torch.manual_seed(0)
    state = torch.random.get_rng_state()
    loader = PositionedLoader(Numbered(8), BatchOrder(8, 2), num_workers=workers)
    assert len(list(loader)) == len(loader) == 4
    assert torch.equal(torch.random.get_rng_state(), state)


def test_state_counts_what_was_handed_out_not_what_workers_prepared() -> None:
    loader = PositionedLoader(Numbered(64), BatchOrder(64, 2), num_workers=2)
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    assert loader.state_dict() == {"microbatches": 3, "batch_size": 2, "epoch": 32}


@pytest.mark.parametrize("weights", [(), ((60, 1.0), (40, 2.0))])
@pytest.mark.parametrize(("before", "now"), [(10, 20), (20, 10), (20, 5)])
def test_another_batch_size_goes_on_behind_the_sequences_that_were_seen(
    before: int, now: int, weights: tuple[tuple[int, float], ...]
) -> None:
    def loader(batch_size: int) -> PositionedLoader:
        return PositionedLoader(Numbered(100), BatchOrder(100, batch_size, 1, 3, weights=weights))

    def numbers(some: PositionedLoader, count: int) -> list[int]:
        return list(chain(*(batch["input_ids"][:, 0].tolist() for batch in islice(iter(some), count))))

    whole, first, rest = loader(before), loader(before), loader(now)
    expected = numbers(whole, len(whole))
    seen = numbers(first, 40 // before)
    rest.load_state_dict(first.state_dict())
    assert seen + numbers(rest, 60 // now) == expected


def test_another_batch_size_passes_over_less_than_a_batch() -> None:
    """What was seen may be no whole number of batches of the new size; epochs of another length begin alike."""
    loader = PositionedLoader(Numbered(100), BatchOrder(100, 30))
    state = {"microbatches": 2 * 10 + 3, "batch_size": 10, "epoch": 10}
    loader.load_state_dict(state)
    assert loader.state_dict()["microbatches"] == 2 * 3 + 1
    loader.load_state_dict({**state, "microbatches": 2 * 10 + 4})
    assert loader.state_dict()["microbatches"] == 2 * 3 + 2
    loader.load_state_dict({"microbatches": 5})  # as it was written before
    assert loader.state_dict()["microbatches"] == 5


@pytest.mark.parametrize(
    ("name", "training", "checkpoint", "write"),
    [
        ("documents", Numbered(33), None, "data.validation_fraction=0.5"),
        ("documents", Numbered(33), "run", "data.validation_path=validation.jsonl"),
        ("documents", SimpleNamespace(steps=list), None, "data.validation_path=validation.jsonl"),
        ("tokens", Numbered(33), "run", "data.validation_path=validation.bin"),
        ("text", Numbered(33), "run", "data.path=other.txt data.validation_fraction=0.5"),
        ("synthetic", Numbered(33), None, "data.num_validation_sequences=256"),
    ],
)
def test_what_could_be_validated_on(name: str, training: Any, checkpoint: str | None, write: str) -> None:
    data: Any = build_data(dataclasses.asdict(DATA[name]()), 0)
    data._sequences = Parts(training, Numbered(0))
    data.trainer = SimpleNamespace(state=SimpleNamespace(fn=TrainerFn.VALIDATING), ckpt_path=checkpoint, strategy=None)
    with pytest.raises(ConfigError) as caught:
        data.val_dataloader()
    assert_told(caught.value, "autolaunch validate", "no validation sequences", write=write)


def test_build_data_makes_a_data_module_of_ones_own() -> None:
    config = {
        "name": "mine",
        "_target_": "autolaunch.data.module.TokenDataModule",
        "open_sequences": partial(open_numbered, 8, 0),
        "batch_size": 4,
    }
    data = build_data(config, seed=0)
    assert isinstance(data, TokenDataModule) and data.batch_size == 4


def test_a_dataset_is_no_data_module() -> None:
    with pytest.raises(ConfigError) as caught:
        build_data({"name": "custom", "_target_": "torch.utils.data.TensorDataset", "labels": None}, seed=0)
    assert_only_told(caught.value, Told("data._target_=torch.utils.data.TensorDataset", "no LightningDataModule"))
    with pytest.raises(ConfigError) as caught:
        build_data({"name": "custom", "_target_": "autolaunch.data.module.TokenDataModule", "labels": None}, seed=0)
    assert "data.batch_size=..." in caught.value.write
