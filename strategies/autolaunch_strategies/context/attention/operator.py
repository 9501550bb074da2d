"""Attention of this place's queries to the keys of all places, tile by tile, as one differentiable function.

How keys and values get from place to place is a `KeyExchange`. What is kept, the gradient from the log-sum-exp, and
what torch sees of it are the same for all.

Each pass is one operator of torch: what it does inside is nobody else's business. Selective recomputation can then keep
the outputs of the forward one, as those of torch's own attention, and nothing travels again; what it changes in place
while it adds up parts is not taken for a change of something kept; and graphs of blocks hold it as it is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.distributed as dist

from autolaunch_strategies.context.attention.tiles import Differentiated, Merged, padded
from autolaunch_strategies.mesh.layout import Layout, layout_of
from autolaunch_strategies.torch_private.collectives import group_called
from autolaunch_strategies.torch_private.operators import define_operator


class KeyExchange(ABC):
    """How the queries of a place meet the keys and values of all places, in one call of attention.

    Args:
        group: one rank per place; this rank's number in it is its place.
        layout: of the sequence.
        causal: whether a query sees no later positions; counts beside `mask`.
        mask: [b or 1, h or 1, size or 1, size or 1], bool or float without gradient.
    """

    def __init__(self, group: dist.ProcessGroup, layout: Layout, causal: bool, mask: torch.Tensor | None) -> None:
        self.group, self.layout, self.causal, self.mask = group, layout, causal, mask
        self.place = group.rank()

    def __init_subclass__(cls) -> None:
        _EXCHANGES[cls.__name__] = cls

    @abstractmethod
    def attend(self, merged: Merged, k: torch.Tensor, v: torch.Tensor) -> None:
        """Add every tile in which queries of this place see keys to `merged`.

        Args:
            k: [b, h_kv, s, d], what this place holds, where s is 2·layout.chunk. `v`: [b, h_kv, s, d_v].
        """

    @abstractmethod
    def differentiate(
        self, parts: Differentiated, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add the same tiles to `parts`, and sum up what the queries of all places find for `k` and `v`.

        Returns:
            the gradients of `k` and `v`, in fp32 (fp64 for fp64).
        """


_EXCHANGES: dict[str, type[KeyExchange]] = {}
_TENSORS = "Tensor q, Tensor k, Tensor v, Tensor? mask"
_HOW = "str exchange, str group, int[] layout, bool causal, float scale"


def _run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    exchange: str,
    group: str,
    layout: list[int],
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    keys = _EXCHANGES[exchange](group_called(group), layout_of(*layout), causal, mask)
    merged = Merged(q[:, :, : keys.layout.valid_at(keys.place)], v.shape[3], scale)
    keys.attend(merged, k, v)
    out, lse = merged.result()
    return _by_position(out), lse.contiguous()


def _shapes(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, exchange: str, group: str, layout: list[int], *_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    count = layout_of(*layout).valid_at(group_called(group).rank())
    b, h = q.shape[:2]
    lse = q.new_empty((b, h, count), dtype=torch.promote_types(q.dtype, torch.float32))
    return q.new_empty((b, count, h, v.shape[3])).transpose(1, 2), lse


def _run_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    grad: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    exchange: str,
    group: str,
    layout: list[int],
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    keys = _EXCHANGES[exchange](group_called(group), layout_of(*layout), causal, mask)
    count = keys.layout.valid_at(keys.place)
    parts = Differentiated(grad[:, :, :count], q[:, :, :count], out, lse, scale)
    dk, dv = keys.differentiate(parts, k, v)
    dq = padded(parts.result(), q.shape[2])
    # The two are often parts of one message; a graph may write over one result of an operator while it needs another.
    return _by_position(dq), _copied_by_position(dk, k.dtype), _copied_by_position(dv, v.dtype)


def _shapes_backward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any) -> tuple[torch.Tensor, ...]:
    return tuple(item.new_empty(item.transpose(1, 2).shape).transpose(1, 2) for item in (q, k, v))


def _by_position(tensor: torch.Tensor) -> torch.Tensor:
    """[b, h, s, d] laid out as [b, s, h, d], as models and kernels have it mostly: graphs hold one layout only."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def _copied_by_position(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """As `_by_position`, in memory of its own, whatever `tensor` is part of."""
    return tensor.transpose(1, 2).to(dtype, copy=True, memory_format=torch.contiguous_format).transpose(1, 2)


define_operator(f"context_attention({_TENSORS}, {_HOW}) -> (Tensor, Tensor)", _run, _shapes)
define_operator(
    f"context_attention_backward({_TENSORS}, Tensor grad, Tensor out, Tensor lse, {_HOW}) -> (Tensor, Tensor, Tensor)",
    _run_backward,
    _shapes_backward,
)

CONTEXT_ATTENTION = torch.ops.autolaunch.context_attention
"""The operator: (output, log-sum-exp), both new."""


def attention_over_places(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    exchange: type[KeyExchange],
    group: dist.ProcessGroup,
    layout: Layout,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float,
) -> torch.Tensor:
    """Attention of this place's queries to the whole sequence. Only tensors of this place are kept.

    Args:
        q: [b, h, s, d], where s is 2·layout.chunk: all that this place holds, padding included.
        k: [b, h_kv, s, d]. `v`: [b, h_kv, s, d_v].
        exchange, group, layout, mask, causal: as of `KeyExchange`.

    Returns:
        [b, h, s, d_v]; 0 in rows of padding.
    """
    return _OverPlaces.apply(q, k, v, mask, exchange, group, layout, causal, scale)


class _OverPlaces(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        exchange: type[KeyExchange],
        group: dist.ProcessGroup,
        layout: Layout,
        causal: bool,
        scale: float,
    ) -> torch.Tensor:
        how = exchange.__name__, group.group_name, [layout.size, layout.ranks, layout.ulysses], causal, scale
        out, lse = CONTEXT_ATTENTION(q, k, v, mask, *how)
        ctx.how = how
        ctx.save_for_backward(q, k, v, mask, out, lse)
        return padded(out, q.shape[2])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        q, k, v, mask, out, lse = ctx.saved_tensors
        gradients = torch.ops.autolaunch.context_attention_backward(q, k, v, mask, grad, out, lse, *ctx.how)
        return *gradients, *[None] * 6
