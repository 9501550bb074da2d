"""Rules for operators that sharded tensors lack in torch: registered once, when this module is imported."""

from __future__ import annotations

import torch
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.experimental import register_sharding


@register_sharding(torch.ops.aten._is_any_true.default)
def _of_the_whole(tensor: object) -> list[tuple[list[Replicate], list[Replicate]]]:
    """Asked of every gradient by `torch.autograd.detect_anomaly`: one answer for all ranks, of the whole tensor."""
    return [([Replicate()], [Replicate()])]
