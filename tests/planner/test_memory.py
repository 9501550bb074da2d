"""The planner's memory: against hand calculation, real schedules, real runs at tiny scale, and publications."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from autolaunch_strategies.config import SCHEDULE_SPECS, PipelineParallel
from autolaunch_strategies.planner import memory as planner_memory
from autolaunch_strategies.planner.candidate import FULL, PIPELINES, Candidate, Candidates, of_schedules
from autolaunch_strategies.planner.constants import Constants
from autolaunch_strategies.planner.hardware import Hardware, Link
from autolaunch_strategies.planner.memory import PIECES, memory_account, peak_memory
from autolaunch_strategies.planner.plan import MEASURED
from autolaunch_strategies.planner.profile import MatMul, ModelProfile, Part, Recipe
from autolaunch_strategies.planner.stages import Cut
from autolaunch_strategies.schedules.in_flight import in_flight
from autolaunch_strategies.schedules.schedule import Kind, build_schedule, check_schedule
from tests.benchmarks import planner_published_memory as published
from tests.planner import memory_cases as real
from tests.support.ranks import GroupOf
from tests.support.tiers import tiered

REAL = Path(real.__file__)
BARE = dataclasses.replace(Constants(), context_bytes=0.0, fragmentation=0.0)
CPU = Hardware("cpu", "cpu", 1, 4, 16e9, {"fp32": 1e11}, 1e10, Link(1e9, 1e-4), Link(1e9, 1e-4), constants=BARE)

BLOCK = Part(
    "block", 1000, 800, saved_bytes=50_000, sharded_saved_bytes=30_000, selective_bytes=20_000,
    sharded_selective_bytes=10_000, output_bytes=4_000, peak_bytes=7_000, sharded_peak_bytes=5_000,
)  # fmt: skip
BEFORE = Part("before", 3000, 3000, saved_bytes=800, output_bytes=4_000)
AFTER = Part("after", 2000, 2000, saved_bytes=9_000, sharded_saved_bytes=6_000)
LOSS = 24_000


def model(blocks: int = 8, **changes: object) -> ModelProfile:
    names = tuple(f"blocks.{index}" for index in range(blocks))
    profile = ModelProfile("toy", 16, BEFORE, (BLOCK,), (0,) * blocks, names, AFTER, LOSS, LOSS)
    return dataclasses.replace(profile, **changes)


def pipelined(name: str, **fields: int) -> Candidate:
    return Candidate(pipeline=PIPELINES.index(name), **fields)


def total(candidate: Candidate, profile: ModelProfile | None = None, batch: int = 8, **recipe: float) -> float:
    memory = peak_memory(
        profile or model(), Recipe(batch_size=batch, **recipe), CPU, Candidates.of([candidate])
    )  # fmt: skip
    return float(memory.bytes[0])


# --- by hand ----------------------------------------------------------------------------------------------------------

WHOLE = 8 * 1000 + 3000 + 2000
KEPT = 8 * 50_000 + 800 + 9_000  # of one sequence


def test_a_model_without_blocks_has_memory() -> None:
    bare = model(0, kinds=())
    assert total(Candidate(), bare) == 16 * 5000 + 8 * (800 + 9_000 + LOSS)


@pytest.mark.parametrize(
    ("candidate", "expected"),
    [
        # The loss, with the gradients of the step before: 4 + 4 + 8 bytes for each parameter.
        pytest.param(Candidate(), 16 * WHOLE + 8 * (KEPT + LOSS), id="one"),
        pytest.param(Candidate(microbatches=4), 16 * WHOLE + 2 * (KEPT + LOSS), id="accumulating"),
        pytest.param(
            Candidate(mp=2),
            16 * (8 * 600 + 2500) + 8 * (8 * 35_000 + 800 + 6_000 + LOSS / 2),
            id="mp",
        ),
        pytest.param(
            Candidate(mp=2, sequence_parallel=1),
            16 * (8 * 600 + 2500) + 8 * (8 * 25_000 + 800 + 6_000 + LOSS / 2),
            id="sp",
        ),
        pytest.param(Candidate(cp=2), 16 * WHOLE + 4 * (KEPT + LOSS), id="cp"),
        # Sharded state, all parameters gathered, and the buffer in which the head came.
        pytest.param(Candidate(dp=2, level=1), (8 + 4) * WHOLE + 8000 + 4 * (KEPT + LOSS), id="level 1"),
        pytest.param(
            Candidate(dp=2, level=1, microbatches=4),
            (2 + 4 + 4 + 4) * WHOLE + 8000 + KEPT + LOSS,
            id="level 1, accumulating",
        ),
        # Of parameters a block's are gathered, and the head's while there are scores; the table is free again.
        pytest.param(Candidate(dp=2, level=3, microbatches=4), 8 * WHOLE + 4 * 2000 + 8000 + KEPT + LOSS, id="level 3"),
        # Inputs of all blocks but the last, whose gradients are on their way, and one block whole with its gradients,
        # while the next one is gathered.
        pytest.param(
            Candidate(dp=2, level=3, microbatches=4, recompute=1),
            8 * WHOLE + 7 * 4_000 + 800 + 46_000 + 7_000 + 4 * 4000,
            id="level 3, full",
        ),
        pytest.param(Candidate(recompute=1, microbatches=8), 16 * WHOLE + 8 * 4_000 + 800 + 46_000 + 7_000, id="full"),
        pytest.param(
            Candidate(recompute=-1, microbatches=8), 16 * WHOLE + 8 * 20_000 + 800 + 30_000 + 7_000, id="selective"
        ),
        # Blocks 0, 2, 4 and 6 are recomputed; when 6 is, 7 is done.
        pytest.param(
            Candidate(recompute=2, microbatches=8),
            16 * WHOLE + 4 * 4_000 + 800 + max(4 * 50_000 + 9_000 + LOSS, 3 * 50_000 + 46_000 + 7_000),
            id="every second",
        ),
        pytest.param(
            Candidate(recompute=7, microbatches=8),
            16 * WHOLE + 2 * 4_000 + 800 + 6 * 50_000 + 46_000 + 7_000,
            id="every seventh",
        ),
    ],
)
def test_hand_calculation(candidate: Candidate, expected: float) -> None:
    assert total(candidate) == pytest.approx(expected)


def test_exchange_of_whole_gradients_may_be_the_peak() -> None:
    """At level 0 all buckets exist at the end of the backward pass, beside gradients of what mp shards."""
    small = model(1, kinds=(dataclasses.replace(BLOCK, parameters=10**6),))
    assert total(Candidate(dp=2, mp=2), small, batch=2) == pytest.approx((16 + 4) * (10**6 - 400 + 2500))
    assert total(Candidate(dp=2), small, batch=2) < 17 * (10**6 + 5000), "other gradients are views of them"


def test_the_gradient_of_a_large_table_is_beside_what_it_is_added_to() -> None:
    """As is that of the head, whose scores take little here. A first pass has nothing that it would be added to."""
    large = model(
        before=Part("before", 10**6, 10**6, saved_bytes=800, output_bytes=4_000),
        after=Part("after", 10**6, 10**6, saved_bytes=9_000, sharded_saved_bytes=6_000),
    )
    parameters = 2 * 10**6 + 8000
    assert total(Candidate(), large) == pytest.approx(16 * parameters + 8 * (KEPT + LOSS), rel=1e-3)
    assert total(Candidate(microbatches=8), large) == pytest.approx(16 * parameters + KEPT + 4e6, rel=1e-3)


def test_state_of_trained_parameters_only() -> None:
    assert total(Candidate(microbatches=8), trained=0.25) == pytest.approx((4 + 12 * 0.25) * WHOLE + KEPT + LOSS)


def test_the_fullest_rank_need_not_be_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a block less on both ends, as many publications have it, the second rank is the fullest."""
    profile = model(14, loss_bytes=0.0, sharded_loss_bytes=0.0, before=Part("before", 0), after=Part("after", 0))
    candidate = pipelined("1f1b", pp=4, microbatches=8)
    sizes = np.array([[3], [4], [4], [3]])

    def uneven(*_: object) -> Cut:
        return Cut(sizes, np.arange(4))

    monkeypatch.setattr(planner_memory, "cut", uneven)
    memory = peak_memory(profile, Recipe(batch_size=8), CPU, Candidates.of([candidate]))
    assert memory.stage.tolist() == [1]
    # 3 in flight of 4 blocks, whose outputs wait to be sent on; gradients of this step alone
    expected = (4 + 4 + 8) * 4000 + 3 * (4 * 50_000 + 4_000) + 7_000 + 2 * 4_000
    assert memory.bytes[0] == pytest.approx(expected)
    account = memory_account(profile, Recipe(batch_size=8), CPU, candidate)
    assert [row["total"] == pytest.approx(expected) for row in account] == [False, True, False, False]


