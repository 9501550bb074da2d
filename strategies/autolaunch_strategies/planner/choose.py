"""What to run, of everything that could be: the simplest way among those predicted to be as fast. Torch-free."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autolaunch_strategies.config import ConfigError
from autolaunch_strategies.planner.candidate import FIELDS, PIPELINES, Candidate, Candidates
from autolaunch_strategies.planner.enumerate import Rejections, Space, codes, divisors
from autolaunch_strategies.planner.hardware import Hardware
from autolaunch_strategies.planner.memory import memory_account, peak_memory
from autolaunch_strategies.planner.profile import ModelProfile, Recipe
from autolaunch_strategies.planner.reasons import in_bytes, reasons
from autolaunch_strategies.planner.settings import overrides
from autolaunch_strategies.planner.stages import cut
from autolaunch_strategies.planner.time import flops_per_step, step_time
from autolaunch_strategies.planner.uncertainty import spread

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

TIGHT = 1.05
"""Share of a device's memory up to which a prediction may be wrong and the candidate fit after all."""

BANDS = (0.01, 0.03, 0.05, 0.1)
"""For which shares of the least time it is counted how many candidates are within them."""

ALIKE = 2
"""Alternatives of one cell (mp, pp, recompute)."""

REFINED = 200
"""The fastest of a first look, of which all variants are looked at."""

FEWER = 32
"""Smaller numbers of devices that are tried where nothing can be run on all of them."""

SAMPLES = 16
"""Draws of the constants from which the uncertainty of a prediction is estimated."""


@dataclass(frozen=True)
class Looked:
    """Candidates with their predictions, the fastest first; those that do not fit have no time, and come last."""

    candidates: Candidates
    seconds: Floats
    """[n]; infinite where the memory does not fit."""
    memory_bytes: Floats
    """[n]: of the fullest device."""
    limit: float
    """Bytes that a device has."""
    share: float
    """Up to which share of them a candidate fits for sure; from there to `TIGHT` it may."""

    def __len__(self) -> int:
        return len(self.seconds)

    @property
    def fits(self) -> NDArray[np.bool_]:
        """[n]: which fit for sure."""
        return self.memory_bytes <= self.share * self.limit

    @property
    def may_fit(self) -> NDArray[np.bool_]:
        """[n]: which fit, or may."""
        return self.memory_bytes <= TIGHT * self.limit

    @property
    def pool(self) -> NDArray[np.bool_]:
        """[n]: those of which one is chosen: that fit for sure; if none does, that may."""
        return self.fits if self.fits.any() else self.may_fit

    @cached_property
    def simplicity(self) -> Ints:
        """[n]: see `simplicity`."""
        return simplicity(self.candidates)

    def select(self, which: Any) -> Looked:
        """Those that a mask or an array of indices names."""
        return dataclasses.replace(
            self,
            candidates=self.candidates.select(which),
            seconds=self.seconds[which],
            memory_bytes=self.memory_bytes[which],
        )


