"""Which candidate is chosen, what a plan says of it, and why something else was not."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
import yaml

from autolaunch.planning.choice import _batch_that_divides, _without_use
from autolaunch_strategies.config import ConfigError, parse_mesh
from autolaunch_strategies.planner import choose
from autolaunch_strategies.planner.candidate import FULL, NO_RECOMPUTE, PIPELINES, SELECTIVE, Candidate, Candidates
from autolaunch_strategies.planner.choose import diverse, make_plan, pick
from autolaunch_strategies.planner.document import document, rounded
from autolaunch_strategies.planner.explain import SEVERAL, asked_of, fields_of, why
from autolaunch_strategies.planner.plan import Looked, Plan, simplicity
from autolaunch_strategies.planner.reasons import PART_WORDS, in_bytes, in_seconds
from autolaunch_strategies.planner.settings import overrides
from autolaunch_strategies.planner.time import step_time
from tests.planner.candidates import GIB, llama, machines, model, recipe
from tests.support.config_candidate import candidate_of
from tests.support.messages import Told, assert_only_told


@pytest.fixture(scope="module")
def plan() -> Plan:
    """Llama 3 8B on one node."""
    return make_plan(llama("8b"), recipe(128), machines(8))


def looked(*ways: tuple[Candidate, float, float], share: float = 0.92) -> Looked:
    """Candidates with (seconds, share of the memory), the fastest first."""
    ways = tuple(sorted(ways, key=lambda way: way[1]))
    columns = Candidates.of(way[0] for way in ways)
    return Looked(columns, np.asarray([way[1] for way in ways]), np.asarray([way[2] for way in ways]), 1.0, share)


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["pp=1f1b", "pp.virtual_stages=1"], ["pp=1f1b pp.virtual_stages is without use", "mesh.pp=2 asks for more"]),
        (["cp=ring"], ["cp=ring is without use", "one rank along cp", "mesh.cp=2"]),
        (["pp.microbatches=8", "dp=fsdp"], []),
    ],
)
def test_what_the_chosen_mesh_has_no_use_for_is_said(plan: Plan, typed: list[str], said: list[str]) -> None:
    assert (plan.chosen.pp, plan.chosen.cp) == (1, 1)
    remarks = _without_use(plan, typed)
    assert len(remarks) == bool(said) and all(part in remarks[0] for part in said)


def test_what_a_mesh_that_was_typed_has_no_use_for_is_no_surprise(plan: Plan) -> None:
    """As without a planner: a schedule is there for the meshes that have stages."""
    assert _without_use(dataclasses.replace(plan, wanted={"pp": (1,)}), ["mesh=8", "pp=1f1b"]) == []


def test_sequence_parallelism_that_shards_nothing_is_planned_without() -> None:
    """Asked for, it is what runs without: the same time and memory, and that is said."""
    profile = dataclasses.replace(llama("8b"), refused={"sequence_parallel": "there is no place for it"})
    asked, without = (
        make_plan(profile, recipe(128), machines(8), {"mp": (2,), "sequence_parallel": (number,)}) for number in (1, 0)
    )
    assert asked.chosen.sequence_parallel and asked.chosen.mp == 2
    assert (asked.seconds, asked.memory_bytes) == (without.seconds, without.memory_bytes)
    (said,) = _without_use(asked, ["mp=seq_parallel"])
    assert "mp=seq_parallel is without use" in said and "there is no place for it" in said
    left = make_plan(profile, recipe(128), machines(8), {"mp": (2,)})
    assert not left.chosen.sequence_parallel and _without_use(left, []) == []
    really = make_plan(llama("8b"), recipe(128), machines(8), {"mp": (2,), "sequence_parallel": (1,)})
    assert really.memory_bytes < asked.memory_bytes


# --- the pick --------------------------------------------------------------------------------------------------------

DDP, FSDP = Candidate(dp=4, replicate=4), Candidate(dp=4, level=3)
MP, MIXED = Candidate(mp=4), Candidate(dp=2, mp=2, replicate=2)


def test_the_simplest_within_the_noise() -> None:
    assert pick(looked((MP, 1.0, 0.5), (MIXED, 1.01, 0.5), (DDP, 1.02, 0.5)), 0.03) == 2
    assert pick(looked((MP, 1.0, 0.5), (MIXED, 1.01, 0.5), (DDP, 1.04, 0.5)), 0.03) == 1
    assert pick(looked((MP, 1.0, 0.5), (MIXED, 1.04, 0.5), (DDP, 1.05, 0.5)), 0.03) == 0
    assert pick(looked((MP, 1.0, 0.5), (MIXED, 1.01, 0.5), (DDP, 1.02, 0.5)), 0.0) == 0


def test_of_equally_simple_ones_the_smaller() -> None:
    one, other = Candidate(dp=4, level=3, microbatches=2), Candidate(dp=4, level=3, microbatches=4)
    assert pick(looked((one, 1.0, 0.8), (other, 1.01, 0.5)), 0.03) == 1
    assert pick(looked((one, 1.0, 0.501), (other, 1.01, 0.5)), 0.03) == 0  # as good as equal: the faster


def test_what_may_not_fit_is_chosen_only_if_nothing_else_does() -> None:
    assert pick(looked((DDP, 1.0, 0.95), (FSDP, 2.0, 0.9)), 0.03) == 1
    assert pick(looked((DDP, 1.0, 1.1), (FSDP, 2.0, 1.0)), 0.03) == 1
    assert pick(looked((DDP, 1.0, 0.95), (FSDP, 2.0, 0.9), share=0.96), 0.03) == 0


def test_simpler_is() -> None:
    none, exact, f1b, zbv = (PIPELINES.index(name) for name in ("none", "exact", "1f1b", "zbv_zero_bubble"))
    order = [
        DDP,
        FSDP,
        Candidate(dp=4, level=1),
        Candidate(dp=4, level=3, replicate=2),
        MIXED,
        Candidate(dp=2, pp=2, replicate=2, pipeline=f1b),
        MP,
        Candidate(mp=4, sequence_parallel=1),
        Candidate(dp=1, pp=4, pipeline=zbv, virtual_stages=2),
        Candidate(dp=2, pp=2, mp=2, replicate=2, pipeline=exact),
    ]
    values = simplicity(Candidates.of(order)).tolist()
    assert values == sorted(values)
    assert len(set(values)) == len(values)
    assert none == 0
    assert simplicity(Candidates.of([DDP, Candidate(dp=4, replicate=4, recompute=FULL)])).tolist() == [0, 1]
    # What is not dp is as small as may be; and level 1 comes before level 0 once memory is short.
    deep, wide = Candidate(dp=2, pp=4, pipeline=f1b, replicate=2), Candidate(dp=4, pp=2, pipeline=f1b, replicate=4)
    assert pick(looked((deep, 1.0, 0.5), (wide, 1.01, 0.5)), 0.03) == 1
    shared = Candidate(dp=4, level=1)
    assert pick(looked((DDP, 1.0, 0.65), (shared, 1.01, 0.5)), 0.03) == 0
    assert pick(looked((DDP, 1.0, 0.75), (shared, 1.01, 0.5)), 0.03) == 1


def test_alternatives_are_of_different_kinds() -> None:
    ways = [(Candidate(dp=4, level=3, microbatches=number), 1.0 + number / 100, 0.5) for number in range(1, 6)]
    found = looked(*ways, (MP, 2.0, 0.5), (Candidate(mp=2, dp=2), 3.0, 0.5), (Candidate(pp=4), 0.5, 2.0))
    assert diverse(found, 10).tolist() == [1, 2, 6, 7]  # the first needs twice the memory
    assert diverse(found, 3).tolist() == [1, 2, 6]


def test_alternatives_recompute_only_what_has_to_be() -> None:
    again = dataclasses.replace(FSDP, recompute=FULL)
    assert diverse(looked((FSDP, 1.0, 0.9), (again, 1.3, 0.5)), 10).tolist() == [0]
    assert diverse(looked((FSDP, 1.0, 0.95), (again, 1.3, 0.5)), 10).tolist() == [0, 1]


# --- plans -----------------------------------------------------------------------------------------------------------


def test_a_plan_is_what_its_numbers_say(plan: Plan) -> None:
    found = plan.looked
    assert (np.diff(found.seconds[np.isfinite(found.seconds)]) >= 0).all()
    fastest = found.seconds[found.fits].min()
    assert fastest <= plan.seconds <= 1.03 * fastest
    near = found.select(found.fits & (found.seconds <= 1.03 * fastest))
    assert plan.simplicity == near.simplicity.min()
    assert sum(plan.parts.values()) == pytest.approx(plan.seconds)
    assert plan.memory_bytes <= 0.92 * 80 * GIB
    assert plan.chosen.ranks == 8
    assert 0.01 < plan.spread < 0.5
    assert plan.plateau["3%"] == len(near)
    assert list(plan.plateau) == ["1%", "3%", "5%", "10%"]


def test_what_a_plan_says_is_whole(plan: Plan) -> None:
    said = document(plan)
    chosen = said["chosen"]
    assert chosen["overrides"] == overrides(plan.chosen, plan.profile, plan.recipe)
    assert chosen["seconds_low"] < chosen["seconds"] < chosen["seconds_high"]
    assert chosen["tokens_per_second"] == pytest.approx(128 * 8192 / plan.seconds, rel=1e-5)
    assert 0.2 < chosen["mfu"] < 0.8
    assert max(stage["total"] for stage in chosen["stages"]) == pytest.approx(plan.memory_bytes, rel=1e-5)
    assert sum(stage["blocks"] for stage in chosen["stages"]) == 32
    assert said["counts"]["considered"] == len(plan.looked)
    assert sum(said["counts"][name] for name in ("fit", "may_fit", "too_large")) == said["counts"]["considered"]
    assert all(said["counts"][name] for name in ("fit", "may_fit", "too_large"))
    assert "memory" not in said["counts"]["rejected"]
    assert said["plateau"] == plan.plateau
    cells = [(way["mesh"], way["overrides"][-2]) for way in said["alternatives"]]
    assert 3 <= len(cells) <= 10
    seconds = [way["seconds"] for way in said["alternatives"]]
    assert seconds == sorted(seconds)
    assert all(way["fits"] in ("yes", "tight", "over") for way in said["alternatives"])
    assert chosen["overrides"] not in [way["overrides"] for way in said["alternatives"]]
    front = [(way["seconds"], way["memory_bytes"]) for way in said["pareto"]]
    assert front == sorted(front)
    assert all(later[1] < sooner[1] for sooner, later in itertools.pairwise(front))
    assert front[-1][1] <= chosen["memory_bytes"]
    assert said["hardware"] == {"name": "h100", "nodes": 1, "devices_per_node": 8, "origin": "built in"}


def test_equal_inputs_give_equal_bytes() -> None:
    texts = {
        yaml.safe_dump(document(make_plan(llama("70b"), recipe(256), machines(64))), sort_keys=False) for _ in range(2)
    }
    assert len(texts) == 1
    assert "!!python" not in texts.pop()


def test_numbers_are_rounded_to_what_they_mean() -> None:
    assert rounded({"a": 1.23456789, "b": [np.float64(2e9 / 3), np.int64(4)], "c": "d", "e": True}) == {
        "a": 1.23457,
        "b": [666667000.0, 4],
        "c": "d",
        "e": True,
    }


def test_wanted_values_are_kept() -> None:
    found = make_plan(llama("8b"), recipe(128), machines(8), {"mp": (2,), "recompute": (FULL,)})
    assert (found.chosen.mp, found.chosen.recompute) == (2, FULL)


def test_a_small_model_needs_no_sharding() -> None:
    chosen = make_plan(model(layers=2, positions=256), recipe(512), machines(8)).chosen
    assert (chosen.dp, chosen.mp, chosen.pp, chosen.cp, chosen.recompute) == (8, 1, 1, 1, 0)


def test_a_large_model_is_divided() -> None:
    found = make_plan(llama("405b"), recipe(512), machines(1024))
    assert found.chosen.mp * found.chosen.pp * found.looked.candidates.shard.max() > 8
    assert found.memory_bytes <= 0.92 * 80 * GIB


def test_devices_stay_idle_only_if_nothing_runs_on_all() -> None:
    found = make_plan(model(layers=2, heads=8, positions=1024), recipe(8), machines(7))
    assert found.chosen.ranks == 4
    (warning,) = found.warnings
    assert warning.startswith("3 of 7 devices stay idle: ")
    assert "a batch of 8 cannot be cut into 7 x 1 equal parts (dp x microbatches)" in warning
    with pytest.raises(ConfigError, match="there is no way to run this"):
        make_plan(model(layers=2), recipe(8), machines(7), {"devices": (7,)})


def test_more_ranks_of_mp_than_devices_are_told_as_such() -> None:
    """They need not be uneven."""
    with pytest.raises(ConfigError) as raised:
        make_plan(llama("8b"), recipe(64), machines(8), {"mp": (16,)})
    told = Told("8b on 8 x h100", "16 ranks of mp", "devices: 8", allowed="mp of size 1, 2, 4, 8", write="mesh.mp=8")
    assert_only_told(raised.value, told)


@pytest.mark.parametrize(
    ("typed", "write"),
    [
        pytest.param({"dp": (1,), "mp": (16,), "pp": (1,), "cp": (1,)}, "mesh=2x8", id="whole mesh"),
        pytest.param({"mp": (16,), "pp": (1,), "cp": (1,)}, "mesh=-1x8", id="rest of the devices"),
        pytest.param({"mp": (16,)}, "mesh.mp=8", id="one size"),
    ],
)
def test_sizes_of_mp_that_only_a_run_takes_are_told_with_those_that_are_planned(typed: Any, write: str) -> None:
    """Llama has 8 heads of keys and values: beyond 8 ranks a run gathers them, which the planner does not weigh."""
    with pytest.raises(ConfigError) as raised:
        make_plan(llama("8b"), recipe(64), machines(16), typed)
    facts, allowed = ("16 ranks of mp", "8 unevenly"), ("mp of size 1, 2, 4, 8", "a run and a dry run")
    assert_only_told(raised.value, Told("8b on 16 x h100", *facts, allowed=allowed, write=write))
    sizes = parse_mesh(write.removeprefix("mesh=")).sizes if write != "mesh.mp=8" else {"mp": 8}
    wanted = {axis: (size,) for axis, size in sizes.items() if size != -1}
    assert make_plan(llama("8b"), recipe(64), machines(16), wanted).looked.fits.any()


def test_sizes_of_mp_that_nothing_takes_are_not_said_to_run() -> None:
    with pytest.raises(ConfigError) as raised:
        make_plan(llama("8b"), recipe(64), machines(16), {"mp": (3,)})
    told = Told("8b on 16 x h100", "3 ranks of mp", allowed="mp of size 1, 2, 4, 8", write="mesh.mp=8")
    assert_only_told(raised.value, told)


@pytest.mark.parametrize(
    ("ranks", "write"), [pytest.param(96, "cluster=h100x96", id="nodes"), pytest.param(68, "mesh=", id="no nodes")]
)
def test_a_mesh_of_more_ranks_is_told_with_a_cluster_for_it(ranks: int, write: str) -> None:
    with pytest.raises(ConfigError) as raised:
        make_plan(llama("8b"), recipe(64 * ranks), machines(64), {"dp": (ranks,), "mp": (1,), "pp": (1,), "cp": (1,)})
    told = Told("8b on 64 x h100", f"{ranks} ranks", "not 64", allowed=("a mesh of 64 ranks",), write=None)
    assert_only_told(raised.value, told)
    assert raised.value.write.startswith(write)


def test_nothing_fits_says_what_comes_closest() -> None:
    with pytest.raises(ConfigError) as raised:
        make_plan(llama("405b"), recipe(8), machines(8))
    error = raised.value
    assert error.where == "405b on 8 x h100"
    assert error.problem.startswith("nothing fits: a device has 80.0 GiB, and the least that one needs is ")
    assert "a smaller batch needs no less, and nothing is left to recompute" in error.allowed
    assert "closest comes mesh=" in error.allowed


@pytest.mark.parametrize(
    ("size", "batch", "devices", "typed", "lines"),
    [
        pytest.param("70b", 64, 8, {}, {"cluster"}, id="devices"),
        pytest.param("8b", 64, 8, {"recompute": (0,), "dp": (8,), "microbatches": (1,)},
                     {"data.microbatches", "data.batch_size", "cluster"}, id="batch"),
        pytest.param("8b", 16, 8, {"recompute": (0,), "dp": (8,), "level": (0,)},
                     {"mesh", "dp", "cluster"}, id="sharding"),
    ],
)  # fmt: skip
def test_nothing_fits_says_what_would(size: str, batch: int, devices: int, typed: Any, lines: set[str]) -> None:
    """One of the lines may be written; as many devices as are named do, and a node less does not."""

    def fits(count: int) -> bool:
        try:
            return bool(make_plan(llama(size), recipe(batch), machines(count), typed).looked.fits.any())
        except ConfigError:
            return False

    with pytest.raises(ConfigError) as raised:
        make_plan(llama(size), recipe(batch), machines(devices), typed)
    told = raised.value.allowed.partition(";")[0].removeprefix("what would fit: ")
    found = dict(line.partition(" ")[0].split("=") for line in told.split(", "))
    assert found.keys() == lines and raised.value.write in told
    count = int(found["cluster"].removeprefix("h100x"))
    assert fits(count) and not fits(count - 8)


def test_what_is_at_the_edge_of_memory_is_chosen_with_a_warning() -> None:
    profile, training = llama("8b"), recipe(128)
    need = make_plan(profile, training, machines(8)).looked.memory_bytes.min()
    for share, said in ((0.93, "tight"), (0.97, "tight"), (1.03, "over")):
        found = make_plan(profile, training, machines(8, memory=need / share))
        assert document(found)["chosen"]["fits"] == said
        assert any(warning.startswith("The choice may not fit: ") for warning in found.warnings)


def test_mp_beyond_the_fast_domain_is_warned_of() -> None:
    found = make_plan(llama("8b"), recipe(128), machines(16, node=4), {"mp": (8,)})
    assert "8 ranks of mp are more than the 4 devices of a fast domain" in found.warnings


def test_plans_are_read_back_as_candidates(plan: Plan) -> None:
    """What a plan says can be found again: mesh, level and parts of a batch."""
    said = dict(item.split("=", 1) for item in document(plan)["chosen"]["overrides"])
    assert said["mesh"] == plan.chosen.mesh.name
    config: dict[str, Any] = {
        "mesh": plan.chosen.mesh.sizes,
        "dp": {"sharding_level": plan.chosen.level},
        "mp": {"sequence_parallel": bool(plan.chosen.sequence_parallel)},
        "recompute": said["recompute"],
        "data": {"microbatches": int(said["data.microbatches"])},
    }
    if plan.chosen.pp * plan.chosen.cp == 1 and plan.chosen.replicate in (1, plan.chosen.dp):
        assert candidate_of(config) == plan.chosen


# --- reasons ---------------------------------------------------------------------------------------------------------


def test_reasons_compare_with_the_best_of_everything_else(plan: Plan) -> None:
    said = document(plan)["chosen"]["reasons"]
    found = plan.looked
    pool = found.select(found.fits)
    others = pool.candidates.mp != plan.chosen.mp
    best = pool.seconds[others].min()
    other = int(pool.candidates.mp[others][pool.seconds[others].argmin()])
    sentence = next(text for text in said if text.startswith(f"mp={plan.chosen.mp}"))
    difference = best / plan.seconds - 1
    assert f"mp={other}" in sentence
    assert f"{abs(difference):.1%}" in sentence
    assert ("within the noise" in sentence) == (difference <= 0.03)


def test_reasons_name_what_costs_time() -> None:
    """Told by the parts of a step: what the best way with another value has more of, and what it saves."""
    plan = make_plan(llama("70b"), recipe(1024), machines(1024))
    said, found = document(plan)["chosen"]["reasons"], plan.looked
    pool = found.select(found.fits)
    others = (pool.candidates.mp > 1) & (pool.candidates.sequence_parallel != plan.chosen.sequence_parallel)
    other = pool.select(others).select([0])
    parts = step_time(plan.profile, plan.recipe, plan.hardware, other.candidates).parts
    more = {name: (float(parts[name][0]) - plan.parts[name]) / plan.seconds for name in parts}
    worst = max(more, key=lambda name: more[name])
    sentence = next(text for text in said if text.startswith("mp=seq_parallel: mp=tensor_parallel"))
    assert f"adds {PART_WORDS[worst]} (+{more[worst]:.1%} of the step)" in sentence
    assert len(said) == len(set(said))  # what is the same way is told once


def test_reasons_say_what_does_not_fit() -> None:
    said = document(make_plan(llama("70b"), recipe(128), machines(32), {"dp": (32,)}))["chosen"]["reasons"]
    level = next(text for text in said if text.startswith("dp="))
    assert level.startswith("dp=fsdp: nothing else fits; dp=zero2 comes closest and needs ")
    assert " GiB more parameters" in level  # which fsdp shards, and zero2 does not
    assert level.endswith(" where 73.6 GiB may be used.")


def test_numbers_in_sentences() -> None:
    assert [in_seconds(number) for number in (123.4, 4.213, 0.0312, 1.25e-4)] == [
        "123 s",
        "4.21 s",
        "31.2 ms",
        "125 us",
    ]
    assert [in_bytes(number) for number in (74 * GIB, 1.5 * 2**20, 100)] == ["74.0 GiB", "1.5 MiB", "0.1 KiB"]


# --- why not ---------------------------------------------------------------------------------------------------------


def test_why_something_slower_was_not_chosen(plan: Plan) -> None:
    answer = why(plan, {"mp": 8})
    assert answer.candidate is not None
    assert answer.candidate.mp == 8
    assert answer.seconds is not None
    assert answer.parts_difference is not None
    assert sum(answer.parts_difference.values()) == pytest.approx(answer.seconds - plan.seconds, abs=1e-9)
    fitting = plan.looked.seconds[plan.looked.fits]
    assert answer.rank == int((fitting < answer.seconds).sum()) + 1
    assert answer.sentences[0] == f"It takes {answer.seconds / plan.seconds - 1:.1%} more time."
    assert "exchange over mp" in answer.sentences[1]
    assert answer.to_dict()["asked"] == "mp=8"


def test_why_something_that_does_not_fit_was_not_chosen(plan: Plan) -> None:
    answer = why(plan, asked_of("dp=ddp mesh=8"))
    assert (answer.rank, answer.seconds) == (None, None)
    assert answer.rejected[0][0] == "memory"
    assert answer.sentences[0].startswith("Nothing like this fits: at least ")
    assert answer.memory_bytes is not None
    assert answer.memory_bytes > 80 * GIB


def test_why_something_that_can_not_be_was_not_chosen(plan: Plan) -> None:
    answer = why(plan, {"tp": "16"})
    assert answer.candidate is None
    assert answer.to_dict()["found"] is False
    assert {rule for rule, _ in answer.rejected} == {"heads and other sizes % mp"}
    answer = why(plan, {"mesh": "3"})
    assert answer.rejected[0][1] == "the mesh 3 has 3 ranks, not 8"
    answer = why(plan, {"pp": "4", "pipeline": "interleaved_1f1b", "virtual_stages": "16"})
    assert [reason for _, reason in answer.rejected] == ["32 blocks cannot fill 64 pipeline stages"]
    answer = why(plan, {"mesh": "8", "backend": "ring"})
    assert answer.rejected[0][1] == "no mesh has this together: an axis of size 1 has no options"


def test_why_the_chosen_one_was_chosen(plan: Plan) -> None:
    c = plan.chosen
    asked = {"mesh": c.mesh.name, "level": c.level, "microbatches": c.microbatches, "recompute": c.recompute_name}
    assert why(plan, asked).sentences == ("This is what was chosen.",)


def test_why_not_several_replicas(plan: Plan) -> None:
    answer = why(plan, asked_of("dp=hsdp"))
    assert answer.candidate is not None and answer.candidate.level == 3 and answer.candidate.replicate > 1


@pytest.mark.parametrize(
    ("asked", "code"), [("none", NO_RECOMPUTE), ("selective", SELECTIVE), ("full", FULL), ("2", 2), ("3", 3)]
)
def test_why_not_any_way_of_recomputation(plan: Plan, asked: str, code: int) -> None:
    answer = why(plan, {"recompute": asked})
    assert answer.candidate is not None and answer.candidate.recompute == code


def test_why_looks_among_what_has_no_point(plan: Plan) -> None:
    answer = why(plan, {"pp": "gpipe"})
    assert answer.candidate is not None
    assert answer.candidate.pipeline_name == "gpipe"


def test_keys_as_people_type_them() -> None:
    assert fields_of(asked_of("tp=4, pp=2")) == {"mp": 4, "pp": 2}
    assert fields_of(asked_of("mesh=4x2,dp=zero1")) == {"dp": 4, "mp": 2, "pp": 1, "cp": 1, "level": 1}
    assert fields_of(asked_of("pp=1f1b pp.virtual_stages=1 data.microbatches=8")) == {
        "pipeline": PIPELINES.index("1f1b"),
        "virtual_stages": 1,
        "microbatches": 8,
    }
    assert fields_of(asked_of("cp=ring,recompute=full,mp=seq_parallel,dp.replicate=2")) == {
        "backend": 1,
        "recompute": FULL,
        "sequence_parallel": 1,
        "replicate": 2,
    }
    assert fields_of(asked_of("pp=4,pp=1f1b dp=8,dp=hsdp")) == {
        "pp": 4,
        "pipeline": PIPELINES.index("1f1b"),
        "dp": 8,
        "level": 3,
        "replicate": SEVERAL,
    }
    assert fields_of(asked_of("dp=hsdp dp.replicate=2")) == fields_of(asked_of("dp.replicate=2 dp=hsdp"))
    assert fields_of([("recompute", 4), ("split", "balanced"), ("level", 0), ("cp", "none")]) == {
        "recompute": 4,
        "split": 1,
        "level": 0,
        "cp": 1,
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("recompte=full", "why=recompte=full: no such key; did you mean recompute?"),
        ("pp=1f2b", "why=pp=1f2b: not known; did you mean 1f1b?"),
        ("dp=zero4", "why=dp=zero4: not known; did you mean zero"),
        ("level=4", "why=level=4: not known"),
        ("mp=0", "why=mp=0: not a size"),
        ("mp=4,tp=2", "why=tp=2: another value of it stands beside it"),
        ("recompute=selective,recompute=full", "why=recompute=full: another value of it stands beside it"),
        ("recompute=full,recompute=selective", "why=recompute=selective: another value of it stands beside it"),
        ("precision=float8", "why=precision=float8: no such key\n  allowed"),
        ("mp", "why=mp: mp is no key=value"),
        ("", "why=: nothing is no key=value"),
        ("recompute=some", "recompute=some: no such way of activation checkpointing"),
    ],
)
def test_what_was_typed_wrong(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        fields_of(asked_of(text))
    assert str(raised.value).startswith(message)


def test_fewer_devices_are_whole_nodes_first() -> None:
    assert choose._fewer(machines(7)) == [6, 5, 4, 3, 2, 1]
    assert choose._fewer(dataclasses.replace(machines(32), nodes=3))[:4] == [16, 8, 7, 6]
    many = choose._fewer(machines(16384))
    assert many[:2] == [16376, 16368]
    assert 8192 in many


def test_a_batch_that_divides_is_named() -> None:
    profile = llama("8b")
    said = _batch_that_divides(make_plan(profile, recipe(15), machines(16)))
    assert said.startswith("15 does not divide among 16 devices: with data.batch_size=16 a step is predicted to take ")
    assert _batch_that_divides(make_plan(profile, recipe(16), machines(16))) == ""
    assert _batch_that_divides(make_plan(profile, recipe(20), machines(16))) == ""  # 16 and 32 are other trainings
