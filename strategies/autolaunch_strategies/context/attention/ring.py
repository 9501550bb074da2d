"""Ring attention: keys and values go once round, and each place computes with those at hand while the next travel.

Ring attention is Liu et al., 2023; the gradient of keys and values travels with them, as in its flash versions.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from autolaunch_strategies.context.attention.exchange import Passing, pack, unpack
from autolaunch_strategies.context.attention.operator import as_operator
from autolaunch_strategies.context.attention.tiles import Differentiated, Merged, padded, ring_tile, valid
from autolaunch_strategies.mesh.layout import Layout

_KEYS, _GRADIENTS = 1, 2


def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    group: dist.ProcessGroup,
    layout: Layout,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float,
) -> torch.Tensor:
    """Attention of this place's queries to the whole sequence.

    Args:
        q: [b, h, s, d], where s is 2·layout.chunk: all that this place of the ring holds, padding included.
        k: [b, h_kv, s, d]. `v`: [b, h_kv, s, d_v].
        group: the ring, one rank per place; this rank's number in it is its place.
        mask: [b or 1, h or 1, size or 1, size or 1], bool or float without gradient; with `causal`, both count.

    Returns:
        [b, h, s, d_v]; 0 in rows of padding.
    """
    return _Ring.apply(q, k, v, mask, group, layout, causal, scale)


def _all_steps(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    group: dist.ProcessGroup,
    layout: Layout,
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    place = group.rank()
    merged = Merged(q[:, :, : valid(layout, place)], v.shape[3], scale)
    for origin, keys, values in _round(k, v, group):
        tile = ring_tile(layout, place, origin, causal, mask)
        if tile is not None:
            merged.add(tile, keys, values)
    return merged.result()


_forward = as_operator("ring", _all_steps)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        group: dist.ProcessGroup,
        layout: Layout,
        causal: bool,
        scale: float,
    ) -> torch.Tensor:
        ctx.of = group, layout, causal, scale
        out, lse = _forward(q, k, v, mask, group, layout, causal, scale)
        ctx.save_for_backward(q, k, v, mask, out, lse)
        return padded(out, q.shape[2])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        group, layout, causal, scale = ctx.of
        q, k, v, mask, out, lse = ctx.saved_tensors
        place, shapes = group.rank(), [k.shape, v.shape]
        count = valid(layout, place)
        parts = Differentiated(grad[:, :, :count], q[:, :, :count], out, lse, scale)
        own, total, arriving = _zeros(k, v), _zeros(k, v), None
        spare = torch.empty_like(total)
        for origin, keys, values in _round(k, v, group):
            tile = ring_tile(layout, place, origin, causal, mask)
            found = None if tile is None else parts.add(tile, keys, values)
            if arriving is not None:
                # What the places before found for the keys at hand; it came while this one computed.
                total, spare = arriving.wait(), total
            if tile is not None and found is not None:
                for whole, part in zip(unpack(own if origin == place else total, shapes), found, strict=True):
                    whole[:, :, tile.keys] += part
            if origin != place:
                arriving = Passing(total, spare, group, _GRADIENTS)
        if arriving is not None:
            own += arriving.wait()
        dk, dv = unpack(own, shapes)
        return padded(parts.result(), q.shape[2]), dk.to(k.dtype), dv.to(v.dtype), *[None] * 5


def _zeros(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Where gradients of k and v are summed up, packed, in fp32 (fp64 for fp64)."""
    return k.new_zeros(k.numel() + v.numel(), dtype=torch.promote_types(k.dtype, torch.float32))


def _round(
    k: torch.Tensor, v: torch.Tensor, group: dist.ProcessGroup
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """(place, its k, its v) for all places: the own, then those of the place before, and so on.

    While the caller computes with them, the next are on their way.
    """
    place, places = group.rank(), group.size()
    held, spare = (pack((k, v)), None) if places > 1 else (k, None)
    shapes = [k.shape, v.shape]
    for step in range(places):
        last = step == places - 1
        passing = None if last else Passing(held, torch.empty_like(held) if spare is None else spare, group, _KEYS)
        yield (place - step) % places, k, v
        if passing is not None:
            held, spare = passing.wait(), held
            k, v = unpack(held, shapes)
