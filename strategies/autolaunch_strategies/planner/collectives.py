"""How long a collective takes, by kind, by the shape of its group and by its bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from autolaunch_strategies.planner.hardware import COLLECTIVES, Curve, Hardware

Floats = NDArray[np.float64]

RINGS = ("all_gather", "reduce_scatter")
"""What NCCL does in a ring over all ranks, so that latency grows with their number; it reduces over a tree."""
RING_STEPS = ((3.4 / 8, 14.0 / 20, 1.0), (1.9 / 8, 4.0 / 20, 0.92))
"""Of NCCL's protocols Simple and LL128: the latency of one step of a ring within a domain and between nodes, over the
latencies of the links (8 and 20 microseconds in conf/cluster), and its share of the bandwidth (`hwLatencies`
and `busBw` in NCCL's graph/tuning.cc). NCCL takes the faster one."""


def local_members(ranks: Any, stride: Any, domain: int) -> NDArray[np.int64]:
    """How many ranks of a group lie in one domain of fast links; the members of a group are `stride` ranks apart."""
    return np.clip(domain // np.maximum(np.asarray(stride), 1), 1, np.asarray(ranks))


def collective_time(hardware: Hardware, kind: str, ranks: Any, stride: Any, size: Any) -> Floats:
    """Seconds of one collective, for each of n groups.

    All groups of the kind work at once, each with the links of its own members: a group with k members in a domain
    has k ways out of it. What was measured (`hardware.curves`) takes the place of the formula within a domain.

    Args:
        kind: of `COLLECTIVES`. Of p2p, `stride` is the distance to the other rank and `ranks` is 1 where nothing is
            sent.
        ranks, stride: [n]: size of the group, distance of its neighbours in rank numbers.
        size: [n]: bytes that a rank holds of the whole result (all_gather) or of the input (the others).

    Returns:
        [n]; 0 for groups of one.
    """
    assert kind in COLLECTIVES, kind
    ranks, stride, size = np.broadcast_arrays(
        np.asarray(ranks, dtype=np.float64), np.asarray(stride, dtype=np.float64), np.asarray(size, dtype=np.float64)
    )
    constants = hardware.constants
    domain = hardware.domain_size
    if kind == "p2p":
        near = stride < domain
        local, away = np.where(near, 2.0, 1.0), np.where(near, 1.0, 2.0)
        share = np.ones_like(size)
        intra, inter = hardware.intra.bytes_per_s * constants.p2p, hardware.inter.bytes_per_s * constants.p2p
    else:
        local = local_members(ranks, stride, domain).astype(np.float64)
        away = ranks / local
        share = (ranks - 1) / np.maximum(ranks, 1) * (2 if kind == "all_reduce" else 1)
        intra, inter = hardware.intra.bytes_per_s * constants.intra, hardware.inter.bytes_per_s * constants.inter
    if kind == "all_to_all":  # each rank sends to every other one: what leaves the domain leaves by its own way
        seconds = size * (local - 1) / np.maximum(ranks, 1) / intra + size * (ranks - local) / ranks / inter
    else:
        rate = np.where(away > 1, np.minimum(intra, local * inter), intra)
        seconds = size * share / rate
    rounds = 2 if kind == "all_reduce" else 1
    hops = hardware.intra.latency_s * np.log2(np.maximum(local, 1)) + hardware.inter.latency_s * np.log2(away)
    if kind in RINGS and hardware.device == "cuda":
        steps = (ranks - away) * hardware.intra.latency_s, (away - 1) * hardware.inter.latency_s
        seconds = np.minimum.reduce(
            [
                seconds / share + constants.latency * (hardware.intra.latency_s + near * steps[0] + far * steps[1])
                for near, far, share in RING_STEPS
            ]
        )
    else:
        seconds = seconds + rounds * constants.latency * hops
    curves = hardware.curves.get(kind, ())
    if curves:
        inside = (away <= 1) if kind != "p2p" else (local > 1)
        measured = _measured(curves, np.where(kind == "p2p", 2.0, ranks), size, constants.latency)
        seconds = np.where(inside, measured, seconds)
    return np.where(ranks > 1, seconds, 0.0)


def _measured(curves: tuple[Curve, ...], ranks: Floats, size: Floats, latency: float) -> Floats:
    """Between measured group sizes, and beyond them, the seconds are linear in the logarithm of the ranks.

    Args:
        latency: multiple of what the smallest message takes; in training ranks come later to an exchange than in a loop
            of nothing else, which is how curves are measured.
    """
    curves = tuple(sorted(curves, key=lambda curve: curve.ranks))
    table = np.stack([_along(curve, size) + (latency - 1) * curve.seconds[0] for curve in curves])
    if len(curves) == 1:
        return np.asarray(table[0])
    grid = np.log2([curve.ranks for curve in curves])
    wanted = np.log2(np.maximum(ranks, 2))
    upper = np.clip(np.searchsorted(grid, wanted), 1, len(grid) - 1)
    low, high = np.take_along_axis(table, upper[None] - 1, 0)[0], np.take_along_axis(table, upper[None], 0)[0]
    weight = (wanted - grid[upper - 1]) / (grid[upper] - grid[upper - 1])
    nearest = np.where(weight > 0.5, high, low)
    return np.maximum(low + weight * (high - low), 0.5 * nearest)


def _along(curve: Curve, size: Floats) -> Floats:
    """Piecewise linear; below the first point its seconds, beyond the last one its slope goes on."""
    sizes, seconds = np.asarray(curve.bytes, dtype=np.float64), np.asarray(curve.seconds, dtype=np.float64)
    inside = np.interp(size, sizes, seconds)
    if len(sizes) == 1:
        return np.asarray(np.where(size > sizes[-1], seconds[-1] * size / sizes[-1], inside))
    slope = max((seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2]), 0.0)
    return np.asarray(inside + np.maximum(size - sizes[-1], 0) * slope)