def test_loss_of_the_whole_batch() -> None:
    """`exact` computes it at once, before it lets go of the gradients of the last step; schedules see microbatches."""
    large = model(loss_bytes=1e7, sharded_loss_bytes=1e7)
    exact, gpipe = (total(pipelined(name, pp=2, microbatches=4), large) for name in ("exact", "gpipe"))
    assert exact - gpipe == pytest.approx(6e7 + 4 * (4 * 1000 + 2000))  # 8 sequences against 2


def test_tied_weights_are_on_both_ends() -> None:
    tied = model(shared_parameters=3000)
    recipe = Recipe(batch_size=8)
    apart, together = (
        memory_account(profile, recipe, CPU, pipelined("1f1b", pp=2, microbatches=4)) for profile in (model(), tied)
    )
    assert [after["parameters"] - before["parameters"] for before, after in zip(apart, together, strict=True)] == [
        0,
        4 * 3000,
    ]
    assert total(Candidate(), tied) == total(Candidate())
    v_shaped = pipelined("zbv_zero_bubble", pp=2, virtual_stages=2, microbatches=4)
    assert total(v_shaped, tied) == total(v_shaped)  # one rank has both ends


def test_hybrid_sharding_and_cp_divide_the_state() -> None:
    account = [
        memory_account(model(), Recipe(batch_size=8), CPU, candidate)[0]["optimizer"]
        for candidate in (
            Candidate(dp=8, level=2),
            Candidate(dp=8, level=2, replicate=2),
            Candidate(dp=4, cp=2, level=2, replicate=4),
            Candidate(dp=8, level=0, replicate=8),
        )
    ]
    assert account == pytest.approx([WHOLE, 2 * WHOLE, 4 * WHOLE, 8 * WHOLE])


