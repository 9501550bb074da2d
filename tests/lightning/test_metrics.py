"""Which metrics join their ranks by step; `feature_cases.py` has their values on every mesh."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torchmetrics
from torch import nn

from autolaunch_strategies.lightning.metrics import StepValues, uncounted


def test_whether_a_metric_joins_by_step_is_none_of_its_states() -> None:
    metric = torchmetrics.MeanMetric()
    with uncounted([metric]):
        metric.dist_sync_on_step = True
        metric.update(1.0)
    assert metric.dist_sync_on_step and metric.update_count == 0


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
