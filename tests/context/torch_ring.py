"""The ring attention that torch has for CUDA tensors in DTensors, run on plain CPU tensors. Private to torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor.experimental._context_parallel import _attention

_KERNEL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@contextmanager
def torch_ring_options(balanced: bool) -> Iterator[None]:
    """Whether sequences are divided head-tail, for causal attention, or in one part per rank."""
    options, before = _attention._cp_options, _attention._cp_options.enable_load_balance
    options.enable_load_balance = balanced
    try:
        yield
    finally:
        options.enable_load_balance = before


class TorchRing(torch.autograd.Function):
    """(q, k, v [b, h, s_local, d], group, causal) -> [b, h, s_local, d]."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, group: Any, causal: bool) -> Any:
        out, lse, *_ = _attention._templated_ring_attention(
            group, 2, _KERNEL, query=q, key=k, value=v, is_causal=causal, dropout_p=0.0
        )
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.of = group, causal
        return out

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        group, causal = ctx.of
        grads = _attention._templated_ring_attention_backward(
            group, 2, _BACKWARD, grad.contiguous(), "grad_out",
            query=q, key=k, value=v, out=out, logsumexp=lse, is_causal=causal, dropout_p=0.0,
        )  # fmt: skip
        return *grads[:3], None, None
