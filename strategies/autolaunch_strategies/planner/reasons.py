"""Why a plan is what it is: what the best way with another value of each setting would cost. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from autolaunch_strategies.planner.candidate import Candidate
from autolaunch_strategies.planner.memory import memory_account
from autolaunch_strategies.planner.plan import Plan
from autolaunch_strategies.planner.time import step_time

_LEVELS = ("dp=ddp", "dp=zero1", "dp=zero2", "dp=fsdp")

PART_WORDS = {
    "compute": "matrix products",
    "attention": "attention",
    "elementwise": "elementwise work",
    "kernels": "launching kernels",
    "mp": "exchange over mp",
    "cp": "exchange over cp",
    "ep": "tokens to experts",
    "pp": "sends between stages",
    "bubble": "waiting in the pipeline",
    "dp": "exchange over dp",
    "optimizer": "the optimizer",
    "fixed": "fixed costs",
}
"""What the parts of `time.PARTS` are, in a sentence."""

_MESH = ("mp", "pp", "cp", "ep")

SEEN = 0.005
"""Share of a step, or of a device's memory, below which a difference is not told as a cause."""


def reasons(plan: Plan) -> list[str]:
    """Sentences, the most telling first: what the best way with another value of a setting would cost, and by what (the
    mesh before the rest); and why this way among those that are as fast. Settings whose best other value is the same
    way are told in one."""
    compared: dict[tuple[bool, int], list[str]] = {}  # (whether it fits, index) -> what is told of it
    told: list[tuple[bool, float, str]] = []
    for name in _settings(plan):
        if name == "compile" and (without := _why_not_compiled(plan)):
            told.append((False, plan.noise, without))
        elif (other := _best_other(plan, name)) is not None:
            compared.setdefault(other, []).append(name)
    told.append((False, plan.noise, _among_the_fastest(plan)))
    for (fits, index), names in compared.items():
        slower = float(plan.looked.seconds[index]) / plan.seconds - 1 if fits else float("inf")
        axes = [name for name in names if name in _MESH]
        of_mesh, names = bool(axes) and slower > plan.noise, axes or names  # schedules go with the mesh
        told.append((of_mesh, slower, (_what_it_costs if fits else _what_it_lacks)(plan, names, index)))
    return [sentence for *_, sentence in sorted(told, key=lambda item: item[:2], reverse=True)]


def _settings(plan: Plan) -> list[str]:
    """Fields of the chosen candidate that have a meaning for it, in the order in which they are told."""
    chosen = plan.chosen
    fields = ["mp", "pp", "cp", "level"]
    fields += ["pipeline"] if chosen.pp > 1 else []
    fields += ["virtual_stages"] if chosen.virtual_stages > 2 else []
    fields += ["backend"] if chosen.cp > 1 else []
    fields += ["sequence_parallel"] if chosen.mp > 1 else []
    fields += ["ep"] if plan.profile.experts else []
    return [*fields, "recompute", "compile", "microbatches"]


def _why_not_compiled(plan: Plan) -> str:
    """Why blocks are not compiled where that is not for the time of a step; empty where it is."""
    if plan.short:
        return f"compile=false: {plan.short}."
    if plan.looked.candidates.compile.any() or "compile" in plan.wanted:
        return ""
    refused = plan.rejections.of(Candidate(compile=1))
    reasons = [reason for rule, reason in refused if rule.startswith("compile")]
    return f"compile=false: {reasons[0]}." if reasons else ""


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
    if name == "compile":
        return f"compile={str(candidate.compile == 1).lower()}"
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
    fit = "fit" if looked.fits.any() else "may fit"
    ways = f"{near:,} ways that {fit} are predicted to take the same time within the noise of {plan.noise:.0%}"
    slower = plan.seconds / fastest - 1
    if slower < 0.0005:
        return f"{ways}: this is the simplest of them, and the fastest."
    return f"{ways}: this is the simplest of them, {slower:.1%} slower than the fastest."


