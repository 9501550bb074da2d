"""Which ways to run a training are proposed: each once, all that our runtime has, and why not the others."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from autolaunch_strategies.apply.check import config_errors
from autolaunch_strategies.config import CP_BACKENDS, SCHEDULES, ConfigError, PipelineParallel, parallel_config
from autolaunch_strategies.planner.candidate import (
    FIELDS,
    FULL,
    NO_RECOMPUTE,
    PIPELINES,
    SELECTIVE,
    Candidate,
    Candidates,
    recompute_code,
)
from autolaunch_strategies.planner.choose import predicted
from autolaunch_strategies.planner.enumerate import Space, divisors, enumerate_candidates
from autolaunch_strategies.planner.profile import ModelProfile, Recipe
from autolaunch_strategies.schedules.schedule import check_schedule, default_virtual_stages, fitting_microbatches
from tests.planner.candidates import llama, machines, model, recipe
from tests.support.messages import assert_told

EXACT, GPIPE, ONE_F_ONE_B = (PIPELINES.index(name) for name in ("exact", "gpipe", "1f1b"))
INTERLEAVED, LOOPED, ZBV = (PIPELINES.index(name) for name in ("interleaved_1f1b", "looped_bfs", "zbv_zero_bubble"))
GATHER, RING, ULYSSES, USP = range(len(CP_BACKENDS))


def proposed(
    devices: int = 8,
    profile: ModelProfile | None = None,
    training: Recipe | None = None,
    wanted: dict[str, Sequence[int]] | None = None,
    node: int = 8,
) -> tuple[Candidates, dict[str, str]]:
    """The candidates, and rule -> reason of what was refused."""
    found, rejections = enumerate_candidates(
        profile or model(), training or recipe(), machines(devices, node), wanted, limit=10**9
    )
    return found, {item.rule.name: item.reason for item in rejections}


def rows(candidates: Candidates, *names: str) -> set[tuple[int, ...]]:
    return set(zip(*(getattr(candidates, name).tolist() for name in names), strict=True))


# Rule -> (what makes it refuse, a candidate that it refuses, one like it that it lets through, its reason)
RULES: list[Any] = [
    pytest.param("devices", {}, {"dp": 3}, {"dp": 8}, "the mesh 3 has 3 ranks, not 8", id="devices"),
    pytest.param(
        "mp_refused",
        {"profile": dataclasses.replace(model(), refused={"mp": "its heads are odd"})},
        {"mp": 2},
        {"pp": 2},
        "small can't be divided along mp: its heads are odd",
        id="mp refused",
    ),
    pytest.param(
        "pp_refused",
        {"profile": dataclasses.replace(model(), refused={"pp": "no blocks"})},
        {"pp": 2},
        {"mp": 2},
        "small can't be divided along pp: no blocks",
        id="pp refused",
    ),
    pytest.param(
        "cp_refused",
        {"profile": dataclasses.replace(model(), refused={"cp": "positions meet"})},
        {"cp": 2},
        {"mp": 2},
        "small can't be divided along cp: positions meet",
        id="cp refused",
    ),
    pytest.param(
        "sequence_parallel_refused",
        {"profile": dataclasses.replace(model(), refused={"sequence_parallel": "it has no place for it"})},
        {"mp": 2, "sequence_parallel": 1},
        {"mp": 2},
        "small runs the same with mp=seq_parallel: it has no place for it",
        id="sequence parallelism refused",
    ),
    pytest.param(
        "mp_sizes",
        {"profile": dataclasses.replace(model(), mp_sizes=(8, 2))},
        {"mp": 4},
        {"mp": 2},
        "the planner weighs no 4 ranks of mp: they share 2 unevenly (heads, those of keys and values, and what else "
        "they divide)",
        id="key heads",
    ),
    pytest.param(
        "blocks",
        {"profile": model(layers=6)},
        {"pp": 4, "virtual_stages": 2},
        {"pp": 2, "virtual_stages": 3},
        "6 blocks cannot fill 8 pipeline stages",
        id="blocks",
    ),
    pytest.param(
        "positions",
        {"profile": model(positions=1028)},
        {"cp": 4},
        {"cp": 2},
        "sequences of 1028 positions cannot be cut into 2 x 4 equal parts",
        id="positions",
    ),
    pytest.param(
        "short_parts",
        {"profile": model(positions=512)},
        {"cp": 8},
        {"cp": 4},
        "512 positions over 8 ranks of cp are parts of 64: too short to gain",
        id="short parts",
    ),
    pytest.param(
        "batch",
        {"training": recipe(12)},
        {"dp": 4, "microbatches": 2},
        {"dp": 4, "microbatches": 3},
        "a batch of 12 cannot be cut into 4 x 2 equal parts (dp x microbatches)",
        id="batch",
    ),
    pytest.param(
        "mean_loss",
        {"training": recipe(mean_loss=False)},
        {"pp": 2, "pipeline": ONE_F_ONE_B},
        {"pp": 2, "pipeline": EXACT},
        "1f1b needs a loss that is a mean over samples; exact runs any",
        id="mean loss",
    ),
    pytest.param(
        "virtual_stages",
        {},
        {"pp": 2, "pipeline": ZBV, "virtual_stages": 3},
        {"pp": 2, "pipeline": INTERLEAVED, "virtual_stages": 3},
        "zbv_zero_bubble cannot have 3 stages per rank, but exactly 2",
        id="virtual stages",
    ),
    pytest.param(
        "schedule_microbatches",
        {},
        {"pp": 4, "pipeline": ONE_F_ONE_B, "microbatches": 2},
        {"pp": 4, "pipeline": GPIPE, "microbatches": 2},
        "1f1b on 4 ranks of pp cannot run 2 microbatches: it needs 4 or more",
        id="1f1b",
    ),
    pytest.param(
        "schedule_microbatches",
        {},
        {"pp": 4, "pipeline": INTERLEAVED, "microbatches": 9},
        {"pp": 4, "pipeline": INTERLEAVED, "microbatches": 10},
        "interleaved_1f1b on 4 ranks of pp cannot run 9 microbatches: it needs equal rounds of 4 or more",
        id="interleaved",
    ),
    pytest.param(
        "few_microbatches",
        {},
        {"pp": 8, "pipeline": EXACT, "microbatches": 2},
        {"pp": 8, "pipeline": EXACT, "microbatches": 4},
        "2 microbatches on 8 ranks of pp leave most ranks idle most of the time",
        id="few microbatches",
    ),
    pytest.param(
        "dominated",
        {},
        {"pp": 4, "pipeline": GPIPE, "microbatches": 4},
        {"pp": 4, "pipeline": GPIPE, "microbatches": 2},
        "gpipe waits as long as 1f1b and holds more microbatches",
        id="dominated",
    ),
    pytest.param(
        "replicas",
        {"devices": 16},
        {"dp": 16, "level": 3, "replicate": 3},
        {"dp": 16, "level": 3, "replicate": 2},
        "16 ranks of dp cannot be 3 equal replicas",
        id="replicas",
    ),
    pytest.param(
        "whole_nodes",
        {"devices": 16},
        {"dp": 16, "level": 3, "replicate": 4},
        {"dp": 8, "mp": 2, "level": 3, "replicate": 2},
        "4 replicas of 4 ranks are not whole nodes of 8",
        id="whole nodes",
    ),
    pytest.param(
        "ulysses",
        {},
        {"cp": 8, "backend": USP, "ulysses": 3},
        {"cp": 8, "backend": USP, "ulysses": 4},
        "8 ranks of cp cannot be cut into groups of 3",
        id="ulysses",
    ),
    pytest.param(
        "heads",
        {"profile": model(heads=4)},
        {"mp": 2, "cp": 4, "backend": ULYSSES, "ulysses": 4},
        {"mp": 2, "cp": 2, "backend": ULYSSES, "ulysses": 2},
        "4 attention heads cannot be shared by 2 x 4 ranks (mp x ulysses)",
        id="heads",
    ),
]


@pytest.mark.parametrize(("name", "case", "refused", "kept", "reason"), RULES)
def test_rules_refuse_one_and_keep_another(
    name: str, case: dict[str, Any], refused: dict[str, int], kept: dict[str, int], reason: str
) -> None:
    space = Space(
        case.get("profile") or model(), case.get("training") or recipe(), machines(case.get("devices", 8)), {}
    )
    assert dict(space.rejections.of(Candidate(**refused))).get(name) == reason
    assert name not in dict(space.rejections.of(Candidate(**kept)))


@pytest.mark.parametrize(("name", "case", "refused", "kept", "reason"), RULES)
def test_nothing_that_a_rule_refuses_is_proposed(
    name: str, case: dict[str, Any], refused: dict[str, int], kept: dict[str, int], reason: str
) -> None:
    space = Space(
        case.get("profile") or model(), case.get("training") or recipe(), machines(case.get("devices", 8)), {}
    )
    found = space.candidates(10**9)
    assert len(found)
    for rule in space.rejections.rules:
        assert not rule.refuses(found).any(), rule.name


@pytest.mark.parametrize("name", ["exact", *SCHEDULES])
def test_numbers_that_schedules_accept_are_the_runtimes(name: str) -> None:
    space = Space(model(layers=64), recipe(), machines(), {})
    rules = {rule.name: rule for rule in space.rejections.rules}
    loss = "exact" if name == "exact" else "microbatch"
    schedule = "gpipe" if name == "exact" else name
    for ranks, parts, stages in itertools.product((2, 3, 4, 6, 8), range(1, 26), (1, 2, 3, 4)):
        pp = PipelineParallel(name, loss, schedule, parts, stages)
        wrong = bool(check_schedule(pp, ranks, parts))
        columns = Candidates.of(
            [Candidate(pp=ranks, pipeline=PIPELINES.index(name), microbatches=parts, virtual_stages=stages)]
        )
        ours = any(rules[rule].refuses(columns)[0] for rule in ("schedule_microbatches", "virtual_stages"))
        assert ours == wrong, (ranks, parts, stages)
        if not wrong:
            assert fitting_microbatches(schedule, ranks, stages, parts, 2 * parts) == parts


def test_each_run_is_proposed_once() -> None:
    for devices, profile in ((1, model()), (6, model(heads=6)), (8, model()), (16, llama("8b"))):
        found, _ = proposed(devices, profile)
        assert len(rows(found, *FIELDS)) == len(found)


def test_fields_that_mean_nothing_have_one_value() -> None:
    found, _ = proposed(8)
    assert rows(found.select(found.mp == 1), "sequence_parallel") == {(0,)}
    assert rows(found.select(found.cp == 1), "backend", "ulysses") == {(0, 1)}
    assert rows(found.select(found.pp == 1), "pipeline", "virtual_stages", "split") == {(0, 1, 0)}
    assert rows(found.select(found.dp * found.cp == 1), "level", "replicate") == {(0, 1)}
    whole = found.select(found.level == 0)
    assert (whole.replicate == whole.dp).all()


def test_levels_that_are_the_same_run_are_one() -> None:
    found, _ = proposed(8)
    shared = found.dp * found.cp > 1
    assert rows(found.select(shared & (found.pp > 1)), "level") == {(0,), (1,)}
    assert rows(found.select(shared & (found.pp == 1) & (found.microbatches == 1)), "level") == {(0,), (1,), (3,)}
    assert rows(found.select(shared & (found.pp == 1) & (found.microbatches > 1)), "level") == {(0,), (1,), (2,), (3,)}
    found, _ = proposed(8, wanted={"level": (3,)})  # the name that was typed
    assert rows(found.select(found.dp * found.cp > 1), "level") == {(3,)}
    found, _ = proposed(8, wanted={"level": (2,), "microbatches": (1,)})
    assert rows(found.select((found.dp * found.cp > 1) & (found.pp == 1)), "level") == {(2,)}


def test_everything_that_the_runtime_has_is_proposed() -> None:
    found, _ = proposed(16, model(layers=16, heads=16), recipe(256))
    assert rows(found, "dp") == rows(found, "mp") == rows(found, "pp") == {(1,), (2,), (4,), (8,), (16,)}
    assert rows(found, "cp") == {(1,), (2,), (4,), (8,)}
    assert rows(found, "level") == {(0,), (1,), (2,), (3,)}
    assert rows(found.select((found.dp == 16) & (found.level == 3)), "replicate") == {(1,), (2,)}
    # looped_bfs has a point only for numbers of microbatches that interleaved_1f1b refuses.
    assert rows(found, "pipeline") == {(number,) for number in range(len(PIPELINES))} - {(LOOPED,)}
    assert LOOPED in proposed(4, training=recipe(60), wanted={"pp": (4,)})[0].pipeline
    assert rows(found.select(found.pipeline == INTERLEAVED), "virtual_stages") == {(2,), (4,), (8,)}
    assert rows(found.select(found.cp == 8), "backend", "ulysses") >= {
        (GATHER, 1),
        (RING, 1),
        (ULYSSES, 8),
        (USP, 2),
        (USP, 4),
    }
    assert rows(found, "recompute") == {(NO_RECOMPUTE,), (SELECTIVE,), (FULL,), (2,), (4,)}
    assert rows(found, "split") == {(0,), (1,)}  # the head costs several blocks
    assert rows(found.select(found.dp == 16), "microbatches") == {(1,), (2,), (4,), (8,), (16,)}


def test_cuts_are_balanced_only_where_that_helps() -> None:
    equal = dataclasses.replace(model(layers=8), after=dataclasses.replace(model().after, matmuls=()))
    assert rows(proposed(8, equal)[0], "split") == {(0,)}
    found, _ = proposed(8, equal, wanted={"split": (1,), "pp": (2,)})
    assert rows(found, "split") == {(1,)}


def test_what_is_asked_for_is_proposed_even_without_a_point() -> None:
    found, _ = proposed(8, model(positions=512), wanted={"cp": (8,)})
    assert rows(found, "cp") == {(8,)}
    found, _ = proposed(8, wanted={"pipeline": (GPIPE,), "pp": (2,)})
    assert rows(found, "pipeline") == {(GPIPE,)}
    found, _ = proposed(16, wanted={"replicate": (4,), "level": (3,), "dp": (16,)})
    assert rows(found, "replicate") == {(4,)}
    found, _ = proposed(8, wanted={"recompute": (3,)})
    assert rows(found, "recompute") == {(3,)}
    found, _ = proposed(8, wanted={"microbatches": (1,), "pp": (8,)})
    assert rows(found, "pp", "microbatches") == {(8, 1)}


def test_what_is_asked_for_and_can_not_be_keeps_its_reason() -> None:
    found, reasons = proposed(8, wanted={"mp": (3,)})
    assert (len(found), set(reasons)) == (0, {"mp_sizes"})
    assert reasons["mp_sizes"].startswith("the planner weighs no 3 ranks of mp: they share 8 and ")
    found, reasons = proposed(8, model(heads=6), wanted={"mp": (3,)})
    assert (len(found), reasons["devices"]) == (0, "the mesh 2x3 has 6 ranks, not 8")
    found, reasons = proposed(8, wanted={"replicate": (2,), "dp": (1,), "cp": (1,), "level": (3,)})
    assert (len(found), reasons["replicas"]) == (0, "1 ranks of dp cannot be 2 equal replicas")
    found, reasons = proposed(8, training=recipe(mean_loss=False), wanted={"pp": (8,), "pipeline": (ONE_F_ONE_B,)})
    assert (len(found), set(reasons)) == (0, {"mean_loss"})


def test_fewer_devices_may_be_asked_for() -> None:
    found, _ = proposed(8, wanted={"devices": (6,)})
    assert rows(found, "dp", "mp", "pp", "cp")
    assert (found.dp * found.mp * found.pp * found.cp == 6).all()


def test_a_prime_number_of_ranks_is_all_or_none_for_usp() -> None:
    asked = {"cp": (3,), "backend": (USP,), "devices": (3,)}
    assert rows(proposed(8, model(heads=6, positions=768), wanted=asked)[0], "ulysses") == {(3,)}
    assert rows(proposed(8, model(heads=8, positions=768), wanted=asked)[0], "ulysses") == {(1,)}
    found, _ = proposed(3, model(heads=6, positions=768))
    assert USP not in found.backend  # it would be ulysses


def test_selective_recomputation_has_to_save_something() -> None:
    profile = model()
    kinds = tuple(dataclasses.replace(kind, selective_bytes=kind.saved_bytes) for kind in profile.kinds)
    found, _ = proposed(8, dataclasses.replace(profile, kinds=kinds))
    assert SELECTIVE not in found.recompute


def test_proposals_pass_the_checks_of_the_runtime() -> None:
    found, _ = proposed(16, model(layers=16, heads=16), recipe(96))
    draw = np.random.default_rng(0)
    for index in draw.choice(len(found), 400, replace=False):
        c = found[int(index)]
        pp = None
        if c.pp > 1:
            name = c.pipeline_name
            pp = {
                "name": name,
                "loss": "exact" if name == "exact" else "microbatch",
                "schedule": "gpipe" if name == "exact" else name,
                "microbatches": c.microbatches,
                "virtual_stages": c.virtual_stages,
            }
        config = parallel_config(
            c.mesh,
            {"sharding_level": c.level, "replicate": c.replicate},
            {"sequence_parallel": bool(c.sequence_parallel)} if c.mp > 1 else "none",
            pp if pp is not None else "none",
            {"backend": c.backend_name, "ulysses": c.ulysses if c.backend == USP else None} if c.cp > 1 else "none",
            c.recompute_name,
        )
        assert config_errors(config) == [], c
        assert config.ulysses == c.ulysses
        assert c.ranks == 16
        assert 96 % (c.dp * c.microbatches) == 0


@pytest.mark.parametrize(("profile", "devices", "batch"), [("8b", 64, 512), ("70b", 64, 512)])
def test_a_first_look_and_its_variants_find_what_is_best(profile: str, devices: int, batch: int) -> None:
    from autolaunch_strategies.planner.choose import look

    case = (llama(profile), recipe(batch), machines(devices))
    space = Space(*case, {})
    everything = predicted(*case, space.candidates(10**9))
    assert space.complete
    _, looked = look(*case, {})
    assert len(looked) < len(everything) / 3
    assert looked.seconds[looked.fits].min() <= 1.005 * everything.seconds[everything.fits].min()


def test_variants_are_new_legal_and_different_in_one_choice() -> None:
    space = Space(model(layers=16), recipe(), machines(), {})
    every = rows(space.candidates(10**9), *FIELDS)
    given = space.candidates(10**9).select([0, 100, 200])
    found = space.variants(given)
    assert rows(found, *FIELDS) <= every
    assert not rows(found, *FIELDS) & rows(given, *FIELDS)
    assert len(rows(found, *FIELDS)) == len(found) > 10


def test_divisors() -> None:
    assert [divisors(number) for number in (1, 7, 12, 16)] == [[1], [1, 7], [1, 2, 3, 4, 6, 12], [1, 2, 4, 8, 16]]


def test_default_stages_are_proposed() -> None:
    found, _ = proposed(4, model(layers=8), recipe(64), {"pp": (4,)})
    for name in SCHEDULES:
        if name in ("gpipe", "looped_bfs"):
            continue
        assert default_virtual_stages(name) in found.select(found.pipeline == PIPELINES.index(name)).virtual_stages


def test_what_is_not_predicted_is_refused_with_what_is() -> None:
    assert [recompute_code(mode) for mode in ("none", "selective", "full", 3)] == [0, -1, 1, 3]
    for mode, reason in (("offload", "host"), ("budget", "when blocks are compiled")):
        with pytest.raises(ConfigError) as caught:
            recompute_code(mode)
        told = f"recompute={mode}", "doesn't predict", reason
        assert_told(caught.value, *told, allowed=("selective",), write="recompute=full")
