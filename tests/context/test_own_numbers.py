"""What modules draw on parts of sequences, where each rank draws its own: other numbers in every call."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autolaunch_strategies.context.sharded_modules import ShardedModule
from autolaunch_strategies.model.random_positions import PositionedNumbers


class OnPart(nn.Module):
    """As a sharded module runs on rank 1 of two."""

    def __init__(self) -> None:
        super().__init__()
        sequences = SimpleNamespace(device=torch.device("cpu"), peers=SimpleNamespace(rank=1))
        self.__dict__["sharded"] = SimpleNamespace(sequences=sequences, _draws=None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sharded: Any = self.sharded
        with ShardedModule._drawing(sharded):
            return F.dropout(x)


@pytest.mark.parametrize("only_single", [True, False], ids=["by-rank-along-dp", "by-rank"])
def test_every_module_and_every_step_drops_others(only_single: bool) -> None:
    torch.manual_seed(0)
    model = nn.ModuleList([OnPart(), OnPart()])
    numbers = PositionedNumbers(model, 0, only_single=True)
    x, dropped = torch.ones(64), []
    for step in range(2):
        with numbers.step(step, 0, 0) if only_single else torch.enable_grad():
            dropped += [tuple(layer(x).tolist()) for layer in model]
    assert len(set(dropped)) == 4
