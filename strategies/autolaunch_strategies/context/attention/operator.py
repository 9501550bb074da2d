"""Attention of this place's queries to the keys of all places, tile by tile, as one differentiable function.

How keys and values get from place to place is a `KeyExchange`. What is kept, the gradient from the log-sum-exp, and
what torch sees of it are the same for all.

The forward pass is one operator of torch: what it does inside is nobody else's business. Selective recomputation can
then keep its outputs, as those of torch's own attention, and nothing travels again; and what it changes in place while
it adds up parts is not taken for a change of something kept.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.distributed as dist

from autolaunch_strategies.context.attention.tiles import Differentiated, Merged, padded
from autolaunch_strategies.mesh.layout import Layout
from autolaunch_strategies.torch_private.collectives import group_called


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
_LIBRARY = torch.library.Library("autolaunch", "FRAGMENT")
_LIBRARY.define(
    "context_attention(Tensor q, Tensor k, Tensor v, Tensor? mask, str exchange, str group, int[] layout, bool causal, "
    "float scale) -> (Tensor, Tensor)"
)


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
    keys = _EXCHANGES[exchange](group_called(group), Layout(*layout), causal, mask)
    merged = Merged(q[:, :, : keys.layout.valid_at(keys.place)], v.shape[3], scale)
    keys.attend(merged, k, v)
    return merged.result()


_LIBRARY.impl("context_attention", _run, "CompositeExplicitAutograd")

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
        ctx.of = exchange, group, layout, causal, scale
        sizes = [layout.size, layout.ranks, layout.ulysses]
        out, lse = CONTEXT_ATTENTION(q, k, v, mask, exchange.__name__, group.group_name, sizes, causal, scale)
        ctx.save_for_backward(q, k, v, mask, out, lse)
        return padded(out, q.shape[2])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        exchange, group, layout, causal, scale = ctx.of
        q, k, v, mask, out, lse = ctx.saved_tensors
        keys = exchange(group, layout, causal, mask)
        count = layout.valid_at(keys.place)
        parts = Differentiated(grad[:, :, :count], q[:, :, :count], out, lse, scale)
        dk, dv = keys.differentiate(parts, k, v)
        return padded(parts.result(), q.shape[2]), dk.to(k.dtype), dv.to(v.dtype), *[None] * 6
