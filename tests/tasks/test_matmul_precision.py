"""`matmul_precision`: what the job of a run on GPUs says is what torch is told."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from autolaunch.config.against_schema import validate
from autolaunch.job import ResolvedJob
from autolaunch.report.metrics import StepMetrics
from autolaunch.tasks.run_parts import build_strategy, build_trainer


@pytest.mark.parametrize(("value", "told"), [("high", ["high"]), ("highest", ["highest"]), (None, [])])
def test_torch_is_told(value: str | None, told: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", said.append)
    config, errors = validate({"precision": "32-true", "matmul_precision": value, "trainer": {"accelerator": "cpu"}})
    assert errors == []
    build_trainer(ResolvedJob(config, tmp_path, 1, [], "0"), build_strategy(config), StepMetrics(), [], [])
    assert said == told
