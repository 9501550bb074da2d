"""Operators of autograd itself for which DTensor has no sharding rule."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.distributed.tensor import Replicate


@functools.cache
def register_missing_rules() -> None:
    """Let gradients that are DTensors be looked at by `torch.autograd.set_detect_anomaly`."""
    from torch.distributed.tensor.experimental import register_sharding  # 0.1 s, which no plan has to wait for

    @register_sharding(torch.ops.aten._is_any_true.default)
    def is_any_true(tensor: Any) -> Any:
        return [([Replicate()], [Replicate()])]
