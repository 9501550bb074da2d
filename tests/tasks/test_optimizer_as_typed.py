"""What was typed of an optimizer counts in a resumed run, for the groups of the config alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from autolaunch.tasks.optimizer_as_typed import OptimizerAsTyped


def test_groups_that_the_checkpoint_has_added_keep_their_rates() -> None:
    layers = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(layers[0].parameters(), lr=0.5)
    changed = {"optimizer.lr": ""}
    trainer: Any = SimpleNamespace(
        optimizers=[optimizer], lr_scheduler_configs=[], strategy=SimpleNamespace(checkpoints=SimpleNamespace())
    )
    trainer.strategy.checkpoints.changed = changed
    typed, module = OptimizerAsTyped(), Any
    typed.on_fit_start(trainer, module)
    optimizer.param_groups[0]["lr"] = 0.1  # as a checkpoint fills it
    optimizer.add_param_group({"params": list(layers[1].parameters()), "lr": 0.2})
    typed.on_train_start(trainer, module)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.2]