def test_context_and_fragmentation() -> None:
    hardware = CPU.with_constants(dataclasses.replace(BARE, context_bytes=1e6, fragmentation=0.1), "test")
    found = peak_memory(model(), Recipe(batch_size=8), hardware, Candidates.of([Candidate()]))
    assert found.bytes[0] == pytest.approx(1.1 * total(Candidate()) + 1e6)
    assert found.limit == 16e9


def test_copies_of_weights_in_a_narrower_type() -> None:
    """Autocast keeps a copy of each weight it has used, for the backward pass, too."""
    assert total(Candidate(), cast_bytes=2) - total(Candidate()) == pytest.approx(2 * (8 * 1000 + 2000))


# --- many at once -----------------------------------------------------------------------------------------------------


def many(count: int = 3000) -> Candidates:
    random = np.random.default_rng(1)
    pp = 2 ** random.integers(0, 4, count)
    pipeline = np.where(pp > 1, random.integers(1, len(PIPELINES), count), 0)
    two = of_schedules("least_stages", pipeline) == 2
    dp, level = 2 ** random.integers(0, 3, count), random.integers(0, 4, count)
    replicate = np.where((level > 0) & (dp > 1), random.integers(1, 3, count), 1)
    return Candidates(
        dp=dp, mp=2 ** random.integers(0, 3, count), pp=pp, cp=2 ** random.integers(0, 2, count), level=level,
        replicate=replicate, ep=np.where(dp > replicate, random.integers(1, 3, count), 1),
        compile=random.integers(0, 2, count),
        sequence_parallel=random.integers(0, 2, count), pipeline=pipeline, virtual_stages=np.where(two, 2, 1),
        split=random.integers(0, 2, count) * (pp > 1), microbatches=2 ** random.integers(3, 6, count),
        recompute=random.choice([0, -1, 1, 2, 3], count), backend=random.integers(0, 3, count),
    )  # fmt: skip


