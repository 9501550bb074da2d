"""Why a plan is what it is: what the best way with another value of each setting would cost. Torch-free."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from autolaunch_strategies.planner.candidate import Candidate
from autolaunch_strategies.planner.plan import Plan

_LEVELS = ("dp=ddp", "dp=zero1", "dp=zero2", "dp=fsdp")


def reasons(plan: Plan) -> list[str]:
    """Sentences: why this way among those that are as fast, then for each setting what any other value costs."""
    sentences = [_among_the_fastest(plan)]
    chosen = plan.chosen
    fields = ["mp", "pp", "cp", "level"]
    fields += ["pipeline"] if chosen.pp > 1 else []
    fields += ["virtual_stages"] if chosen.virtual_stages > 2 else []
    fields += ["backend"] if chosen.cp > 1 else []
    fields += ["sequence_parallel"] if chosen.mp > 1 else []
    fields += ["ep"] if plan.profile.experts else []
    fields += ["recompute", "microbatches"]
    return [*sentences, *(sentence for name in fields if (sentence := _against_others(plan, name)))]


def setting(candidate: Candidate, name: str) -> str:
    """One field of a candidate as people write it: ``mp=4``, ``dp=fsdp``, ``pp=1f1b``, ``recompute=full``."""
    if name == "level":
        return _LEVELS[candidate.level]
    if name == "pipeline":
        return f"pp={candidate.pipeline_name}"
    if name == "backend":
        return f"cp={candidate.backend_name}"
    if name == "recompute":
        return f"recompute={candidate.recompute_name}"
    if name == "sequence_parallel":
        return f"mp={'seq_parallel' if candidate.sequence_parallel else 'tensor_parallel'}"
    return f"{name}={getattr(candidate, name)}"


def in_seconds(seconds: float) -> str:
    """A time with three digits: ``4.21 s``, ``31.2 ms``, ``125 us``."""
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if abs(seconds) * factor >= 0.9995:
            return f"{_three_digits(seconds * factor)} {unit}"
    return f"{_three_digits(seconds * 1e6)} us"


def in_bytes(size: float) -> str:
    """Memory with a binary unit: ``74.0 GiB``, ``512.0 MiB``."""
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if size >= 1024**power or power == 1:
            return f"{size / 1024**power:,.1f} {unit}"
    raise AssertionError


def _three_digits(number: float) -> str:
    digits = 0 if abs(number) >= 99.95 else 1 if abs(number) >= 9.995 else 2
    return f"{number:,.{digits}f}"


def _among_the_fastest(plan: Plan) -> str:
    looked = plan.looked
    pool = np.flatnonzero(looked.pool)
    fastest = float(looked.seconds[pool].min())
    near = int((looked.seconds[pool] <= fastest * (1 + plan.noise)).sum())
    if near == 1:
        return f"No other way is predicted to be within {plan.noise:.0%} of its {in_seconds(plan.seconds)}."
    ways = f"{near:,} ways are predicted to take the same time within the noise of {plan.noise:.0%}"
    slower = plan.seconds / fastest - 1
    if slower < 0.0005:
        return f"{ways}: this is the simplest of them, and the fastest."
    return f"{ways}: this is the simplest of them, {slower:.1%} slower than the fastest."


def _against_others(plan: Plan, name: str) -> str:
    """What the best way with any other value of a field costs; empty if there is no such way at all."""
    looked, chosen = plan.looked, plan.chosen
    here = setting(chosen, name)
    others: NDArray[np.bool_] = getattr(looked.candidates, name) != getattr(chosen, name)
    if name == "level":
        # What has one rank to share with is level 0, whatever was asked for; that is the mesh's doing, not the level's.
        alone = looked.candidates.dp * looked.candidates.cp == 1
        if chosen.dp * chosen.cp == 1:
            return ""
        others &= ~alone
    if name in ("pipeline", "virtual_stages"):
        others &= looked.candidates.pp > 1
    if name == "sequence_parallel":
        others &= looked.candidates.mp > 1
    if name == "backend":
        others &= looked.candidates.cp > 1
    if not others.any():
        return ""
    fitting = np.flatnonzero(others & looked.pool)
    if not len(fitting):
        closest = np.flatnonzero(others)[looked.memory_bytes[others].argmin()]
        there = setting(looked.candidates[int(closest)], name)
        need = in_bytes(float(looked.memory_bytes[closest]))
        room = in_bytes(looked.share * looked.limit)
        return f"{here}: nothing else fits; {there} comes closest and needs {need} where {room} may be used."
    best = int(fitting[looked.seconds[fitting].argmin()])
    there = setting(looked.candidates[best], name)
    seconds = float(looked.seconds[best])
    difference = seconds / plan.seconds - 1
    if difference > plan.noise:
        return f"{here}: the best way with another value, {there}, takes {difference:+.1%} ({in_seconds(seconds)})."
    near = f"{abs(difference):.1%} {'slower' if difference > 0 else 'faster'}"
    near = "as fast" if abs(difference) < 0.0005 else near
    simpler, other = plan.simplicity, int(looked.simplicity[best])
    more = float(looked.memory_bytes[best]) - plan.memory_bytes
    but = ", and less simple" if other > simpler else ""
    if other == simpler and more > 0:
        but = f", and needs {in_bytes(more)} more memory"
    return f"{here}: the best way with {there} is {near}, which is within the noise{but}."
