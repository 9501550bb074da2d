"""All configurations that can run a training, each once, and the rules that reject the others. Torch-free.

Settings that make no difference make no further candidate: a sharding level where nothing is sharded, levels that
differ only while gradients accumulate, a pipeline of one rank. What can't run, or has no point, is rejected by a rule,
and a rule can say why for any candidate. Values are chosen one axis after the other, so that a rule cuts off all that
would follow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autolaunch_strategies.config import AXES, CP_BACKEND_SPECS, ContextBackend, ScheduleSpec
from autolaunch_strategies.planner.candidate import (
    FIELDS,
    FULL,
    NO_RECOMPUTE,
    PIPELINE_SPECS,
    PIPELINES,
    SELECTIVE,
    Candidate,
    Candidates,
    of_schedules,
)
from autolaunch_strategies.planner.hardware import Hardware
from autolaunch_strategies.planner.profile import ModelProfile, Recipe
from autolaunch_strategies.planner.stages import block_flops, unevenness

LIMIT = 40_000
"""Beyond so many candidates the first look is at fewer values of the fields that matter least (`Space.variants` has
all of them)."""

SHORTEST_PART = 128
"""Positions of one rank of cp below which sharding further has no point."""

WORTH_BALANCING = 0.02
"""Share of the costliest stage that a balanced cut has to save to be proposed beside the even one."""


@dataclass(frozen=True)
class Rule:
    """A reason to reject candidates, as a test on some of their fields."""

    name: str
    words: str
    """What it refuses, in few words, without numbers."""
    fields: tuple[str, ...]
    """What it looks at."""
    refuses: Callable[[Any], NDArray[np.bool_]]
    """Columns of these fields [n] (attributes, as of `Candidates`) -> which of them are refused."""
    reason: Callable[[Candidate], str]
    """One sentence without a full stop, with the numbers, for a candidate that is refused."""
    lifted_by: tuple[str, ...] = ()
    """Not empty: what it refuses could be run, but has no point. It is proposed if one of these fields is asked for."""


@dataclass
class Rejection:
    """What one rule has refused."""

    rule: Rule
    count: int
    """How many values or combinations of its fields."""
    example: Candidate
    """One that was refused; fields that the rule does not look at have their defaults."""

    @property
    def reason(self) -> str:
        """Of the example."""
        return self.rule.reason(self.example)


@dataclass
class Rejections:
    """What was not proposed, and why."""

    rules: tuple[Rule, ...]
    refused: dict[str, Rejection] = field(default_factory=dict)
    """Name of a rule -> what it refused."""

    def add(self, rule: Rule, columns: Any, which: NDArray[np.bool_]) -> None:
        """Note that `rule` has refused these rows of columns of its fields."""
        count = int(which.sum())
        if not count:
            return
        if rule.name in self.refused:
            self.refused[rule.name].count += count
            return
        first = int(which.argmax())
        known = {name: int(getattr(columns, name)[first]) for name in FIELDS if hasattr(columns, name)}
        self.refused[rule.name] = Rejection(rule, count, Candidate(**known))

    def of(self, candidate: Candidate) -> list[tuple[str, str]]:
        """(rule, reason) of every rule that refuses a candidate."""
        columns = Candidates.of([candidate])
        return [(rule.name, rule.reason(candidate)) for rule in self.rules if rule.refuses(columns)[0]]

    def __iter__(self) -> Iterator[Rejection]:
        return iter(self.refused.values())


def enumerate_candidates(
    profile: ModelProfile,
    recipe: Recipe,
    hardware: Hardware,
    wanted: Mapping[str, Sequence[int]] | None = None,
    limit: int = LIMIT,
) -> tuple[Candidates, Rejections]:
    """Every way to run a training on all devices of a cluster, as far as our runtime has it.

    Args:
        wanted: field of `Candidate` -> the values it may have (others are proposed freely); `devices`: how many of
            them to use. A field that means nothing for a candidate (the backend of one whose sequences are whole) is
            not restricted. What is asked for is proposed even where it has no point.
        limit: beyond so many, fewer values of fields that matter least are proposed.

    Returns:
        The candidates, no two of which are the same run, and what was refused.
    """
    space = Space(profile, recipe, hardware, wanted or {})
    return space.candidates(limit), space.rejections


class Space:
    """All ways to run one training on one cluster."""

    def __init__(
        self, profile: ModelProfile, recipe: Recipe, hardware: Hardware, wanted: Mapping[str, Sequence[int]]
    ) -> None:
        """What is `wanted`: see `enumerate_candidates`."""
        assert set(wanted) <= {*FIELDS, "devices"}, f"no such fields: {sorted(set(wanted) - {*FIELDS, 'devices'})}"
        self.profile, self.recipe, self.hardware, self.wanted = profile, recipe, hardware, dict(wanted)
        (self.devices,) = wanted.get("devices", (hardware.devices,))
        rules = [
            rule for rule in _rules(profile, recipe, hardware, self.devices) if not set(rule.lifted_by) & set(wanted)
        ]
        self._rules = {rule.name: rule for rule in rules}
        self.rejections = Rejections(tuple(rules))
        self.complete = True
        """Whether `candidates` has given all values of all fields."""
        self._thin = False
        self._weights = block_flops(profile)
        self._unevenness: dict[int, float] = {}

    def candidates(self, limit: int = LIMIT) -> Candidates:
        """All of them, or with fewer values of some fields if they were more than `limit`."""
        meshes = self._meshes()
        rows = self._all(meshes, limit)
        if rows is None:
            self.complete, self._thin, noted = False, True, self.rejections.refused
            self.rejections.refused = {}  # what is left out has been noted once
            rows = self._all(meshes)
            self._thin, self.rejections.refused = False, noted
        assert rows is not None
        return Candidates(**rows.columns)

    def variants(self, candidates: Candidates) -> Candidates:
        """What differs from one of `candidates` in a single choice: the schedule with its stages and its cut, the way
        of cp and of mp, what is recomputed, whether blocks are compiled, the level with its replicas. Each once; none
        that is given."""
        start = _Table({name: getattr(candidates, name) for name in FIELDS})
        tables = [start]
        for options in (
            self._pipelines,
            self._contexts,
            self._sequence_parallel,
            self._recomputes,
            self._levels,
            self._experts,
            self._compiles,
        ):
            rows = start.match(options(start))
            for rule in self.rejections.rules:
                rows = rows.where(~rule.refuses(rows))
            tables.append(rows.where(self._is_canonical(rows)))
        columns = {name: np.concatenate([table[name] for table in tables]) for name in FIELDS}
        _, first = np.unique(codes(*columns.values()), return_index=True)
        fresh = np.sort(first[first >= len(start)])
        return Candidates(**{name: column[fresh] for name, column in columns.items()})

    def _all(self, meshes: _Table, limit: int | None = None) -> _Table | None:
        """Every combination; None if there are more than `limit`."""
        batches, pipelines = self._microbatches(meshes), self._pipelines(meshes)
        parts = meshes.distinct("dp", "pp").match(batches).match(pipelines)
        parts = self._kept(parts, "schedule_microbatches", "few_microbatches", "dominated")
        rows = meshes.match(parts).match(self._levels(meshes))
        rows = rows.where(self._is_canonical(rows))
        experts = self._experts(meshes)
        if limit is not None and rows.matches(experts) > limit:
            return None
        rows = self._kept(rows.match(experts), "expert_ranks")
        tables = (self._contexts, self._sequence_parallel, self._recomputes, self._compiles)
        for table in (options(meshes) for options in tables):
            if limit is not None and rows.matches(table) > limit:
                return None
            rows = rows.match(table)
        return rows

    def _is_canonical(self, rows: _Table) -> NDArray[np.bool_]:
        """Without accumulation nothing tells level 2 from level 1."""
        if 1 not in self.wanted.get("level", (1,)):
            return np.ones(len(rows), dtype=bool)
        return (rows.level != 2) | (rows.microbatches > 1)

    def _kept(self, rows: _Table, *rules: str) -> _Table:
        for name in rules:
            if name in self._rules:
                which = self._rules[name].refuses(rows)
                self.rejections.add(self._rules[name], rows, which)
                rows = rows.where(~which)
        return rows

    def _values(self, name: str, usual: Iterable[int]) -> list[int]:
        return sorted(self.wanted[name]) if name in self.wanted else list(usual)

    # --- tables of the values that some fields may have, beside others ---

    def _meshes(self) -> _Table:
        sizes = {axis: self._values(axis, divisors(self.devices)) for axis in AXES}
        tables = (
            self._kept(_Table({"mp": sizes["mp"]}), "mp_refused", "mp_sizes"),
            self._kept(_Table({"pp": sizes["pp"], "virtual_stages": 1}), "pp_refused", "blocks"),
            self._kept(_Table({"cp": sizes["cp"]}), "cp_refused", "positions", "short_parts"),
        )
        mp, pp, cp = (table[axis] for axis, table in zip(("mp", "pp", "cp"), tables, strict=True))
        dp, mp, pp, cp = np.meshgrid(sizes["dp"] if "dp" in self.wanted else 1, mp, pp, cp, indexing="ij")
        if "dp" not in self.wanted:
            dp = np.maximum(1, self.devices // (mp * pp * cp))
        grid = (dp, mp, pp, cp)
        meshes = _Table({axis: array.ravel() for axis, array in zip(AXES, grid, strict=True)} | {"microbatches": 1})
        fitting = meshes.where(~self._rules["devices"].refuses(meshes))
        meshes = fitting if len(fitting) else self._kept(meshes, "devices")
        return self._kept(meshes, "batch").only(*AXES)

    def _microbatches(self, rows: _Table) -> _Table:
        table = rows.distinct("dp").with_options(("microbatches",), self._parts_of_batch)
        return self._kept(table, "batch")

    def _parts_of_batch(self, dp: int) -> list[tuple[int, ...]]:
        share = max(1, self.recipe.batch_size // dp)
        parts = divisors(share)
        if len(parts) > 6:
            parts = [1, *(share >> power for power in range(share.bit_length()) if share % (1 << power) == 0)]
        return [(number,) for number in self._values("microbatches", sorted(set(parts)))]

    def _pipelines(self, rows: _Table) -> _Table:
        table = rows.distinct("pp").with_options(("pipeline", "virtual_stages", "split"), self._pipelines_of)
        return self._kept(table, "mean_loss", "virtual_stages", "blocks")

    def _pipelines_of(self, pp: int) -> list[tuple[int, ...]]:
        if pp == 1:
            return [(0, 1, 0)]
        all_of_them = range(1, len(PIPELINES))
        usual = [number for number in all_of_them if PIPELINE_SPECS[number].first_look or not self._thin]
        return [
            (pipeline, virtual_stages, split)
            for pipeline in self._values("pipeline", usual)
            for virtual_stages in self._values("virtual_stages", self._virtual_stages(PIPELINE_SPECS[pipeline], pp))
            for split in self._values("split", self._splits(pp * virtual_stages))
        ]

    def _virtual_stages(self, spec: ScheduleSpec, pp: int) -> list[int]:
        if spec.most_stages is not None:
            return [spec.least_stages]
        blocks = len(self.profile.blocks)
        numbers = [number for number in (2, 3, 4, 6, 8, 12, 16) if number <= blocks // pp]
        numbers = [number for number in numbers if blocks % (pp * number) == 0 or number & (number - 1) == 0]
        if self._thin and len(numbers) > 2:
            numbers = [numbers[0], max(number for number in numbers if number <= 8)]
        return numbers or [spec.least_stages]  # the rule about blocks says why not

    def _splits(self, stages: int) -> list[int]:
        if stages > len(self.profile.blocks):
            return [0]
        if stages not in self._unevenness:
            self._unevenness[stages] = unevenness(self._weights, stages)
        return [0, 1] if self._unevenness[stages] >= WORTH_BALANCING else [0]

    def _levels(self, rows: _Table) -> _Table:
        table = rows.distinct("dp", "cp", "mp", "pp").with_options(("level", "replicate"), self._levels_of)
        return self._kept(table, "replicas", "whole_nodes")

    def _levels_of(self, dp: int, cp: int, mp: int, pp: int) -> list[tuple[int, ...]]:
        if dp * cp == 1:  # nothing can be sharded; as many replicas as are asked for can't be, either
            return [(0, 1)] if 1 in self.wanted.get("replicate", (1,)) else [(1, n) for n in self.wanted["replicate"]]
        levels = self._values("level", range(4))
        if pp > 1:  # a pipeline keeps parameters for a whole step and exchanges gradients at its end: 1, 2, 3 are one
            levels = [*(level for level in levels if not level), *[level for level in levels if level][:1]]
        replicas = self._values("replicate", self._replicas(dp, cp, mp))
        pairs: list[tuple[int, ...]] = [(0, dp)] if 0 in levels else []
        for level in levels:
            if level:
                second = level == 2 and len(levels) > 1 and "replicate" not in self.wanted
                pairs += [(level, number) for number in (replicas[:1] if second else replicas)]
        return pairs

    def _replicas(self, dp: int, cp: int, mp: int) -> list[int]:
        """One, and those whose groups are whole nodes, of growing size."""
        numbers, nodes = [1], 0
        for shards in divisors(dp)[:-1]:
            ranks = shards * cp * mp
            if shards * cp == 1:
                continue
            if ranks % self.hardware.devices_per_node:
                numbers.append(dp // shards)  # the rule about whole nodes says why not
            elif ranks // self.hardware.devices_per_node >= nodes:
                nodes = ranks // self.hardware.devices_per_node * (2 if nodes < 4 and not self._thin else 4)
                numbers.append(dp // shards)
        return numbers

    def _contexts(self, rows: _Table) -> _Table:
        table = rows.distinct("cp", "mp").with_options(("backend", "ulysses"), self._contexts_of)
        return self._kept(table, "ulysses", "heads")

    def _contexts_of(self, cp: int, mp: int) -> list[tuple[int, ...]]:
        if cp == 1:
            return [(0, 1)]
        between = [degree for degree in divisors(cp) if 1 < degree < cp]
        heads = None if self.profile.heads is None else self.profile.heads // mp
        backends = dict(enumerate(CP_BACKEND_SPECS.values()))
        asked = tuple(self.wanted.get("backend", ()))
        if self._thin and not asked:
            first = {number: _first_degrees(spec, cp, heads, between) for number, spec in backends.items()}
            usual = {number: degrees for number, degrees in first.items() if degrees}
        else:
            usual = {number: between if spec.is_mixed else [spec.neighbours(cp)] for number, spec in backends.items()}
            if not between and len(asked) == 1:
                usual[asked[0]] = [backends[asked[0]].neighbours(cp, heads)]  # of a prime number: all or none
        options: list[tuple[int, ...]] = []
        for backend in self._values("backend", usual):
            degrees = self._values("ulysses", usual[backend]) if backends[backend].is_mixed else usual[backend]
            options += [(backend, degree) for degree in degrees]
        return options

    def _sequence_parallel(self, rows: _Table) -> _Table:
        table = rows.distinct("mp").with_options(("sequence_parallel",), self._sequence_parallel_of)
        return self._kept(table, "sequence_parallel_refused")

    def _sequence_parallel_of(self, mp: int) -> list[tuple[int, ...]]:
        usual = [1] if self._thin and "sequence_parallel" not in self.profile.refused else [0, 1]
        return [(number,) for number in self._values("sequence_parallel", usual)] if mp > 1 else [(0,)]

    def _experts(self, rows: _Table) -> _Table:
        table = rows.distinct("dp", "mp", "cp").with_options(("ep",), self._experts_of)
        return self._kept(table, "ep_refused", "experts")

    def _experts_of(self, dp: int, mp: int, cp: int) -> list[tuple[int, ...]]:
        usual = divisors(math.gcd(self.profile.experts, dp * mp * cp)) if self.profile.experts else [1]
        if self._thin:
            within = [number for number in usual if number <= self.hardware.domain_size]
            usual = sorted({1, within[-1], usual[-1]})
        return [(number,) for number in self._values("ep", usual)]

    def _recomputes(self, rows: _Table) -> _Table:
        return rows.distinct("pp").with_options(("recompute",), self._recomputes_of)

    def _recomputes_of(self, pp: int) -> list[tuple[int, ...]]:
        usual = [NO_RECOMPUTE, FULL]
        if any(kind.selective_bytes < kind.saved_bytes for kind in self.profile.kinds):
            usual.append(SELECTIVE)
        if not self._thin:
            usual += [every for every in (2, 4) if every <= len(self.profile.blocks) // pp]
        return [(number,) for number in self._values("recompute", usual)]

    def _compiles(self, rows: _Table) -> _Table:
        table = rows.distinct("pp").with_options(("compile",), lambda _: self._compiles_of())
        return self._kept(table, "compile_refused", "compile_on_cpu")

    def _compiles_of(self) -> list[tuple[int, ...]]:
        usual = [1] if self._thin and can_compile(self.profile, self.hardware) else [0, 1]
        return [(number,) for number in self._values("compile", usual)]


def several_replicas(devices: int) -> tuple[int, ...]:
    """Every number of replicas of the state that is more than one."""
    return tuple(divisors(devices)[1:])


def can_compile(profile: ModelProfile, hardware: Hardware) -> bool:
    """Whether compiled blocks are proposed at all."""
    return hardware.device == "cuda" and "compile" not in profile.refused


def _first_degrees(spec: ContextBackend, cp: int, heads: int | None, between: list[int]) -> list[int]:
    """Degrees of ulysses for the first look: what sends least, which is heads for positions as far as there are heads,
    and all keys at once."""
    if not spec.exchanges_heads:
        return [1] if spec.gathers_keys else []
    if not heads:
        return []
    if spec.is_mixed:
        return [spec.neighbours(cp, heads)] if between and heads % cp else []
    return [cp] if heads % cp == 0 else []


# --- rules -------------------------------------------------------------------------------------------------------


def _rules(profile: ModelProfile, recipe: Recipe, hardware: Hardware, devices: int) -> list[Rule]:
    blocks, batch, positions, heads = len(profile.blocks), recipe.batch_size, profile.positions, profile.heads
    node = hardware.devices_per_node
    refused = profile.refused
    why_no_mean = f", and {refused['schedules']}" if "schedules" in refused else ""

    def refused_axis(axis: str) -> Rule:
        return Rule(
            f"{axis}_refused",
            f"{axis} with this model",
            (axis,),
            lambda c: (getattr(c, axis) > 1) & (axis in refused),
            lambda c: f"{profile.name} can't be divided along {axis}: {refused[axis]}",
        )

    def indivisible(mp: int) -> str:
        return " and ".join(str(size) for size in sorted(set(profile.mp_sizes)) if size % mp)

    return [
        Rule(
            "devices",
            "a mesh of another size",
            ("dp", "mp", "pp", "cp"),
            lambda c: c.dp * c.mp * c.pp * c.cp != devices,
            lambda c: f"the mesh {c.mesh.name} has {c.ranks} ranks, not {devices}",
        ),
        refused_axis("mp"),
        refused_axis("pp"),
        refused_axis("cp"),
        Rule(
            "sequence_parallel_refused",
            "mp=seq_parallel with this model",
            ("sequence_parallel",),
            lambda c: (c.sequence_parallel > 0) & ("sequence_parallel" in refused),
            lambda c: f"{profile.name} runs the same with mp=seq_parallel: {refused['sequence_parallel']}",
            lifted_by=("sequence_parallel",),
        ),
        Rule(
            "ep_refused",
            "ep with this model",
            ("ep",),
            lambda c: (c.ep > 1) & (not profile.experts),
            lambda c: f"{profile.name} can't be divided along ep: {refused.get('ep', 'it has no mixture of experts')}",
        ),
        Rule(
            "experts",
            "experts % ep",
            ("ep",),
            lambda c: (c.ep > 1) & (profile.experts % c.ep != 0),
            lambda c: f"{profile.experts} experts cannot be shared out evenly over {c.ep} ranks of ep",
        ),
        Rule(
            "expert_ranks",
            "(dp of one replica x cp x mp) % ep",
            ("dp", "mp", "cp", "level", "replicate", "ep"),
            lambda c: np.where(c.level == 0, c.dp, c.dp // c.replicate) * c.cp * c.mp % c.ep != 0,
            lambda c: (
                f"ep={c.ep} borrows ranks of dp (of one replica) x cp x mp, and does not divide these: "
                f"{c.dp // (c.replicate if c.level else 1)} x {c.cp} x {c.mp}"
            ),
        ),
        Rule(
            "compile_refused",
            "compile with this job",
            ("compile",),
            lambda c: (c.compile > 0) & ("compile" in refused),
            lambda c: f"the blocks of {profile.name} are not compiled: {refused['compile']}",
            lifted_by=("compile",),
        ),
        Rule(
            "compile_on_cpu",
            "compile on a CPU",
            ("compile",),
            lambda c: (c.compile > 0) & (hardware.device == "cpu"),
            lambda c: (
                "on a CPU a C++ compiler takes a minute or so for each kind of block, and what that gains is not known"
            ),
            lifted_by=("compile",),
        ),
        Rule(
            "mp_sizes",
            "heads and other sizes % mp",
            ("mp",),
            lambda c: np.logical_or.reduce([size % c.mp != 0 for size in (*profile.mp_sizes, 0)]),
            lambda c: (
                f"the planner weighs no {c.mp} ranks of mp: they share {indivisible(c.mp)} unevenly (heads, those of "
                "keys and values, and what else they divide)"
            ),
        ),
        Rule(
            "blocks",
            "blocks < pipeline stages",
            ("pp", "virtual_stages"),
            lambda c: (c.pp > 1) & (c.pp * c.virtual_stages > blocks),
            lambda c: f"{blocks} blocks cannot fill {c.pp * c.virtual_stages} pipeline stages",
        ),
        Rule(
            "positions",
            "positions % (2 x cp)",
            ("cp",),
            lambda c: (c.cp > 1) & (positions % (2 * c.cp) != 0),
            lambda c: f"sequences of {positions} positions cannot be cut into 2 x {c.cp} equal parts",
        ),
        Rule(
            "short_parts",
            "cp: parts of sequences too short to gain",
            ("cp",),
            lambda c: (c.cp > 1) & (positions < SHORTEST_PART * c.cp),
            lambda c: (
                f"{positions} positions over {c.cp} ranks of cp are parts of {positions // c.cp}: too short to gain"
            ),
            lifted_by=("cp",),
        ),
        Rule(
            "batch",
            "batch % (dp x microbatches)",
            ("dp", "microbatches"),
            lambda c: batch % (c.dp * c.microbatches) != 0,
            lambda c: (
                f"a batch of {batch} cannot be cut into {c.dp} x {c.microbatches} equal parts (dp x microbatches)"
            ),
        ),
        Rule(
            "mean_loss",
            "schedules for losses that are means",
            ("pipeline",),
            lambda c: (c.pipeline > PIPELINES.index("exact")) & (not recipe.mean_loss or "schedules" in refused),
            lambda c: f"{c.pipeline_name} needs a loss that is a mean over samples{why_no_mean}; exact runs any",
        ),
        Rule(
            "virtual_stages",
            "stages per rank of the schedule",
            ("pipeline", "virtual_stages"),
            _wrong_virtual_stages,
            lambda c: (
                f"{c.pipeline_name} cannot have {c.virtual_stages} stages per rank, but "
                + _stages_allowed(c.schedule.least_stages, c.schedule.most_stages)
            ),
        ),
        Rule(
            "schedule_microbatches",
            "microbatches of the schedule",
            ("pp", "pipeline", "microbatches"),
            _wrong_microbatches,
            lambda c: (
                f"{c.pipeline_name} on {c.pp} ranks of pp cannot run {c.microbatches} microbatches: it needs "
                + (
                    f"equal rounds of {c.pp} or more"
                    if c.schedule.equal_rounds
                    else f"{c.schedule.least_microbatches * c.pp} or more"
                )
            ),
        ),
        Rule(
            "few_microbatches",
            "too few microbatches for the pipeline",
            ("dp", "pp", "microbatches"),
            lambda c: (c.pp > 1) & (2 * c.microbatches < c.pp) & (c.microbatches * c.dp < batch),
            lambda c: f"{c.microbatches} microbatches on {c.pp} ranks of pp leave most ranks idle most of the time",
            lifted_by=("microbatches",),
        ),
        Rule(
            "dominated",
            "schedules that another one is never worse than",
            ("pp", "pipeline", "microbatches"),
            _is_dominated,
            lambda c: f"{c.pipeline_name} waits as long as {c.schedule.better} and holds more microbatches",
            lifted_by=("pipeline",),
        ),
        Rule(
            "replicas",
            "dp % replicas",
            ("dp", "level", "replicate"),
            lambda c: np.where(c.level == 0, c.replicate != c.dp, c.dp % c.replicate != 0),
            lambda c: (
                f"{c.dp} ranks of dp cannot be {c.replicate} equal replicas"
                if c.level
                else "level 0 shards nothing: every rank of dp is a replica"
            ),
        ),
        Rule(
            "whole_nodes",
            "replicas that are not whole nodes",
            ("dp", "mp", "cp", "level", "replicate"),
            lambda c: (c.level > 0) & (c.replicate > 1) & (c.dp // c.replicate * c.cp * c.mp % node != 0),
            lambda c: (
                f"{c.replicate} replicas of {c.dp // c.replicate * c.cp * c.mp} ranks are not whole nodes of {node}"
            ),
            lifted_by=("replicate",),
        ),
        Rule(
            "ulysses",
            "cp % ulysses",
            ("cp", "ulysses"),
            lambda c: c.cp % c.ulysses != 0,
            lambda c: f"{c.cp} ranks of cp cannot be cut into groups of {c.ulysses}",
        ),
        Rule(
            "heads",
            "heads % (mp x ulysses)",
            ("mp", "cp", "ulysses"),
            lambda c: (c.ulysses > 1) & ((heads or 1) % (c.mp * c.ulysses) != 0),
            lambda c: f"{heads or 'no'} attention heads cannot be shared by {c.mp} x {c.ulysses} ranks (mp x ulysses)",
        ),
    ]


def shares_evenly(profile: ModelProfile, mp: int) -> bool:
    """Whether so many ranks of mp get equal shares of all that they divide: of other sizes no candidate is made."""
    return all(size % mp == 0 for size in profile.mp_sizes)


def _stages_allowed(least: int, most: int | None) -> str:
    return f"{least} or more" if most is None else f"exactly {least}" if least > 1 else "1"


def _wrong_virtual_stages(columns: Any) -> NDArray[np.bool_]:
    """As `schedules.schedule.check_schedule`."""
    most = np.asarray([spec.most_stages or 2**30 for spec in PIPELINE_SPECS])[columns.pipeline]
    least, stages = of_schedules("least_stages", columns.pipeline), columns.virtual_stages
    return np.asarray((stages < least) | (stages > most))


def _wrong_microbatches(columns: Any) -> NDArray[np.bool_]:
    """As `schedules.schedule.check_schedule`."""
    pp, parts = columns.pp, columns.microbatches
    uneven = of_schedules("equal_rounds", columns.pipeline) & (parts % np.maximum(1, parts // pp) != 0)
    return uneven | (parts < of_schedules("least_microbatches", columns.pipeline) * pp)


def _is_dominated(columns: Any) -> NDArray[np.bool_]:
    dominated = np.zeros(len(columns.pipeline), dtype=bool)
    for number, spec in enumerate(PIPELINE_SPECS):
        if spec.better:
            better = np.full_like(columns.pipeline, PIPELINES.index(spec.better))
            runs = ~_wrong_microbatches(
                SimpleNamespace(pp=columns.pp, microbatches=columns.microbatches, pipeline=better)
            )
            dominated |= (columns.pipeline == number) & runs
    return dominated


# --- tables ------------------------------------------------------------------------------------------------------


class _Table:
    """Columns [n] of int64, also as attributes."""

    def __init__(self, columns: Mapping[str, Any]) -> None:
        arrays = (np.atleast_1d(np.asarray(column, dtype=np.int64)) for column in columns.values())
        self.columns = dict(zip(columns, np.broadcast_arrays(*arrays), strict=True))

    def __getitem__(self, name: str) -> NDArray[np.int64]:
        return self.columns[name]

    def __getattr__(self, name: str) -> NDArray[np.int64]:
        try:
            return self.__dict__["columns"][name]
        except KeyError:
            raise AttributeError(name) from None

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def only(self, *names: str) -> _Table:
        return _Table({name: self.columns[name] for name in names})

    def where(self, rows: NDArray[np.bool_]) -> _Table:
        return self if rows.all() else _Table({name: column[rows] for name, column in self.columns.items()})

    def distinct(self, *names: str) -> _Table:
        """The combinations of these columns that there are."""
        _, first = np.unique(self._code(names, self), return_index=True)
        return _Table({name: self.columns[name][first] for name in names})

    def with_options(self, names: tuple[str, ...], options: Callable[..., list[tuple[int, ...]]]) -> _Table:
        """Every row with each of its options, `options(*row)`, as further columns."""
        rows = list(zip(*(column.tolist() for column in self.columns.values()), strict=True))
        longer = [(*row, *option) for row in rows for option in options(*row)]
        every = (*self.columns, *names)
        columns = np.asarray(longer, dtype=np.int64).reshape(-1, len(every)).T
        return _Table(dict(zip(every, columns, strict=True)))

    def match(self, other: _Table) -> _Table:
        """Every row with every row of `other` that is equal in the keys.

        The keys are the axes that `other` has; its other columns take the place of ours.
        """
        order, starts, counts = self._matching(other)
        row = np.repeat(np.arange(len(self)), counts)
        place = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts) + np.repeat(starts, counts)
        columns = {name: column[row] for name, column in self.columns.items()}
        for name, column in other.columns.items():
            if name not in AXES:
                columns[name] = column[order[place]]
        return _Table(columns)

    def matches(self, other: _Table) -> int:
        """How many rows `match` has."""
        return int(self._matching(other)[2].sum())

    def _matching(self, other: _Table) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """(order of the rows of `other`, the first in it for each row of ours, how many there)."""
        keys = [name for name in other.columns if name in AXES]
        ours, theirs = self._code(keys, other), other._code(keys, self)
        order = np.argsort(theirs, kind="stable")
        starts = np.searchsorted(theirs, ours, "left", order)
        return order, starts, np.searchsorted(theirs, ours, "right", order) - starts

    def _code(self, names: Iterable[str], other: _Table) -> NDArray[np.int64]:
        code = np.zeros(len(self), dtype=np.int64)
        for name in names:
            code = code * (1 + max(int(table[name].max(initial=0)) for table in (self, other))) + self[name]
        return code


def codes(*columns: NDArray[np.int64]) -> NDArray[np.int64]:
    """[n]: a number for each row of the columns [n]: equal rows have the same, and others hardly ever."""
    code = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        code = (code + column) * 6364136223846793005 + 1442695040888963407  # Knuth's; it wraps around
        code ^= code >> 29
    return code


def divisors(number: int) -> list[int]:
    """All of them, in order."""
    small = [low for low in range(1, int(number**0.5) + 1) if number % low == 0]
    return sorted({*small, *(number // low for low in small)})
