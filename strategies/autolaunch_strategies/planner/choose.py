"""What to run, of everything that could be: the simplest way among those predicted to be as fast. Torch-free."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from autolaunch_strategies.config import ConfigError
from autolaunch_strategies.planner.candidate import FIELDS, Candidates
from autolaunch_strategies.planner.enumerate import Rejections, Space, codes, divisors
from autolaunch_strategies.planner.hardware import Hardware
from autolaunch_strategies.planner.impossible import Asked, impossible, nothing_runs
from autolaunch_strategies.planner.memory import Counted, peak_memory
from autolaunch_strategies.planner.plan import MEASURED, SURE, TIGHT, Looked, Plan
from autolaunch_strategies.planner.profile import ModelProfile, Recipe
from autolaunch_strategies.planner.reasons import in_bytes, in_seconds
from autolaunch_strategies.planner.settings import overrides
from autolaunch_strategies.planner.shortage import changes
from autolaunch_strategies.planner.time import step_time
from autolaunch_strategies.planner.uncertainty import spread

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

ALIKE = 2
"""Alternatives of one cell (mp, pp, recompute)."""

REFINED, ROUNDS = 200, 4
"""The fastest of a first look, of which all variants are looked at, and how often: variants of variants are found in
the second round, as a schedule that fits only with another level."""

FEWER = 32
"""Smaller numbers of devices that are tried where nothing can be run on all of them."""

COMPILE_S = 40.0
"""Seconds to compile one kind of block for both passes, on every rank at once: what torch 2.13 took here for blocks of
Llama on one core, C++ in place of Triton, was 30 to 60. Not measured on a GPU."""

SAMPLES = 16
"""Draws of the constants from which the uncertainty of a prediction is estimated."""


def make_plan(
    profile: ModelProfile,
    recipe: Recipe,
    hardware: Hardware,
    wanted: Mapping[str, Sequence[int]] | None = None,
    memory_share: float | None = None,
    noise: float = 0.03,
    top: int = 10,
) -> Plan:
    """Choose how to run a training on a cluster: of the candidates that fit and are predicted to be within `noise` of
    the fastest, the simplest; of these, the one that needs least memory.

    Args:
        wanted: field of `Candidate` -> the values it may have; see `enumerate.enumerate_candidates`.
        memory_share: of a device's memory, what a candidate may need to fit for sure. Those that need up to `TIGHT` of
            it may fit as well: they are chosen only if no other fits. None: `SURE`, or `MEASURED` where what memory
            holds besides tensors was measured.
        top: how many alternatives are kept, at most `ALIKE` with the same mp, pp and recomputation.

    Raises:
        ConfigError: nothing can be run, or nothing fits; it says what comes closest and what would help.
    """
    wanted = dict(wanted or {})
    if memory_share is None:
        memory_share = MEASURED if hardware.margin_measured else SURE
    rejections, looked, warnings = _look(profile, recipe, hardware, wanted, memory_share)
    index = pick(looked, noise)
    short = _too_short(profile, recipe, looked, index, noise)
    if short:
        looked = looked.select(np.flatnonzero(looked.candidates.compile == 0))  # the others are no ways any more
        index = pick(looked, noise)
    chosen = looked.candidates.select([index])
    times = step_time(profile, recipe, hardware, chosen)
    if not looked.fits[index]:
        warnings.append(
            f"The choice may not fit: it is predicted to need {in_bytes(looked.memory_bytes[index])} of "
            f"{in_bytes(looked.limit)}, and nothing is predicted to need less than {memory_share:.0%} of them"
        )
    elif tight := _tight(looked, index, noise):
        warnings.append(tight)
    if chosen.mp[0] > hardware.domain_size:
        warnings.append(f"{chosen.mp[0]} ranks of mp are more than the {hardware.domain_size} devices of a fast domain")
    if chosen.ep[0] > hardware.domain_size:
        warnings.append(
            f"Tokens leave the node on their way to their experts: {chosen.ep[0]} ranks of ep are more than the "
            f"{hardware.domain_size} devices of a fast domain"
        )
    if recipe.compute in ("bf16", "fp16", "fp8") and any(
        item.one_by_one for kind in profile.kinds for item in kind.matmuls
    ):
        warnings.append(
            "Experts multiply one after the other, not in bf16, since autocast knows no product of groups: "
            "dp.param_dtype=bf16, where dp shards, or precision=bf16-true is faster"
        )
    return Plan(
        profile,
        recipe,
        hardware,
        wanted,
        memory_share,
        noise,
        looked,
        rejections,
        chosen[0],
        float(looked.seconds[index]),
        {name: float(values[0]) for name, values in times.parts.items()},
        float(looked.memory_bytes[index]),
        float(spread(profile, recipe, hardware, chosen, SAMPLES)[0]),
        _alternatives(looked, index, top),
        tuple(warnings),
        short,
    )


def look(
    profile: ModelProfile,
    recipe: Recipe,
    hardware: Hardware,
    wanted: Mapping[str, Sequence[int]],
    memory_share: float = SURE,
) -> tuple[Rejections, Looked]:
    """Everything that could be run, with its predictions; of a large space the variants of the fastest only."""
    space, counted = Space(profile, recipe, hardware, wanted), Counted()
    looked = predicted(profile, recipe, hardware, space.candidates(), memory_share, counted)
    if space.complete or not len(looked):
        return space.rejections, looked
    found, best = [looked], looked
    known = set(_rows(looked.candidates).tolist())
    for _ in range(ROUNDS):
        # Where nothing fits, the variants of what comes closest.
        order = np.argsort(np.where(best.pool, best.seconds, np.inf) if best.may_fit.any() else best.memory_bytes)
        best = best.select(order[:REFINED])
        variants = space.variants(best.candidates)
        rows = _rows(variants).tolist()
        fresh = variants.select(np.array([row not in known for row in rows], dtype=np.bool_))
        known.update(rows)
        found.append(predicted(profile, recipe, hardware, fresh, memory_share, counted))
        best = _merged([best, found[-1]])
    return space.rejections, _merged(found)


def predicted(
    profile: ModelProfile,
    recipe: Recipe,
    hardware: Hardware,
    candidates: Candidates,
    memory_share: float = SURE,
    counted: Counted | None = None,
) -> Looked:
    """Candidates with their predictions, the fastest first."""
    memory = peak_memory(profile, recipe, hardware, candidates, counted)
    seconds = np.full(len(candidates), np.inf)
    may_fit = memory.bytes <= TIGHT * memory.limit
    if may_fit.any():
        seconds[may_fit] = step_time(profile, recipe, hardware, candidates.select(may_fit)).seconds
    return _sorted(Looked(candidates, seconds, memory.bytes, memory.limit, memory_share))


def pick(looked: Looked, noise: float) -> int:
    """The index of the candidate to run: of those within `noise` of the fastest, the simplest, then the smallest."""
    pool = np.flatnonzero(looked.pool)
    assert len(pool), "nothing fits"
    near = pool[looked.seconds[pool] <= looked.seconds[pool].min() * (1 + noise)]
    c = looked.candidates.select(near)
    # Memory in steps of a percent: what differs by less is the faster one's.
    memory = np.round(looked.memory_bytes[near] / looked.limit, 2)
    last = [getattr(c, name) for name in FIELDS]
    order = np.lexsort((*last, looked.seconds[near], memory, looked.simplicity[near]))
    return int(near[order[0]])


def diverse(looked: Looked, top: int) -> Ints:
    """Indices of the fastest that may fit, at most `ALIKE` with the same mp, pp and recomputation, fastest first.

    Without those that recompute what need not be: what is the same but for that fits, too.
    """
    places = np.flatnonzero(looked.may_fit)
    c = looked.candidates.select(places)
    cells = (c.mp * 1_000_003 + c.pp) * 1_000_003 + c.recompute
    fastest: list[Ints] = []
    for _ in range(ALIKE):
        _, first = np.unique(cells, return_index=True)
        fastest.append(places[first])
        rest = np.ones(len(places), dtype=bool)
        rest[first] = False
        places, cells = places[rest], cells[rest]
    chosen = np.sort(np.concatenate(fastest))
    c = looked.candidates
    row = codes(*(getattr(c, name) for name in FIELDS if name != "recompute"))
    pointless = (c.recompute[chosen] != 0) & np.isin(row[chosen], row[looked.fits & (c.recompute == 0)])
    return np.asarray(chosen[~pointless][:top], dtype=np.int64)


# --- steps of it -----------------------------------------------------------------------------------------------------


def _look(
    profile: ModelProfile,
    recipe: Recipe,
    hardware: Hardware,
    wanted: dict[str, Sequence[int]],
    memory_share: float,
) -> tuple[Rejections, Looked, list[str]]:
    """As `look`, on fewer devices if nothing fits on all of them."""
    rejections, looked = look(profile, recipe, hardware, wanted, memory_share)
    if len(looked) and looked.may_fit.any():
        return rejections, looked, []
    if "devices" not in wanted:
        for devices in _fewer(hardware):
            _, fewer = look(profile, recipe, hardware, {**wanted, "devices": (devices,)}, memory_share)
            if len(fewer) and fewer.may_fit.any():
                idle = f"{hardware.devices - devices} of {hardware.devices} devices stay idle: "
                why = _nothing_fits(looked) if len(looked) else nothing_runs(rejections)
                wanted["devices"] = (devices,)
                return rejections, fewer, [idle + why]
            if len(looked) and len(fewer) and fewer.memory_bytes.min() >= looked.memory_bytes.min():
                break  # fewer devices need more memory: no use
    where = f"{profile.name} on {hardware.devices} x {hardware.name}"

    def look_at(recipe: Recipe, hardware: Hardware, wanted: Mapping[str, Sequence[int]]) -> Looked:
        return look(profile, recipe, hardware, wanted, memory_share)[1]

    if not len(looked):
        raise impossible(Asked(where, profile, rejections, hardware, wanted, partial(look_at, recipe)))
    closest = looked.candidates[int(looked.memory_bytes.argmin())]
    helps = changes(look_at, recipe, hardware, wanted, float(looked.memory_bytes.min()))
    fits = [str(change) for change in helps if change.fits]
    close = [str(change) for change in helps if not change.fits]
    raise ConfigError(
        where,
        _nothing_fits(looked),
        "; ".join(
            [
                *([f"what would fit: {', '.join(fits)}"] if fits else []),
                *([f"the change that comes closest: {', '.join(close)}"] if close else []),
                *(
                    ["a smaller batch needs no less, and nothing is left to recompute"]
                    if all(change.line.startswith("cluster=") for change in helps)
                    else []
                ),
                "else shorter sequences, a smaller model, an optimizer with less state, or narrower types "
                "(precision=bf16-true)",
                "closest comes " + " ".join(overrides(closest, profile, recipe)),
            ]
        ),
        next((change.line for change in helps if change.fits), ""),
    )


def _tight(looked: Looked, chosen: int, noise: float) -> str:
    """What to measure where that would allow something that is faster by more than the noise; else empty."""
    near = np.flatnonzero(~looked.fits & (looked.memory_bytes <= MEASURED * looked.limit))
    if not len(near) or looked.seconds[near[0]] * (1 + noise) >= looked.seconds[chosen]:
        return ""
    faster = looked.seconds[chosen] / looked.seconds[near[0]] - 1
    return (
        f"{faster:.0%} faster, but tight, with {looked.memory_bytes[near[0]] / looked.limit:.1%} of the memory: it may "
        "be chosen once cluster.constants.context_bytes (bytes that are in use beside torch's) and "
        "cluster.constants.fragmentation (reserved over allocated at the peak, minus 1) say what was measured"
    )


def _too_short(profile: ModelProfile, recipe: Recipe, looked: Looked, chosen: int, noise: float) -> str:
    """Why a training ends before its compiled blocks have gained what compiling them takes; empty if it does not."""
    eager = looked.select(np.flatnonzero(looked.candidates.compile == 0))
    if recipe.steps is None or not looked.candidates.compile[chosen] or not eager.pool.any():
        return ""
    if looked.fits[chosen] and not eager.fits.any():
        return ""
    gained = recipe.steps * float(eager.seconds[pick(eager, noise)] - looked.seconds[chosen])
    takes = COMPILE_S * len(profile.kinds)
    if gained > takes:
        return ""
    return (
        f"compile=true would gain {in_seconds(max(gained, 0.0))} in {recipe.steps:,} steps, and compiling takes about "
        f"{in_seconds(takes)}"
    )


def _fewer(hardware: Hardware) -> list[int]:
    """Smaller numbers of devices, the largest first: whole nodes as far as there are several."""
    node = hardware.devices_per_node
    nodes = [count * node for count in range(hardware.nodes - 1, 0, -1)]
    within = list(range(min(node, hardware.devices) - 1, 0, -1))
    if len(nodes) > FEWER // 2:  # all that are near, then those with many divisors
        powers = [
            count for count in nodes[FEWER // 2 :] if len(divisors(count // node)) == (count // node).bit_length()
        ]
        nodes = [*nodes[: FEWER // 2], *[count for count in powers if count // node & (count // node - 1) == 0]]
    return [*nodes, *within][:FEWER]


def _nothing_fits(looked: Looked) -> str:
    least = float(looked.memory_bytes.min())
    return f"nothing fits: a device has {in_bytes(looked.limit)}, and the least that one needs is {in_bytes(least)}"


def _sorted(looked: Looked) -> Looked:
    return looked.select(np.argsort(looked.seconds, kind="stable"))


def _rows(candidates: Candidates) -> Ints:
    """[n]: a number for each of them, equal for equal ones."""
    return codes(*(getattr(candidates, name) for name in FIELDS))


def _merged(found: Sequence[Looked]) -> Looked:
    """All of them, the fastest first."""
    columns = {name: np.concatenate([getattr(item.candidates, name) for item in found]) for name in FIELDS}
    return _sorted(
        dataclasses.replace(
            found[0],
            candidates=Candidates(**columns),
            seconds=np.concatenate([item.seconds for item in found]),
            memory_bytes=np.concatenate([item.memory_bytes for item in found]),
        )
    )


def _alternatives(looked: Looked, chosen: int, top: int) -> Ints:
    """The fastest of different kinds, and what needs least memory, without the chosen one."""
    alternatives = [index for index in diverse(looked, top + 1).tolist() if index != chosen][:top]
    least = int(np.flatnonzero(looked.may_fit)[looked.memory_bytes[looked.may_fit].argmin()])
    if top and least != chosen and least not in alternatives:
        alternatives = [*alternatives[: top - 1], least]
    return np.asarray(sorted(alternatives), dtype=np.int64)