def test_many_as_each_by_itself_and_as_the_account() -> None:
    kinds = (BLOCK, dataclasses.replace(BLOCK, name="other", parameters=1500, saved_bytes=90_000, peak_bytes=20_000))
    kinds = (kinds[0], dataclasses.replace(kinds[1], experts=4, expert_parameters=400, expert_saved_bytes=9_000))
    blocks = (0, 1, 1, 0, 0, 1, 0, 0) * 2
    profile = dataclasses.replace(model(16), kinds=kinds, blocks=blocks)
    recipe, candidates = Recipe(batch_size=256, cast_bytes=2), many()
    found = peak_memory(profile, recipe, CPU, candidates)
    for index in range(0, len(candidates), 29):
        one = peak_memory(profile, recipe, CPU, Candidates.of([candidates[index]]))
        assert one.bytes[0] == pytest.approx(found.bytes[index], rel=1e-12)
        account = memory_account(profile, recipe, CPU, candidates[index])
        totals = [row["total"] for row in account]
        assert max(totals) == pytest.approx(found.bytes[index], rel=1e-12)
        assert totals[found.stage[index]] == pytest.approx(max(totals), rel=1e-12)
        assert all(sum(row[name] for name in PIECES) == pytest.approx(row["total"]) for row in account)
        assert all(row[name] >= 0 for row in account for name in PIECES)


def test_no_candidates() -> None:
    assert len(peak_memory(model(), Recipe(batch_size=8), CPU, many(10).select(np.zeros(10, bool))).bytes) == 0


# --- microbatches in flight -------------------------------------------------------------------------------------------


def states(name: str, ranks: int, microbatches: int, virtual_stages: int, rank: int) -> np.ndarray:
    """[moments, in flight and waiting for gradients of weights, by stage of the rank] of the table that runs."""
    schedule = build_schedule(name, ranks, microbatches, virtual_stages)
    place = {stage: index for index, stage in enumerate(schedule.stages_of(rank))}
    now, seen = np.zeros(2 * len(place), dtype=int), set()
    for action in schedule.actions[rank]:
        index = place[action.stage]
        if action.kind is Kind.F:
            now[index] += 1
        elif action.kind in (Kind.B, Kind.I):
            now[index] -= 1
            now[index + len(place)] += action.kind is Kind.I
        else:
            now[index + len(place)] -= 1
        seen.add(tuple(now.tolist()))
    return np.array(sorted(seen))


@pytest.mark.parametrize(
    ("name", "virtual_stages"),
    [
        (spec.name, number)
        for spec in SCHEDULE_SPECS.values()
        for number in range(spec.least_stages, (spec.most_stages or 3) + 1)
    ],
)
def test_microbatches_in_flight_are_those_of_the_schedule(name: str, virtual_stages: int) -> None:
    random, looked_at = np.random.default_rng(2), 0
    for ranks in (2, 3, 4, 8):
        for microbatches in (1, 2, 3, 4, 6, 8, 12, 16, 17):
            wanted = PipelineParallel(name, "microbatch", name, microbatches, virtual_stages)
            if check_schedule(wanted, ranks, microbatches):
                continue
            flight = in_flight(SCHEDULE_SPECS[name], ranks, virtual_stages, microbatches)
            flying, waiting = flight.flying, flight.waiting
            if SCHEDULE_SPECS[name].all_forward_first:
                flying = flying * microbatches
            for rank in range(ranks):
                table = states(name, ranks, microbatches, virtual_stages, rank)
                ours = np.concatenate([flying[rank], waiting[rank]], axis=1)
                # Bytes of the stages, and what of them waits: less than is kept; with recomputation far more, and then
                # which stage it waits in is not told exactly.
                for waits in (0.0, 0.9, 12.0):
                    stages = random.uniform(0.7, 1.3, virtual_stages) if waits < 1 else np.ones(virtual_stages)
                    sizes = np.concatenate([stages, waits * stages])
                    least, found = (table @ sizes).max(), (ours @ sizes).max()
                    if name == "zbv_zero_bubble":  # an upper bound, close with two microbatches for each rank
                        assert found >= least * (1 - 1e-9)
                        assert found <= least * 1.10 or ranks < microbatches < 2 * ranks
                    else:
                        assert found == pytest.approx(least, rel=1e-9), (ranks, microbatches, rank, waits)
                    looked_at += 1
    assert looked_at > 50


