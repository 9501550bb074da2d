"""Constants by generation of the devices and by what runs on them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import yaml

from autolaunch_strategies.config import ConfigError
from autolaunch_strategies.planner.candidate import Candidate, Candidates
from autolaunch_strategies.planner.choose import make_plan
from autolaunch_strategies.planner.constants import Constants
from autolaunch_strategies.planner.fit import Run, fit
from autolaunch_strategies.planner.hardware import Hardware, hardware_from, hardware_to
from autolaunch_strategies.planner.profile import ModelProfile
from autolaunch_strategies.planner.recipe import recipe_of
from autolaunch_strategies.planner.stacks import GENERATIONS, STACKS, constants_of
from autolaunch_strategies.planner.time import step_time
from tests import ROOT
from tests.planner.candidates import llama, recipe
from tests.support.messages import assert_told


def cluster(name: str = "h100", **changed: Any) -> Hardware:
    values = yaml.safe_load((ROOT / f"conf/cluster/{name}.yaml").read_text(encoding="utf-8"))
    return hardware_from({**values, **changed})


def test_every_constant_is_one() -> None:
    for stack in STACKS:
        for generation in (None, *GENERATIONS):
            constants = Constants(**constants_of(stack, generation))
            assert 0 < constants.matmul <= 1 and 0 < constants.attention <= 1


def test_what_a_file_says_comes_before_the_stack() -> None:
    older = cluster(stack="torch_2024")
    assert older.constants.attention < cluster().constants.attention
    assert hardware_to(older)["constants"] == {}
    measured = cluster(stack="torch_2024", constants={"attention": 0.4})
    assert measured.constants == dataclasses.replace(older.constants, attention=0.4)
    assert hardware_to(measured)["constants"] == {"attention": 0.4}
    assert cluster(generation=None).constants == Constants()


@pytest.mark.parametrize(("key", "value", "write"), [("stack", "torh", "torch"), ("generation", "hoper", "hopper")])
def test_an_unknown_one_is_refused(key: str, value: str, write: str) -> None:
    with pytest.raises(ConfigError) as error:
        cluster(**{key: value})
    assert_told(error.value, f"cluster.{key}={value}", "nothing is known", write=f"cluster.{key}={write}")


def test_long_sequences_tell_older_attention_apart() -> None:
    def slower(positions: int) -> float:
        seconds = [
            step_time(
                llama("8b", positions), recipe(8), cluster(stack=stack), Candidates.of([Candidate(dp=8, level=3)])
            )
            for stack in ("torch_2024", "torch")
        ]
        return float(seconds[0].seconds[0] / seconds[1].seconds[0])

    assert 1.0 < slower(4096) < 1.1 < slower(131072) < 0.53 / 0.33


def gain_of_float8(profile: ModelProfile, compile: int = 1, part: str = "compute", stack: str = "torch") -> float:
    """How many times as fast a part of the step is as in bf16."""
    candidates, hardware = Candidates.of([Candidate(compile=compile)]), cluster(stack=stack)
    bf16, fp8 = (
        step_time(profile, dataclasses.replace(recipe(8), compute=compute), hardware, candidates).parts[part][0]
        for compute in ("bf16", "fp8")
    )
    return float(bf16 / fp8)


def test_float8_gains_more_from_larger_matrices() -> None:
    gains = [gain_of_float8(llama(size)) for size in ("8b", "70b", "405b")]
    assert 1.2 < gains[0] < gains[1] < gains[2] < 2 * GENERATIONS["hopper"]["fp8"]
    assert gains[2] > 1.1 * gains[0]


def test_float8_needs_a_compiler_on_torch() -> None:
    assert gain_of_float8(llama("8b"), compile=0) < 0.7
    assert gain_of_float8(llama("8b"), compile=0, stack="megatron") > 1.2  # its kernels are written by hand


def test_a_scale_for_each_row_takes_longer_than_one_for_a_matrix() -> None:
    """Llama 3 8B in torchao's documentation: 25 % faster than bf16, or 10 %."""
    profile, hardware, candidates = llama("8b"), cluster(), Candidates.of([Candidate(compile=1), Candidate(compile=0)])
    fp8 = dataclasses.replace(recipe(8), compute="fp8")
    one, each = (
        step_time(profile, dataclasses.replace(fp8, rowwise=rowwise), hardware, candidates).parts["compute"]
        for rowwise in (False, True)
    )
    assert 1.1 < each[0] / one[0] < 1.5 and each[1] == one[1]
    assert recipe_of(8, "bf16-mixed", float8="rowwise").rowwise
    assert not recipe_of(8, "bf16-mixed", float8="tensorwise").rowwise


def test_heads_and_stacked_experts_stay_in_bf16_beside_float8() -> None:
    profile, none = llama("8b"), dataclasses.replace(llama("8b").kinds[0], matmuls=())
    assert gain_of_float8(dataclasses.replace(profile, kinds=(none,))) == 1.0
    (kind,) = profile.kinds
    experts = tuple(dataclasses.replace(item, routed=True, count=8) for item in kind.matmuls)
    odd = tuple(dataclasses.replace(item, inner=item.inner + 8) for item in kind.matmuls)
    for matmuls in (experts, odd):
        assert gain_of_float8(dataclasses.replace(profile, kinds=(dataclasses.replace(kind, matmuls=matmuls),))) == 1.0
    mixture = dataclasses.replace(profile, kinds=(dataclasses.replace(kind, matmuls=experts),))
    assert gain_of_float8(mixture, stack="megatron") > 1.2


def test_runs_on_other_devices_say_nothing() -> None:
    profile, candidate = llama("8b"), Candidate(dp=8, level=3)
    elsewhere = [Run(profile, recipe(64), candidate, 100.0, cluster(name)) for name in ("gb200", "a100_80")]
    assert fit(cluster(), elsewhere) == cluster()
    own = Run(profile, recipe(64), candidate, 10.0, cluster(nodes=4))
    assert fit(cluster(), [*elsewhere, own]).constants == fit(cluster(), [own]).constants


def test_a_measured_margin_lets_tight_plans_be_chosen() -> None:
    assumed = Constants()
    given = {"context_bytes": assumed.context_bytes, "fragmentation": assumed.fragmentation}
    assert not cluster(constants={"fragmentation": 0.04}).margin_measured
    profile, wanted = llama("8b"), {"mp": (1,), "pp": (1,), "cp": (1,)}
    careful = make_plan(profile, recipe(64), cluster(), wanted)
    measured = make_plan(profile, recipe(64), cluster(constants=given), wanted)
    assert careful.memory_share < careful.looked.memory_bytes.max() / careful.looked.limit
    assert (careful.memory_share, measured.memory_share) == (0.92, 0.95)
    assert measured.looked.fits.sum() > careful.looked.fits.sum()
    assert measured.seconds <= careful.seconds
