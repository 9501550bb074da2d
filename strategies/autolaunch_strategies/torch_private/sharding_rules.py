"""Operators for which DTensor has no sharding rule, or one that reads a part of a number for the number."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard, _redistribute

DIFFERENTIATES_TWICE = hasattr(_redistribute, "NestedRedistribute")
"""Whether gradients that were redistributed have a history of their own: from torch 2.12 on."""


@functools.cache
def read_whole_numbers() -> None:
    """Let `item`, `float` and `bool` of a DTensor give its value on every rank, and not the part that its rank has.

    Which a norm of a sharded gradient has before anything else is done with it. Collective where parts are combined.
    """

    def read(operator: Any, args: Any, kwargs: Any) -> Any:
        return operator(args[0].full_tensor())

    handlers: Any = DTensor._op_dispatcher._custom_op_handlers
    handlers[torch.ops.aten._local_scalar_dense.default] = read


@functools.cache
def register_missing_rules() -> None:
    """Let gradients that are DTensors be looked at by `torch.autograd.set_detect_anomaly`, and be those of `cumsum`."""
    from torch.distributed.tensor.experimental import register_sharding  # 0.1 s, which no plan has to wait for

    @register_sharding(torch.ops.aten._is_any_true.default)
    def is_any_true(tensor: Any) -> Any:
        return [([Replicate()], [Replicate()])]

    propagator, flip = DTensor._op_dispatcher.sharding_propagator, torch.ops.aten.flip.default
    known = ("op_strategy_funcs", "op_single_dim_strategy_funcs")
    if any(flip in getattr(propagator, name, ()) for name in known):  # not in torch 2.11
        return

    @register_sharding(flip)
    def flipped(tensor: Any, dims: Any) -> Any:
        turned = {dim % tensor.ndim for dim in dims}
        kept: list[Any] = [Shard(dim) for dim in range(tensor.ndim) if dim not in turned]
        return [([placement], [placement, None]) for placement in (*kept, Replicate())]