def backward_passes(
    name: str, ranks: int, microbatches: int, virtual_stages: int, rank: int, blocks: int
) -> np.ndarray:
    """As `states`, while the first and while the last of so many blocks of a stage runs backward, by block."""
    schedule = build_schedule(name, ranks, microbatches, virtual_stages)
    place = {stage: index for index, stage in enumerate(schedule.stages_of(rank))}
    now, rows = np.zeros(2 * len(place)), []
    for action in schedule.actions[rank]:
        index = place[action.stage]
        if action.kind is Kind.F:
            now[index] += blocks
        elif action.kind in (Kind.B, Kind.I):
            waits = index + len(place) if action.kind is Kind.I else index
            rows.append(now.copy())
            now[index] -= blocks - 1
            now[waits] += blocks - 1 if waits != index else 0
            rows.append(now.copy())
            now[index] -= 1
            now[waits] += waits != index
        else:
            now[index + len(place)] -= blocks
    return np.array(rows)


@pytest.mark.parametrize("blocks", [1, 2, 5])
@pytest.mark.parametrize(
    ("name", "virtual_stages"),
    [("zbv_zero_bubble", 2), ("dualpipev", 2), *(("interleaved_zero_bubble", n) for n in (2, 3))],
)
def test_what_is_there_beside_a_running_backward_pass(name: str, virtual_stages: int, blocks: int) -> None:
    """What waits takes up to 12 times what is kept, as with recomputation: the last block of a pass decides then."""
    looked_at = 0
    for ranks, microbatches in itertools.product((2, 3, 4, 8), (1, 2, 4, 6, 8, 12, 16, 17)):
        wanted = PipelineParallel(name, "microbatch", name, microbatches, virtual_stages)
        if check_schedule(wanted, ranks, microbatches):
            continue
        flight = in_flight(SCHEDULE_SPECS[name], ranks, virtual_stages, microbatches)
        for rank, waits in itertools.product(range(ranks), (0.0, 0.9, 3.0, 12.0)):
            sizes = np.repeat([1.0, waits], virtual_stages)
            least = (backward_passes(name, ranks, microbatches, virtual_stages, rank, blocks) @ sizes).max()
            ours = np.concatenate([flight.flying[rank], flight.waiting[rank]], axis=1) * blocks @ sizes
            found = (ours + flight.behind * (1 - waits)).max()
            if name == "zbv_zero_bubble" and ranks < microbatches < 2 * ranks:  # an upper bound
                assert found >= least * (1 - 1e-9)
            else:
                assert found == pytest.approx(least, rel=1e-9), (ranks, microbatches, rank, waits)
            looked_at += 1
    assert looked_at > 100


def test_layers_that_are_not_trained_put_nothing_off() -> None:
    """With a zero-bubble schedule: neither blocks nor the head hold anything for gradients that nobody makes."""

    def with_weight(trained: bool) -> float:
        item = MatMul(16, 8, 100, right_gradient=trained)
        block, after = (dataclasses.replace(part, matmuls=(item,)) for part in (BLOCK, AFTER))
        return total(way, model(kinds=(block,), after=after))

    way = pipelined("zbv_zero_bubble", pp=2, virtual_stages=2, microbatches=4, recompute=FULL)
    assert with_weight(False) == total(way, model())
    assert with_weight(True) > with_weight(False)


# --- real runs --------------------------------------------------------------------------------------------------------


Measured = Callable[[str], list[dict[str, int]]]


@pytest.fixture(scope="module")
def measured(group_of: GroupOf) -> Measured:
    """Case -> by pipe rank what its ranks took at most."""
    on = functools.cache(lambda ranks: group_of(REAL, f"on_{ranks}", ranks, MALLOC_ARENA_MAX="1"))

    def of(name: str) -> list[dict[str, int]]:
        fields = real.CASES[name]
        found = on(real.ranks_of(fields)).read_all(name)
        by_stage = [[sizes for stage, sizes in found if stage == rank] for rank in range(fields.get("pp", 1))]
        return [{key: max(sizes[key] for sizes in ranks) for key in ranks[0]} for ranks in by_stage]

    return of


EVERYDAY = {"zero3_full", "1f1b"}
SELDOM = [name for index, name in enumerate(real.CASES) if index % 4]
"""Dry runs meet more."""


@pytest.fixture(scope="module")
def profile() -> ModelProfile:
    """Of the model that the real runs train."""
    from autolaunch_strategies.planner.module_profile import profile_module

    return profile_module(real.module(), real.POSITIONS, device_type="cpu")


