"""Layers of pytorch-forecasting: its models are built of them, and take tables instead of tensors."""

from __future__ import annotations

import importlib
from typing import Any

from torch import nn

from tests.gauntlet.row import Field, Loss, Row, fitted, floats


def _make(path: str, arguments: dict[str, Any]) -> nn.Module:
    module, _, kind = path.rpartition(".")
    return getattr(importlib.import_module(f"pytorch_forecasting.{module}"), kind)(**arguments)


def _row(path: str, batch: dict[str, Field], sequence: bool = False, loss: Loss = fitted, **arguments: Any) -> Row:
    return Row("pytorch-forecasting", path.rpartition(".")[2], lambda: _make(path, arguments), batch, loss, sequence)


_TFT = "models.temporal_fusion_transformer.sub_modules"
_NBEATS = "models.nbeats.sub_modules"

ROWS = [
    _row(f"{_TFT}.GatedResidualNetwork", {"x": floats(6, 16)}, input_size=16, hidden_size=16, output_size=16,
         dropout=0.0),
    _row(f"{_TFT}.InterpretableMultiHeadAttention", {"q": floats(8, 16), "k": floats(8, 16), "v": floats(8, 16)}, True,
         n_head=4, d_model=16, dropout=0.0),
    _row(f"{_NBEATS}.NBEATSGenericBlock", {"x": floats(16)}, units=32, thetas_dim=8, num_block_layers=2,
         backcast_length=16, forecast_length=8),
    _row(f"{_NBEATS}.NBEATSSeasonalBlock", {"x": floats(16)}, units=32, thetas_dim=8, num_block_layers=2,
         backcast_length=16, forecast_length=8),
]  # fmt: skip
