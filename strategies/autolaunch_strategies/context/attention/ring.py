"""Ring attention: keys and values go once round, and each place computes with those at hand while the next travel.

Ring attention is Liu et al., 2023; the gradient of keys and values travels with them, as in its flash versions.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist

from autolaunch_strategies.context.attention.exchange import Passing, pack, unpack
from autolaunch_strategies.context.attention.operator import KeyExchange
from autolaunch_strategies.context.attention.tiles import Differentiated, Merged, ring_tile

_KEYS, _GRADIENTS = 1, 2


class PassedKeys(KeyExchange):
    """Keys and values of all places one after the other."""

    def attend(self, merged: Merged, k: torch.Tensor, v: torch.Tensor) -> None:
        for origin, keys, values in _round(k, v, self.group):
            tile = ring_tile(self.layout, self.place, origin, self.causal, self.mask)
            if tile is not None:
                merged.add(tile, keys, values)

    def differentiate(
        self, parts: Differentiated, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        shapes = [k.shape, v.shape]
        own, total, arriving = _zeros(k, v), _zeros(k, v), None
        spare = torch.empty_like(total)
        for origin, keys, values in _round(k, v, self.group):
            tile = ring_tile(self.layout, self.place, origin, self.causal, self.mask)
            of_tile = None if tile is None else parts.add(tile, keys, values)
            if arriving is not None:
                # What the places before found for the keys at hand; it came while this one computed.
                total, spare = arriving.wait(), total
            if tile is not None and of_tile is not None:
                for whole, part in zip(unpack(own if origin == self.place else total, shapes), of_tile, strict=True):
                    whole[:, :, tile.keys] += part
            if origin != self.place:
                arriving = Passing(total, spare, self.group, _GRADIENTS)
        if arriving is not None:
            own += arriving.wait()
        dk, dv = unpack(own, shapes)
        return dk, dv


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