def predicted(name: str, profile: ModelProfile) -> list[dict[str, float]]:
    return memory_account(profile, Recipe(batch_size=real.BATCH), CPU, real.candidate(real.CASES[name]))


def gradients_at_end(name: str, profile: ModelProfile) -> list[float]:
    """What the plan says that gradients take when the optimizer steps, by pipe rank."""
    one = real.candidate(real.CASES[name])
    candidates, columns = Candidates.of([one]), planner_memory._Columns(len(profile.kinds))
    pieces = {piece: np.zeros((columns.count, 1)) for piece in PIECES}
    planner_memory._put_amounts(profile, Recipe(batch_size=real.BATCH), CPU, candidates, columns, pieces)
    ((_, counts, ranks),) = planner_memory._groups(profile, candidates, columns)
    assert ranks[-one.pp :].tolist() == [*range(one.pp)]  # the last moment
    return (counts[-one.pp :] @ pieces["gradients"][:, 0]).tolist()


@pytest.mark.parametrize("name", tiered(real.CASES, EVERYDAY, SELDOM.__contains__))
def test_bytes_of_real_runs(name: str, measured: Measured, profile: ModelProfile) -> None:
    """State to the byte (shards may be padded), and what malloc gives out at most.

    That includes what Python needs for itself, some 0.3 MiB of 8 to 60.
    """
    fields = real.CASES[name]
    ends = gradients_at_end(name, profile)
    for truth, ours, at_end in zip(measured(name), predicted(name, profile), ends, strict=True):
        assert ours["optimizer"] == pytest.approx(truth["optimizer"], rel=0.002)
        assert at_end == pytest.approx(truth["gradients"], rel=0.002)
        if not fields.get("level"):
            assert ours["parameters"] == pytest.approx(truth["parameters"], rel=0.001)
        assert -0.12 <= ours["total"] / truth["peak"] - 1 <= 0.10, (truth, ours)


# Not interleaved_zb: what waits for gradients of weights at its peak is not held by autograd, which is asked here.
ASKED_AUTOGRAD = [
    name
    for name, fields in real.CASES.items()
    if not fields.get("recompute") and not fields.get("level") and name != "interleaved_zb"
]


@pytest.mark.parametrize("name", tiered(ASKED_AUTOGRAD, EVERYDAY & {*ASKED_AUTOGRAD}, SELDOM.__contains__))
def test_activations_kept_in_real_runs(name: str, measured: Measured, profile: ModelProfile) -> None:
    for truth, ours in zip(measured(name), predicted(name, profile), strict=True):
        assert ours["activations"] == pytest.approx(truth["saved"], rel=0.08)


# --- publications -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def errors() -> dict[str, list[published.Error]]:
    found: dict[str, list[published.Error]] = {}
    for row in published.errors():
        found.setdefault(row.row.source, []).append(row)
    return found


@pytest.mark.parametrize(
    ("source", "most", "rows"),
    [("korthikanti22_fig1", 0.05, 8), ("zerobubble_table4", 0.03, 48), ("mit_orcd_202610", 0.05, 50)],
)
def test_published_memory(source: str, most: float, rows: int, errors: dict[str, list[published.Error]]) -> None:
    assert len(errors[source]) == rows
    assert np.mean([abs(row.relative) for row in errors[source]]) <= most


def test_whether_published_runs_fit() -> None:
    """Four that ran, with up to 97 % of the memory, are thought not to."""
    found = list(published.shares())
    assert (len(found), sum(not item.ran for item, _ in found)) == (60, 10)
    wrongly = [item.memory_gib for item, share in found if (share <= MEASURED) != item.ran]
    assert len(wrongly) == 4 and all(gib is not None and gib > 0.83 * 268 for gib in wrongly)


def test_published_memory_of_torchtitan(errors: dict[str, list[published.Error]]) -> None:
    """Rows whose microbatches are stated. The others, of 405B over pp, are predicted too low, for no known reason."""
    found = errors["torchtitan_202412"]
    stated = [row for row in found if row.row.row["mbs"]]
    assert (len(stated), len(found)) == (12, 18)
    assert np.mean([abs(row.relative) for row in stated]) <= 0.05
    assert np.mean([abs(row.relative) for row in found]) <= 0.08
