"""plan: where inputs can't be guessed, the data of the job show how the model is called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest

import autolaunch.data
import autolaunch.models
from autolaunch.tasks.plan import _foreseen
from autolaunch_strategies.config import ConfigError
from tests.lightning import any_signature

JOB = {
    "mesh": "pp2", "dp": None, "mp": None, "pp": {}, "cp": None, "recompute": "none", "recompute_save": ["mm"],
    "random_numbers": "by_rank", "ep": 1, "precision": "32-true",
    "recompute_budget": None, "compile": False, "seed": 1, "module": {}, "data": {"name": "custom"}, "model": {},
}  # fmt: skip


class Data(pl.LightningDataModule):
    def prepare_data(self) -> None:
        raise AssertionError("it may download")

    def setup(self, stage: str) -> None:
        self.dataset = any_signature.Series()

    def train_dataloader(self) -> Any:
        return any_signature.series()


class Missing(Data):
    def setup(self, stage: str) -> None:
        raise FileNotFoundError("no such directory: images")


@pytest.fixture
def foreseen(monkeypatch: pytest.MonkeyPatch) -> Callable[[type], Any]:
    def run(data: type) -> Any:
        monkeypatch.setattr(autolaunch.models, "build_module", lambda config: any_signature.Conditioned())
        monkeypatch.setattr(autolaunch.data, "build_data", lambda config, seed: data())
        return _foreseen(JOB)[0]

    return run


def test_data_show_how_the_model_is_called(foreseen: Callable[[type], Any]) -> None:
    account = foreseen(Data)["pp"]
    assert account["order_from"] == "training_step with the first batch"
    assert account["cuts"] == ["behind blocks.1"]


def test_data_that_are_not_there_are_told(foreseen: Callable[[type], Any]) -> None:
    with pytest.raises(ConfigError, match="training_step with the first batch: no such directory: images"):
        foreseen(Missing)