@dataclass(frozen=True)
class Plan:
    """What was chosen for a training on a cluster, and out of what."""

    profile: ModelProfile
    recipe: Recipe
    hardware: Hardware
    wanted: Mapping[str, Sequence[int]]
    memory_share: float
    noise: float
    """Relative differences of predicted times below this are none."""
    looked: Looked
    rejections: Rejections
    chosen: Candidate
    seconds: float
    parts: Mapping[str, float]
    """Name of `time.PARTS` -> seconds; they add up to `seconds`."""
    memory_bytes: float
    spread: float
    """Relative standard deviation of `seconds`."""
    alternatives: Ints
    """Indices in `looked`: the fastest of each kind, the one that needs least memory; without the chosen one."""
    warnings: tuple[str, ...] = ()

    @property
    def simplicity(self) -> int:
        """Of the chosen one; see `simplicity`."""
        return int(simplicity(Candidates.of([self.chosen]))[0])

    @property
    def plateau(self) -> dict[str, int]:
        """How many candidates are within a share of the least time."""
        seconds = self.looked.seconds[self.looked.pool]
        return {f"{band:.0%}": int((seconds <= seconds.min() * (1 + band)).sum()) for band in BANDS}

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain data, in one order, numbers rounded: the same inputs give the same text.

        Keys: chosen (overrides, mesh, ranks, seconds, seconds_low and seconds_high (one standard deviation off),
        tokens_per_second, mfu, memory_bytes, memory_limit_bytes, fits, parts, stages, reasons), alternatives, pareto,
        plateau, counts (considered, fit, rejected), hardware, model, warnings. Times are seconds, memory is bytes.
        """
        c, profile, recipe, hardware = self.chosen, self.profile, self.recipe, self.hardware
        limit = self.looked.limit
        flops = flops_per_step(profile, recipe)
        tokens = recipe.batch_size * profile.positions / self.seconds
        peak = hardware.flops.get(recipe.compute)
        chosen = {
            "overrides": overrides(c, profile, recipe),
            "mesh": c.mesh.name,
            "ranks": c.ranks,
            "seconds": self.seconds,
            "seconds_low": self.seconds * math.exp(-self.spread),
            "seconds_high": self.seconds * math.exp(self.spread),
            "tokens_per_second": tokens,
            **({"mfu": flops / (self.seconds * c.ranks * peak)} if peak else {}),
            "memory_bytes": self.memory_bytes,
            "memory_limit_bytes": limit,
            "fits": _fits(self.memory_bytes, self.looked),
            "parts": dict(self.parts),
            "stages": self._stages(),
            "reasons": reasons(self),
        }
        front = _pareto(self.looked)
        return rounded(
            {
                "chosen": chosen,
                "alternatives": [self._row(index, parts) for index, parts in self._with_parts(self.alternatives)],
                "pareto": [self._row(index) for index in front],
                "plateau": self.plateau,
                "counts": {
                    "considered": len(self.looked),
                    "fit": int(self.looked.fits.sum()),
                    "rejected": self._rejected(),
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
                "warnings": list(self.warnings),
            }
        )

    def _rejected(self) -> dict[str, int]:
        counts = {item.rule.words: item.count for item in self.rejections}
        without_room = len(self.looked) - int(self.looked.may_fit.sum())
        return {**({"memory": without_room} if without_room else {}), **counts}

    def _stages(self) -> list[dict[str, Any]]:
        c = self.chosen
        found = cut(self.profile, c.pipeline_name, c.pp, c.virtual_stages, c.split)
        accounts = memory_account(self.profile, self.recipe, self.hardware, c)
        return [
            {"pipe_rank": rank, "blocks": int(found.sizes[found.rank_of_stage == rank].sum()), **account}
            for rank, account in enumerate(accounts)
        ]

    def _with_parts(self, indices: Ints) -> Iterator[tuple[int, dict[str, float]]]:
        times = step_time(self.profile, self.recipe, self.hardware, self.looked.candidates.select(indices))
        for place, index in enumerate(indices):
            yield int(index), {name: float(values[place]) for name, values in times.parts.items()}

    def _row(self, index: int, parts: dict[str, float] | None = None) -> dict[str, Any]:
        candidate, seconds = self.looked.candidates[index], float(self.looked.seconds[index])
        memory = float(self.looked.memory_bytes[index])
        row: dict[str, Any] = {
            "overrides": overrides(candidate, self.profile, self.recipe),
            "mesh": candidate.mesh.name,
            "seconds": seconds,
            "slower_by": seconds / self.seconds - 1,
            "memory_bytes": memory,
            "fits": _fits(memory, self.looked),
        }
        return row if parts is None else {**row, "parts": parts, "note": self._note(index)}

    def _note(self, index: int) -> str:
        looked = self.looked
        if not looked.fits[index]:
            return ""  # `fits` says so
        fastest = looked.seconds[looked.pool].min()
        if looked.memory_bytes[index] == looked.memory_bytes[looked.pool].min():
            return "needs least memory"
        return "as fast, within the noise" if looked.seconds[index] <= fastest * (1 + self.noise) else ""


def make_plan(
    profile: ModelProfile,
    recipe: Recipe,
    hardware: Hardware,
    wanted: Mapping[str, Sequence[int]] | None = None,
    memory_share: float = 0.92,
    noise: float = 0.03,
    top: int = 10,
) -> Plan:
    """Choose how to run a training on a cluster: of the candidates that fit and are predicted to be within `noise` of
    the fastest, the simplest; of these, the one that needs least memory.

    Args:
        wanted: field of `Candidate` -> the values it may have; see `enumerate.enumerate_candidates`.
        memory_share: of a device's memory, what a candidate may need to fit for sure. Those that need up to `TIGHT` of
            it may fit as well: they are chosen only if no other fits.
        top: how many alternatives are kept, at most `ALIKE` with the same mp, pp and recomputation.

    Raises:
        ConfigError: nothing can be run, or nothing fits; it says what comes closest and what would help.
    """
    wanted = dict(wanted or {})
    rejections, looked, warnings = _look(profile, recipe, hardware, wanted, memory_share)
    index = pick(looked, noise)
    chosen = looked.candidates.select([index])
    times = step_time(profile, recipe, hardware, chosen)
    if not looked.fits[index]:
        warnings.append(
            f"The choice may not fit: it is predicted to need {in_bytes(looked.memory_bytes[index])} of "
            f"{in_bytes(looked.limit)}, and nothing is predicted to need less than {memory_share:.0%} of them"
        )
    if chosen.mp[0] > hardware.domain_size:
        warnings.append(f"{chosen.mp[0]} ranks of mp are more than the {hardware.domain_size} devices of a fast domain")
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
    )


def look(
    profile: ModelProfile,
    recipe: Recipe,
    hardware: Hardware,
    wanted: Mapping[str, Sequence[int]],
    memory_share: float = 0.92,
) -> tuple[Rejections, Looked]:
    """Everything that could be run, with its predictions; of a large space the variants of the fastest only."""
    space = Space(profile, recipe, hardware, wanted)
    looked = predicted(profile, recipe, hardware, space.candidates(), memory_share)
    if not space.complete and len(looked):
        # Where nothing fits, the variants of what comes closest.
        order = np.arange(len(looked)) if looked.may_fit.any() else np.argsort(looked.memory_bytes, kind="stable")
        fresh = space.variants(looked.candidates.select(order[:REFINED]))
        looked = _merged(looked, predicted(profile, recipe, hardware, fresh, memory_share))
    return space.rejections, looked


def predicted(
    profile: ModelProfile, recipe: Recipe, hardware: Hardware, candidates: Candidates, memory_share: float = 0.92
) -> Looked:
    """Candidates with their predictions, the fastest first."""
    memory = peak_memory(profile, recipe, hardware, candidates)
    seconds = np.full(len(candidates), np.inf)
    may_fit = memory.bytes <= TIGHT * memory.limit
    if may_fit.any():
        seconds[may_fit] = step_time(profile, recipe, hardware, candidates.select(may_fit)).seconds
    return _sorted(Looked(candidates, seconds, memory.bytes, memory.limit, memory_share))


def simplicity(candidates: Candidates) -> Ints:
    """[n]: less is simpler: fewer axes in use first (dp is the least of them), then options that ask for less and are
    better known."""
    c = candidates
    axes = sum((getattr(c, axis) > 1) * weight for axis, weight in {"dp": 90, "mp": 100, "pp": 100, "cp": 100}.items())
    pipelines = {"none": 0, "exact": 1, "1f1b": 2, "gpipe": 2, "interleaved_1f1b": 4, "looped_bfs": 4}
    of_pipeline = np.asarray([pipelines.get(name, 6) for name in PIPELINES])[c.pipeline]
    of_level = np.asarray([0, 2, 2, 1])[c.level] + 2 * ((c.level > 0) & (c.replicate > 1))
    of_recompute = np.select([c.recompute == 0, c.recompute == 1, c.recompute < 0], [0, 1, 2], 3)
    accumulates = (c.pp == 1) & (c.microbatches > 1)
    of_context = np.asarray([0, 0, 1, 2])[c.backend]
    rest = of_pipeline + of_level + of_recompute + accumulates + of_context
    return np.asarray(axes + rest + c.sequence_parallel + c.split + (c.virtual_stages > 2), dtype=np.int64)


def pick(looked: Looked, noise: float) -> int:
    """The index of the candidate to run: of those within `noise` of the fastest, the simplest, then the smallest."""
    pool = np.flatnonzero(looked.pool)
    assert len(pool), "nothing fits"
    near = pool[looked.seconds[pool] <= looked.seconds[pool].min() * (1 + noise)]
    c = looked.candidates.select(near)
    # Memory in steps of a percent: what differs by less is the faster one's.
    memory = np.round(looked.memory_bytes[near] / looked.limit, 2)
    last = [getattr(c, name) for name in FIELDS]
    order = np.lexsort((*last, looked.seconds[near], memory, simplicity(c)))
    return int(near[order[0]])


def diverse(looked: Looked, top: int) -> Ints:
    """Indices of the fastest that may fit, at most `ALIKE` with the same mp, pp and recomputation, fastest first.

    Without those that recompute what need not be: what is the same but for that fits, too.
    """
    places = np.flatnonzero(looked.may_fit)
    c = looked.candidates.select(places)
    cells = (c.mp * 1_000_003 + c.pp) * 1_000_003 + c.recompute
    found: list[Ints] = []
    for _ in range(ALIKE):
        _, first = np.unique(cells, return_index=True)
        found.append(places[first])
        rest = np.ones(len(places), dtype=bool)
        rest[first] = False
        places, cells = places[rest], cells[rest]
    chosen = np.sort(np.concatenate(found))
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
                why = _nothing_fits(looked) if len(looked) else _nothing_runs(rejections)
                wanted["devices"] = (devices,)
                return rejections, fewer, [idle + why]
            if len(looked) and len(fewer) and fewer.memory_bytes.min() >= looked.memory_bytes.min():
                break  # fewer devices need more memory: no use
    where = f"{profile.name} on {hardware.devices} x {hardware.name}"
    if not len(looked):
        raise ConfigError(where, "there is no way to run this: " + _nothing_runs(rejections))
    closest = looked.select(np.argsort(looked.memory_bytes, kind="stable")[:1])
    raise ConfigError(
        where,
        _nothing_fits(looked),
        f"{_what_helps(closest.candidates[0], hardware, wanted)}; closest comes "
        + " ".join(overrides(closest.candidates[0], profile, recipe)),
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


def _nothing_runs(rejections: Rejections) -> str:
    return "; ".join(item.reason for item in rejections) or "no value is left of what was asked for"


def _nothing_fits(looked: Looked) -> str:
    least = float(looked.memory_bytes.min())
    return f"nothing fits: a device has {in_bytes(looked.limit)}, and the least that one needs is {in_bytes(least)}"


def _what_helps(candidate: Candidate, hardware: Hardware, wanted: Mapping[str, Sequence[int]]) -> str:
    c, helps = candidate, []
    asked = [name for name in wanted if name != "devices"]
    if asked:
        helps.append(f"fewer fixed settings ({', '.join(asked)})")
    helps.append("more devices or devices with more memory")
    if c.microbatches * c.dp > 0:
        helps.append("shorter sequences")
    helps.append("a smaller model, an optimizer with less state, or narrower types (precision=bf16-true)")
    return ", ".join(helps)


def _sorted(looked: Looked) -> Looked:
    return looked.select(np.argsort(looked.seconds, kind="stable"))


def _merged(one: Looked, other: Looked) -> Looked:
    columns = {
        name: np.concatenate([getattr(one.candidates, name), getattr(other.candidates, name)]) for name in FIELDS
    }
    return _sorted(
        dataclasses.replace(
            one,
            candidates=Candidates(**columns),
            seconds=np.concatenate([one.seconds, other.seconds]),
            memory_bytes=np.concatenate([one.memory_bytes, other.memory_bytes]),
        )
    )


def _alternatives(looked: Looked, chosen: int, top: int) -> Ints:
    """The fastest of different kinds, and what needs least memory, without the chosen one."""
    found = [index for index in diverse(looked, top + 1).tolist() if index != chosen][:top]
    least = int(np.flatnonzero(looked.may_fit)[looked.memory_bytes[looked.may_fit].argmin()])
    if top and least != chosen and least not in found:
        found = [*found[: top - 1], least]
    return np.asarray(sorted(found), dtype=np.int64)


def _pareto(looked: Looked, step: float = 0.01) -> list[int]:
    """Indices that nothing beats in both time and memory, fastest first; each saves `step` of the limit or more."""
    places = np.flatnonzero(looked.may_fit)
    order = places[np.lexsort((looked.memory_bytes[places], looked.seconds[places]))]
    memory = looked.memory_bytes[order]
    falls = np.concatenate([[True], memory[1:] < np.minimum.accumulate(memory)[:-1]])
    found: list[int] = []
    for index in order[falls].tolist():
        if not found or looked.memory_bytes[found[-1]] - looked.memory_bytes[index] >= step * looked.limit:
            found.append(index)
    return found


def _fits(memory_bytes: float, looked: Looked) -> str:
    if memory_bytes <= looked.share * looked.limit:
        return "yes"
    return "tight" if memory_bytes <= TIGHT * looked.limit else "no"


def rounded(value: Any) -> Any:
    """Plain data with numbers of six digits: what differs by less is no difference."""
    if isinstance(value, Mapping):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    if isinstance(value, float | np.floating):
        return float(f"{float(value):.6g}")
    return int(value) if isinstance(value, np.integer) else value
