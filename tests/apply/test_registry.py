"""What is kept of parallelised modules: as long as these live, and no longer."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import nn

from autolaunch_strategies import MeshStrategy, ProcessMesh, parallelize
from autolaunch_strategies.apply.registry import all_applied, applied_to
from autolaunch_strategies.mesh.process_group import leave_process_group


def trained_by_a_trainer() -> nn.Module:
    module = BoringModel()
    options: dict[str, Any] = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}
    trainer = pl.Trainer(
        strategy=MeshStrategy(mesh="1"), max_steps=2, enable_progress_bar=False, enable_model_summary=False, **options
    )
    trainer.fit(module)
    return module


def trained_in_a_loop() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    parallelize(model, optimizer, ProcessMesh([0], ["dp"]), {"dp_config": {"sharding_level": 0}})
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    return model


@pytest.mark.parametrize("trained", [trained_by_a_trainer, trained_in_a_loop])
def test_a_module_is_freed(trained: Any) -> None:
    try:
        module = trained()
        assert applied_to(module) in all_applied()
        alive = weakref.ref(module)
        del module
        gc.collect()
        assert alive() is None
    finally:
        leave_process_group()


def test_a_copy_is_not_parallelised() -> None:
    try:
        model = trained_in_a_loop()
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert applied_to(other) is None
            torch.testing.assert_close(other.state_dict(), model.state_dict())
    finally:
        leave_process_group()
