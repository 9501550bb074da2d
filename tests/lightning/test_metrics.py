"""Which metrics join their ranks by step; `feature_cases.py` has their values on every mesh."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any, cast

import lightning.pytorch as pl
import pytest
import torch
import torchmetrics
from torch import nn
from torch.utils.data import DataLoader

from autolaunch_strategies import MeshStrategy
from autolaunch_strategies.lightning.metrics import StepValues, place_metrics, uncounted


def test_whether_a_metric_joins_by_step_is_none_of_its_states() -> None:
    metric = torchmetrics.MeanMetric()
    with uncounted([metric]):
        metric.dist_sync_on_step = True
        metric.update(1.0)
    assert metric.dist_sync_on_step and metric.update_count == 0


def test_states_go_where_the_module_computes_and_what_is_held_beside_them_stays() -> None:
    module = nn.Sequential(nn.Linear(2, 2), torchmetrics.MeanMetric())
    module[1].inner = nn.Linear(2, 2)
    place_metrics(module, torch.device("meta"))
    assert module[1].mean_value.is_meta and module[1].device.type == "meta"
    assert not module[0].weight.is_meta and not module[1].inner.weight.is_meta
    module[1].reset()
    assert module[1].mean_value.is_meta, "after an epoch, too"


class Steps:
    """Steps of a module with one metric: whether it joins in a step, and whether the step logs it, and by step."""

    def __init__(self) -> None:
        self.values, self.module = StepValues(), cast(Any, nn.Module())
        self.metric = self.module.metric = torchmetrics.MeanMetric()
        self.module.trainer = SimpleNamespace(_results={})

    def joins(self, logged: str = "") -> bool:
        with self.values.joined(self.module):
            joins = self.metric.dist_sync_on_step
            if logged:
                meta = SimpleNamespace(on_step=logged == "step")
                self.module.trainer._results["mean"] = SimpleNamespace(value=self.metric, is_tensor=False, meta=meta)
        return joins


@pytest.mark.parametrize(("logged", "later"), [("step", True), ("epoch", False)])
def test_a_metric_joins_until_it_is_seen_how_it_is_logged(logged: str, later: bool) -> None:
    steps = Steps()
    assert steps.joins() and steps.joins(logged)
    assert [steps.joins() for _ in range(2)] == [later] * 2


def test_one_that_is_logged_late_joins_from_then_on_and_that_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepValues, "_STEPS", 2)
    steps = Steps()
    assert [steps.joins() for _ in range(3)] == [True, True, False]
    with pytest.warns(UserWarning, match="first time after 2 steps"):
        assert not steps.joins("step")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert steps.joins("step") and steps.joins()


def test_a_step_that_fails_leaves_metrics_as_they_were() -> None:
    steps = Steps()
    with pytest.raises(ZeroDivisionError), steps.values.joined(steps.module):
        raise ZeroDivisionError
    assert not steps.metric.dist_sync_on_step


class ConfiguredLate(pl.LightningModule):
    """Built without memory, as every module on the command line: a metric, and tensors that are no buffers."""

    def configure_model(self) -> None:
        if not hasattr(self, "layer"):
            self.layer, self.metric = nn.Linear(2, 4), torchmetrics.classification.MulticlassAccuracy(4)
            self.scale = {"by": torch.tensor([1.0, 2.0])}

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        scores = self.layer(batch * self.scale["by"])
        self.metric(scores, torch.zeros(len(batch), dtype=torch.int64))
        self.log("accuracy", self.metric, on_step=False, on_epoch=True)
        return scores.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def test_a_module_that_is_built_without_memory_keeps_its_metrics_and_tensors() -> None:
    trainer = pl.Trainer(
        strategy=MeshStrategy("1"), accelerator="cpu", max_epochs=2, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(ConfiguredLate(), DataLoader(torch.randn(8, 2).unbind(), 4))  # type: ignore[arg-type]  # any sequence does
    assert 0 <= trainer.callback_metrics["accuracy"] <= 1
