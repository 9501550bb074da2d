"""Attention with keys and values gathered from all ranks: any mask, dropout, and gradients of masks."""

from __future__ import annotations

import torch
import torch.distributed as dist

from autolaunch_strategies.context.attention.exchange import Gathering, GatherInOrder, in_order, sum_at_owners
from autolaunch_strategies.context.attention.kernels import attend_whole
from autolaunch_strategies.context.attention.operator import KeyExchange, attention_over_places
from autolaunch_strategies.context.attention.tiles import (
    Differentiated,
    Merged,
    Tile,
    padded,
    ring_tile,
    rows_of,
    whole_tiles,
)
from autolaunch_strategies.mesh.layout import Layout
from autolaunch_strategies.model.random_positions import holding
from autolaunch_strategies.sharded_sequence.shard import Positions


def gathered_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    group: dist.ProcessGroup,
    layout: Layout,
    mask: torch.Tensor | None,
    dropout_p: float,
    causal: bool,
    scale: float,
) -> torch.Tensor:
    """Attention of this rank's queries to the whole sequence.

    Without dropout only local tensors are kept for the backward pass, which gathers keys and values again. With it, or
    if the mask wants a gradient, torch's own attention runs on the gathered ones and keeps them.

    Args:
        q: [b, h, local, d]. `k`: [b, h_kv, local, d]. `v`: [b, h_kv, local, d_v].
        layout: of `group`, with `ulysses` 1.
        mask: [b or 1, h or 1, size or 1, size or 1], bool or float; with `causal`, both count.

    Returns:
        [b, h, local, d_v]; 0 in rows of padding.
    """
    assert layout.ulysses == 1
    if dropout_p == 0.0 and (mask is None or not mask.requires_grad):
        return attention_over_places(
            q, k, v, exchange=GatheredKeys, group=group, layout=layout, mask=mask, causal=causal, scale=scale
        )
    rank, count = group.rank(), layout.valid(group.rank())
    k, v = GatherInOrder.apply(group, layout, 2, k, v)
    seen = None if mask is None else rows_of(mask, layout, rank) if count else mask[:, :, :0]
    if causal:
        positions = Positions.of_layout(layout).of_rank(rank, q.device)
        below = positions[:, None] >= torch.arange(layout.size, device=q.device)
        if seen is None:
            seen = below[None, None]
        else:
            seen = seen & below if seen.dtype == torch.bool else seen.masked_fill(~below, -float("inf"))
    if count == 0:  # the gathered ones still need their place in the graph: every rank takes part in its backward
        empty = q[:, :, :0, :1] * (k.sum() + v.sum())
        return padded(empty.expand(-1, -1, -1, v.shape[3]), q.shape[2])
    own_rows = {2: (layout.positions(rank), layout.size)}
    with holding(own_rows):
        out = attend_whole(q[:, :, :count], k, v, causal=False, mask=seen, dropout_p=dropout_p, scale=scale)
    return padded(out, q.shape[2])


class GatheredKeys(KeyExchange):
    """Keys and values of all ranks at once. While they arrive, a causal mask leaves work with those held here."""

    def attend(self, merged: Merged, k: torch.Tensor, v: torch.Tensor) -> None:
        arriving = Gathering((k, v), self.group)
        own = self._own_tile()
        if own is not None:
            merged.add(own, k, v)
        keys, values = (in_order(parts, self.layout, 2) for parts in arriving.wait())
        for tile in whole_tiles(self.layout, self.place, self.causal, self.mask):
            merged.add(tile, keys, values)

    def differentiate(
        self, parts: Differentiated, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        arriving = Gathering((k, v), self.group)
        own = self._own_tile()
        of_own = None if own is None else parts.add(own, k, v)
        keys, values = (in_order(arrived, self.layout, 2) for arrived in arriving.wait())
        wholes = torch.zeros_like(keys), torch.zeros_like(values)
        for tile in whole_tiles(self.layout, self.place, self.causal, self.mask):
            for whole, part in zip(wholes, parts.add(tile, keys, values), strict=True):
                whole[:, :, tile.keys] = part  # tiles share no keys
        dk, dv = sum_at_owners(wholes, self.group, self.layout, 2)
        if own is not None and of_own is not None:
            for whole, part in zip((dk, dv), of_own, strict=True):
                whole[:, :, own.keys] += part
        return dk, dv

    def _own_tile(self) -> Tile | None:
        """What can be computed with this rank's own keys while all keys arrive; `whole_tiles` leaves it out."""
        return ring_tile(self.layout, self.place, self.place, True, self.mask) if self.causal else None
