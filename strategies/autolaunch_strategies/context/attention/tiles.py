"""Attention in tiles: some queries of this rank with some keys, until all tiles together are the whole.

Positions follow `Layout`; a place is a place of the ring. Queries and keys that are padding are in no tile.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch.nn import functional as F

from autolaunch_strategies.context.attention.kernels import attend, attend_backward
from autolaunch_strategies.mesh.layout import Layout


@dataclass(frozen=True)
class Tile:
    """Queries and keys that meet in one call of a kernel."""

    rows: slice
    """Which of the queries that this place holds."""
    keys: slice
    """Which of the keys at hand."""
    causal: bool = False
    """Whether query i of them sees keys 0 to i of them only."""
    mask: torch.Tensor | None = None
    """[b or 1, h or 1, rows or 1, keys or 1]: what `Tile.keys` a query sees (bool) or what is added (float)."""


def ring_tile(layout: Layout, place: int, origin: int, causal: bool, mask: torch.Tensor | None) -> Tile | None:
    """What `place` computes with the keys that `origin` holds; None if its queries see none of them.

    With a causal mask a place sees of the chunks of an earlier one only the first (the second lies behind all of its
    own), and of those of a later one both, but only from its own second chunk. So each tile but the own has the
    same size (head-tail balance, as in zhuzilin/ring-flash-attention and torch's own ring).
    """
    tile = _tile_without_mask(layout, place, origin, causal)
    if tile is None or mask is None:
        return tile
    seen = _select(_select(mask, 2, _runs(layout, place, tile.rows)), 3, _runs(layout, origin, tile.keys))
    return replace(tile, mask=seen)


@lru_cache(maxsize=1024)
def _tile_without_mask(layout: Layout, place: int, origin: int, causal: bool) -> Tile | None:
    rows, keys = slice(0, layout.valid_at(place)), slice(0, layout.valid_at(origin))
    if causal and origin < place:
        keys = slice(0, min(keys.stop, layout.chunk))
    elif causal and origin > place:
        rows = slice(layout.chunk, rows.stop)
    if rows.start >= rows.stop or keys.start >= keys.stop:
        return None
    return Tile(rows, keys, causal and origin == place)


def whole_tiles(layout: Layout, place: int, causal: bool, mask: torch.Tensor | None) -> list[Tile]:
    """What `place` computes with the keys of the whole sequence, in order; if causal, without those it holds itself."""
    count, chunk = layout.valid_at(place), layout.chunk
    if causal:
        head, tail = layout.chunk_starts(place)
        before = slice(0, count), slice(0, min(head, layout.size))
        between = slice(chunk, count), slice(head + chunk, min(tail, layout.size))
        pairs = [before, between]
    else:
        pairs = [(slice(0, count), slice(0, layout.size))]
    return [
        Tile(rows, keys, False, _select(_select(mask, 2, _runs(layout, place, rows)), 3, [(keys.start, keys.stop)]))
        for rows, keys in pairs
        if rows.start < rows.stop and keys.start < keys.stop
    ]


def _runs(layout: Layout, place: int, part: slice) -> list[tuple[int, int]]:
    """The positions of a slice of what a place holds, as (start, stop) of one or two runs."""
    chunk, runs = layout.chunk, []
    for position, offset in zip(layout.chunk_starts(place), (0, chunk), strict=True):
        start, stop = max(part.start - offset, 0), min(part.stop - offset, chunk)
        if start < stop:
            runs.append((position + start, position + stop))
    return runs


def _select(mask: torch.Tensor | None, dim: int, runs: list[tuple[int, int]]) -> torch.Tensor | None:
    """The mask at some positions of `dim`; a dim of size 1 is for all of them."""
    if mask is None or mask.shape[dim] == 1:
        return mask
    parts = [mask.narrow(dim, start, stop - start) for start, stop in runs]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def rows_of(mask: torch.Tensor, layout: Layout, place: int) -> torch.Tensor:
    """The rows of a mask for the queries of a place, padding left out."""
    selected = _select(mask, 2, _runs(layout, place, slice(0, layout.valid_at(place))))
    assert selected is not None
    return selected


def padded(tensor: torch.Tensor, length: int) -> torch.Tensor:
    """[b, h, s, d] with rows of zeros up to a length: those of padding."""
    missing = length - tensor.shape[2]
    return F.pad(tensor, (0, 0, 0, missing)) if missing else tensor


class Merged:
    """Attention of queries [b, h, s_q, d], merged from tiles as they come. Sums are kept in fp32 (fp64 for fp64).

    Two parts with outputs a, b and log-sum-exps x, y make a + sigmoid(y - x)·(b - a) and log(exp(x) + exp(y)).
    """

    def __init__(self, q: torch.Tensor, width: int, scale: float) -> None:
        self._q, self._width, self._scale = q, width, scale
        self._dtype = torch.promote_types(q.dtype, torch.float32)
        self._out: torch.Tensor | None = None
        self._lse: torch.Tensor | None = None

    def add(self, tile: Tile, k: torch.Tensor, v: torch.Tensor) -> None:
        """Let queries see keys: k [b, h_kv, s, d] and v [b, h_kv, s, d_v] that `tile.keys` refers to."""
        q, k, v = self._q[:, :, tile.rows], k[:, :, tile.keys], v[:, :, tile.keys]
        out, lse = attend(q, k, v, causal=tile.causal, mask=tile.mask, scale=self._scale)
        if self._out is None and q.shape[2] == self._q.shape[2]:
            self._out, self._lse = out, lse
            return
        whole_out, whole_lse = self._whole()
        of_out, of_lse = whole_out[:, :, tile.rows], whole_lse[:, :, tile.rows]
        share = torch.sigmoid(lse - of_lse)
        if tile.mask is not None:
            share = share.masked_fill(lse == -float("inf"), 0.0)  # nothing seen, perhaps in no tile yet: -inf - -inf
        of_out.lerp_(out.to(self._dtype), share[..., None])
        of_lse.copy_(torch.logaddexp(of_lse, lse))

    def result(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The output in the dtype of q, 0 for queries that saw nothing, and the log-sum-exp."""
        out, lse = (self._out, self._lse) if self._out is not None else self._whole()
        assert lse is not None
        return out.to(self._q.dtype), lse

    def _whole(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Both sums, to be written to."""
        if self._out is None or self._lse is None:
            shape = self._q.shape[:3]
            self._out = self._q.new_zeros((*shape, self._width), dtype=self._dtype)
            self._lse = self._q.new_full(shape, -float("inf"), dtype=self._dtype)
        self._out = self._out.to(self._dtype)
        return self._out, self._lse


class Differentiated:
    """The backward pass of `Merged`: gradients of keys and values by tile, those of queries summed up."""

    def __init__(self, grad: torch.Tensor, q: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, scale: float) -> None:
        self._all_rows = grad, q, out, lse
        self._scale = scale
        self._dq: torch.Tensor | None = None

    def add(self, tile: Tile, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The gradients of k[:, :, tile.keys] and v[:, :, tile.keys]."""
        grad, q, out, lse = (x[:, :, tile.rows] for x in self._all_rows)
        k, v = k[:, :, tile.keys], v[:, :, tile.keys]
        dq, dk, dv = attend_backward(
            grad, q, k, v, out, lse, causal=tile.causal, mask=tile.mask, scale=self._scale
        )  # fmt: skip
        whole_q = self._all_rows[1]
        if self._dq is None:
            if q.shape[2] == whole_q.shape[2]:
                self._dq = dq
                return dk, dv
            self._dq = torch.zeros_like(whole_q, dtype=torch.promote_types(q.dtype, torch.float32))
        self._dq = self._dq.to(torch.promote_types(q.dtype, torch.float32))
        self._dq[:, :, tile.rows] += dq
        return dk, dv

    def result(self) -> torch.Tensor:
        """The gradient of q."""
        q = self._all_rows[1]
        return torch.zeros_like(q) if self._dq is None else self._dq.to(q.dtype)
