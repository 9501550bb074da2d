"""A plan as plain data, as plan.yaml and the reports have it. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autolaunch_strategies.planner.memory import memory_account
from autolaunch_strategies.planner.plan import SURE, TIGHT, Looked, Plan
from autolaunch_strategies.planner.reasons import reasons
from autolaunch_strategies.planner.settings import overrides
from autolaunch_strategies.planner.stages import cut
from autolaunch_strategies.planner.time import flops_per_step, step_time

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def document(plan: Plan) -> dict[str, Any]:
    """All of it as plain data, in one order, numbers rounded: the same inputs give the same text.

    Keys: chosen (overrides, mesh, ranks, seconds, seconds_low and seconds_high (one standard deviation off),
    tokens_per_second, mfu, memory_bytes, memory_limit_bytes, fits, parts, stages, reasons), alternatives, pareto,
    plateau, counts (considered: fit, may_fit and too_large together; rejected by rules before that), hardware, model,
    warnings. Times are seconds, memory is bytes.
    """
    c, profile, recipe, hardware = plan.chosen, plan.profile, plan.recipe, plan.hardware
    limit = plan.looked.limit
    flops = flops_per_step(profile, recipe)
    tokens = recipe.batch_size * profile.positions / plan.seconds
    peak = hardware.flops.get(recipe.compute)
    chosen = {
        "overrides": overrides(c, profile, recipe),
        "mesh": c.mesh.name,
        "ranks": c.ranks,
        "seconds": plan.seconds,
        "seconds_low": plan.seconds * math.exp(-plan.spread),
        "seconds_high": plan.seconds * math.exp(plan.spread),
        "tokens_per_second": tokens,
        **({"mfu": flops / (plan.seconds * c.ranks * peak)} if peak else {}),
        "memory_bytes": plan.memory_bytes,
        "memory_limit_bytes": limit,
        "fits": _fits(plan.memory_bytes, plan.looked),
        "parts": dict(plan.parts),
        "stages": _stages(plan),
        "reasons": reasons(plan),
    }
    front = _pareto(plan.looked)
    return rounded(
        {
            "chosen": chosen,
            "alternatives": [_row(plan, index, parts) for index, parts in _with_parts(plan, plan.alternatives)],
            "pareto": [_row(plan, index) for index in front],
            "plateau": plan.plateau,
            "counts": {
                "considered": len(plan.looked),
                "fit": int(plan.looked.fits.sum()),
                "may_fit": int((plan.looked.may_fit & ~plan.looked.fits).sum()),
                "too_large": int((~plan.looked.may_fit).sum()),
                "rejected": {item.rule.words: item.count for item in plan.rejections},
            },
            "hardware": {
                "name": hardware.name,
                "nodes": hardware.nodes,
                "devices_per_node": hardware.devices_per_node,
                "origin": hardware.origin,
            },
            "model": {
                "name": profile.name,
                "parameters": profile.parameters,
                "positions": profile.positions,
                "batch_size": recipe.batch_size,
                "flops_per_step": flops,
            },
            "warnings": list(plan.warnings),
        }
    )


def _stages(plan: Plan) -> list[dict[str, Any]]:
    c = plan.chosen
    stages = cut(plan.profile, c.pipeline_name, c.pp, c.virtual_stages, c.split)
    accounts = memory_account(plan.profile, plan.recipe, plan.hardware, c)
    return [
        {"pipe_rank": rank, "blocks": int(stages.sizes[stages.rank_of_stage == rank].sum()), **account}
        for rank, account in enumerate(accounts)
    ]


def _with_parts(plan: Plan, indices: Ints) -> Iterator[tuple[int, dict[str, float]]]:
    times = step_time(plan.profile, plan.recipe, plan.hardware, plan.looked.candidates.select(indices))
    for place, index in enumerate(indices):
        yield int(index), {name: float(values[place]) for name, values in times.parts.items()}


def _row(plan: Plan, index: int, parts: dict[str, float] | None = None) -> dict[str, Any]:
    candidate, seconds = plan.looked.candidates[index], float(plan.looked.seconds[index])
    memory = float(plan.looked.memory_bytes[index])
    row: dict[str, Any] = {
        "overrides": overrides(candidate, plan.profile, plan.recipe),
        "mesh": candidate.mesh.name,
        "seconds": seconds,
        "slower_by": seconds / plan.seconds - 1,
        "memory_bytes": memory,
        "fits": _fits(memory, plan.looked),
    }
    return row if parts is None else {**row, "parts": parts, "note": _note(plan, index)}


def _note(plan: Plan, index: int) -> str:
    looked = plan.looked
    if not looked.fits[index]:
        return ""  # `fits` says so
    fastest = looked.seconds[looked.pool].min()
    if looked.memory_bytes[index] == looked.memory_bytes[looked.pool].min():
        return "needs least memory"
    return "as fast, within the noise" if looked.seconds[index] <= fastest * (1 + plan.noise) else ""


def _pareto(looked: Looked, step: float = 0.01) -> list[int]:
    """Indices that nothing beats in both time and memory, fastest first; each saves `step` of the limit or more."""
    places = np.flatnonzero(looked.may_fit)
    order = places[np.lexsort((looked.memory_bytes[places], looked.seconds[places]))]
    memory = looked.memory_bytes[order]
    falls = np.concatenate([[True], memory[1:] < np.minimum.accumulate(memory)[:-1]])
    front: list[int] = []
    for index in order[falls].tolist():
        if not front or looked.memory_bytes[front[-1]] - looked.memory_bytes[index] >= step * looked.limit:
            front.append(index)
    return front


def _fits(memory_bytes: float, looked: Looked) -> str:
    if memory_bytes <= min(looked.share, SURE) * looked.limit:
        return "yes"
    if memory_bytes <= looked.limit:
        return "tight"
    return "over" if memory_bytes <= TIGHT * looked.limit else "no"


def rounded(value: Any) -> Any:
    """Plain data with numbers of six digits: what differs by less is no difference."""
    if isinstance(value, Mapping):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    if isinstance(value, float | np.floating):
        return float(f"{float(value):.6g}")
    return int(value) if isinstance(value, np.integer) else value
