"""From measured speeds and observed trainings to the machines that the planner plans for. Torch-free."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from autolaunch_strategies.planner.constants import TIME_CONSTANTS
from autolaunch_strategies.planner.fit import Run, fit_constants
from autolaunch_strategies.planner.hardware import Curve, Hardware, Link
from autolaunch_strategies.planner.time import share_of_attention

if TYPE_CHECKING:
    from autolaunch_strategies.planner.measure import Measured

NOISE = 0.05
"""Relative standard deviation of a step time in a run of a few steps."""

FREEDOM = 3.0
"""Of costs of the host and of latencies in a calibration: they differ between machines by orders of magnitude, and a
training is run for each of them."""

KNOWN = ("group_s", "cp_s")
"""Costs of the host that are much the same everywhere, and that little tells from waiting for others (`slice_s`)."""

DTENSOR_CALLS = 10
"""Calls on DTensors for each kernel that a profile counts as sharded: views, changes of layout and hooks are calls,
too. In processor time of small Llamas with mp of 2 they were 7 (tensor parallel) to 20 (sequence parallelism)."""

LEAST_HIDDEN = 0.02
"""Constants are positive: their logarithms are fitted."""


def calibrated(base: Hardware, measured: Measured, origin: str) -> Hardware:
    """The machines of `base` with what was measured in place of what was guessed.

    The peak is the best measured rate, so that the share of it that products reach is 1. On a CPU exchanges hide
    nothing but what the overlap probe found: whoever computes takes the core from whoever sends.
    """
    usual = base.constants
    changed: dict[str, float] = {}
    flops = dict(base.flops)
    if measured.flops:
        best = "bf16" if "bf16" in measured.flops else next(iter(measured.flops))
        scale = measured.flops[best] / base.flops.get(best, measured.flops[best])
        flops = {name: value * scale for name, value in base.flops.items()} | measured.flops
        changed["matmul"] = 1.0
    if measured.attention is not None:
        changed["attention"] = measured.attention / share_of_attention(*measured.attention_shape, usual)
    if measured.memory_bytes_per_s is not None:
        changed["memory"] = 1.0
    if measured.kernel_s is not None:
        changed["kernel_s"] = measured.kernel_s
    if measured.mp_kernel_s is not None:
        changed["mp_kernel_s"] = measured.mp_kernel_s * DTENSOR_CALLS
    if measured.hidden is not None:
        hidden = max(measured.hidden, LEAST_HIDDEN)
        changed["hidden_dp"] = hidden
        if base.device == "cpu":
            changed |= {name: min(hidden, getattr(usual, name)) for name in ("hidden_mp", "hidden_cp", "hidden_pp")}
    return dataclasses.replace(
        base,
        flops=flops,
        memory_bytes_per_s=measured.memory_bytes_per_s or base.memory_bytes_per_s,
        intra=_link(measured.curves) or base.intra,
        inter=measured.inter or base.inter,
        curves=measured.curves or base.curves,
        constants=dataclasses.replace(usual, **changed),
        origin=origin,
    )


def _link(curves: Mapping[str, Sequence[Curve]]) -> Link | None:
    """The fast link as the largest measured all-gather, else anything else, sees it: for what has no curve."""
    known = curves.get("all_gather") or next(iter(curves.values()), ())
    if not known:
        return None
    curve = max(known, key=lambda item: item.ranks)
    latency = curve.seconds[0]
    share = (curve.ranks - 1) / curve.ranks
    return Link(share * curve.bytes[-1] / max(curve.seconds[-1] - latency, 1e-9), latency)


def fitted(hardware: Hardware, runs: Sequence[Run]) -> Hardware:
    """The constants changed as far as these trainings on it say; the origin tells how many they were.

    What constants leave unexplained is not kept: of a few steps of models that are alike in nothing but being tiny it
    is noise (corrections by it ordered configurations of other models no better in six calibrations).
    """
    if not runs:
        return hardware
    varied = [name for name in TIME_CONSTANTS if (name.endswith("_s") or name == "latency") and name not in KNOWN]
    freedom = dict.fromkeys(varied, FREEDOM)
    constants = fit_constants(hardware, runs, noise=NOISE, freedom=freedom)
    trainings = "training" if len(runs) == 1 else "trainings"
    return hardware.with_constants(constants, f"{hardware.origin} and fitted to {len(runs)} {trainings}")