def _best_other(plan: Plan, name: str) -> tuple[bool, int] | None:
    """(whether it fits, index) of the fastest way with any other value of a field, or of the one that comes closest to
    fitting; None if there is no such way at all."""
    looked, chosen = plan.looked, plan.chosen
    others: NDArray[np.bool_] = getattr(looked.candidates, name) != getattr(chosen, name)
    if name == "level":
        # What has one rank to share with is level 0, whatever was asked for; that is the mesh's doing, not the level's.
        alone = looked.candidates.dp * looked.candidates.cp == 1
        if chosen.dp * chosen.cp == 1:
            return None
        others &= ~alone
    if name in ("pipeline", "virtual_stages"):
        others &= looked.candidates.pp > 1
    if name == "sequence_parallel":
        others &= looked.candidates.mp > 1
    if name == "backend":
        others &= looked.candidates.cp > 1
    if not others.any():
        return None
    fitting = np.flatnonzero(others & looked.pool)
    if len(fitting):
        return True, int(fitting[looked.seconds[fitting].argmin()])
    return False, int(np.flatnonzero(others)[looked.memory_bytes[others].argmin()])


def _values(candidate: Candidate, names: list[str]) -> str:
    return ", ".join(setting(candidate, name) for name in names)


def _there(plan: Plan, other: Candidate, names: list[str]) -> str:
    """The other values, and what else goes best with them."""
    with_it = [
        name
        for name in (*_MESH, "recompute", "compile")
        if name not in names and getattr(other, name) != getattr(plan.chosen, name)
    ]
    return _values(other, names) + (f" (best with {_values(other, with_it)})" if with_it else "")


def _what_it_lacks(plan: Plan, names: list[str], index: int) -> str:
    """Of what does not fit: how much it needs, and what takes more than in the chosen way."""
    looked, other = plan.looked, plan.looked.candidates[index]
    need, room = in_bytes(float(looked.memory_bytes[index])), in_bytes(looked.share * looked.limit)
    there = _there(plan, other, names)
    more = _first_clauses(
        _memory_differences(plan, other), SEEN * looked.limit, lambda name, size: f"{in_bytes(size)} more {name}"
    )
    by = f" ({more})" if more else ""
    here = _values(plan.chosen, names)
    return f"{here}: nothing else fits; {there} comes closest and needs {need}{by} where {room} may be used."


def _what_it_costs(plan: Plan, names: list[str], index: int) -> str:
    """Of what fits: how much longer it takes, by which parts of a step, and what it would save."""
    looked, other = plan.looked, plan.looked.candidates[index]
    seconds = float(looked.seconds[index])
    difference = seconds / plan.seconds - 1
    here, there = _values(plan.chosen, names), _there(plan, other, names)
    times = step_time(plan.profile, plan.recipe, plan.hardware, looked.candidates.select([index]))
    parts = {
        PART_WORDS.get(name, name): (float(values[0]) - plan.parts[name]) / plan.seconds
        for name, values in times.parts.items()
    }
    less_memory = plan.memory_bytes - float(looked.memory_bytes[index])
    if difference > plan.noise:
        costs = _first_clauses(parts, SEEN, "{} (+{:.1%} of the step)".format)
        less = {name: -share for name, share in parts.items()}
        saves = _first_clauses(less, SEEN, "{} (-{:.1%} of the step)".format, most=1)
        gains = [f"need {in_bytes(less_memory)} less memory"] if less_memory >= SEEN * looked.limit else []
        gains += [f"save {saves}"] if saves else []
        but = f"would {' and '.join(gains)}, but adds" if gains and costs else "adds"
        by = f"{but} {costs}: " if costs else "takes "
        return f"{here}: {there} {by}{difference:+.1%} ({in_seconds(seconds)})."
    near = f"{abs(difference):.1%} {'slower' if difference > 0 else 'faster'}"
    near = "as fast" if abs(difference) < 0.0005 else near
    simpler, more_complex = plan.simplicity, int(looked.simplicity[index])
    but = ", and less simple" if more_complex > simpler else ""
    if more_complex == simpler and less_memory < 0:
        but = f", and needs {in_bytes(-less_memory)} more memory"
    return f"{here}: the best way with {there} is {near}, which is within the noise{but}."


def _memory_differences(plan: Plan, other: Candidate) -> dict[str, float]:
    """Kind of memory -> bytes that a rank of the fullest stage has more of than that of the chosen way."""
    here, there = (
        max(memory_account(plan.profile, plan.recipe, plan.hardware, way), key=lambda stage: stage["total"])
        for way in (plan.chosen, other)
    )
    return {name: there[name] - here[name] for name in there if name not in ("total", "other")}


def _first_clauses(
    differences: Mapping[str, float], least: float, write: Callable[[str, float], str], most: int = 2
) -> str:
    """The largest differences in words, at most so many of them; empty if none is at least so large."""
    largest = sorted(differences.items(), key=lambda item: -item[1])[:most]
    return " and ".join(write(name, amount) for name, amount in largest if amount >= least)
