"""Experts that are shared out, as the planner sees them: what they take, what is proposed, and why nothing else is."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from autolaunch_strategies.apply.check import config_errors
from autolaunch_strategies.apply.order import apply_parallelism
from autolaunch_strategies.config import ParallelConfig, parallel_config
from autolaunch_strategies.mesh.rank_mesh import RankMesh
from autolaunch_strategies.planner.candidate import Candidate, Candidates
from autolaunch_strategies.planner.choose import make_plan
from autolaunch_strategies.planner.constants import Constants
from autolaunch_strategies.planner.enumerate import enumerate_candidates
from autolaunch_strategies.planner.explain import why
from autolaunch_strategies.planner.hardware import Hardware, Link
from autolaunch_strategies.planner.memory import memory_account, peak_memory
from autolaunch_strategies.planner.module_profile import profile_module
from autolaunch_strategies.planner.profile import ModelProfile, Recipe
from autolaunch_strategies.planner.recipe import recipe_of
from autolaunch_strategies.planner.settings import overrides
from autolaunch_strategies.planner.time import step_time
from tests.support.one_rank import without_process_group

EXPERTS, RECIPE = 8, Recipe(batch_size=16)
BARE = dataclasses.replace(Constants(), context_bytes=0.0, fragmentation=0.0, ep_s=1e-9)
SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_local_experts": EXPERTS, "num_experts_per_tok": 2, "vocab_size": 64,
}  # fmt: skip


def mixture(device: str = "meta", **changes: Any) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device(device):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model("mixtral", **SIZES, **changes))


@functools.cache
def profile() -> ModelProfile:
    """On meta and in fp32, which torch's own `grouped_mm` refuses there."""
    return profile_module(mixture(), 32)


def machines(devices: int = 8, node: int = 4, constants: Constants = BARE) -> Hardware:
    fast, slow = Link(1e11, 1e-6), Link(1e9, 1e-5)
    return Hardware("test", "cuda", devices // node, node, 1e10, {"fp32": 1e13}, 1e12, fast, slow, constants=constants)


def settings(candidate: Candidate) -> ParallelConfig:
    c = candidate
    dp = {"sharding_level": c.level, **({"replicate": c.replicate} if c.level and c.replicate > 1 else {})}
    return parallel_config(c.mesh, dp, "auto" if c.mp > 1 else None, cp="gather" if c.cp > 1 else None, ep=c.ep)


@pytest.fixture
def ranks_in_name() -> Iterator[None]:
    """Rank 0 of as many as a test asks for: collectives of the group do nothing."""
    without_process_group()
    yield
    without_process_group()


@pytest.mark.parametrize(
    "candidate",
    [
        Candidate(dp=4, replicate=4, ep=2),
        Candidate(dp=4, level=1, ep=4),
        Candidate(dp=4, level=3, ep=2),
        Candidate(dp=8, level=3, replicate=2, ep=2),
        Candidate(dp=2, mp=2, level=3, ep=4),
        Candidate(dp=2, mp=2, level=3, ep=2),
        Candidate(dp=2, mp=2, level=3),
        Candidate(dp=2, mp=2, replicate=2),
        Candidate(dp=2, cp=2, level=2, ep=2),
    ],
    ids=lambda c: f"{c.mesh.name}-level{c.level}-ep{c.ep}",
)
def test_state_is_what_the_engine_holds(candidate: Candidate, ranks_in_name: None) -> None:
    config = settings(candidate)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=candidate.ranks)
    mesh = RankMesh.build(config.mesh, *config.dp.split(config.mesh.dp), "cpu")
    model = mixture("cpu")
    apply_parallelism(model, config, mesh, torch.device("cpu"))
    held = sum(
        (item.to_local() if isinstance(item, DTensor) else item).numel() for item in model.parameters()
    )  # what a step adds has the same shapes: a gradient, and two states of AdamW
    (account,) = memory_account(profile(), RECIPE, machines(), candidate)
    assert account["optimizer"] == pytest.approx(8 * held, rel=0.05)
    if candidate.level == 0 and candidate.ep > 1:  # with others parameters are gathered, for a while
        state = account["parameters"] + account["gradients"] + account["optimizer"]
        assert state == pytest.approx(16 * held, rel=0.05)


def test_what_is_proposed_can_be_run_and_the_rest_has_reasons() -> None:
    candidates, _ = enumerate_candidates(profile(), RECIPE, machines())
    degrees = set(candidates.ep.tolist())
    assert degrees == {1, 2, 4, 8}
    some = np.random.default_rng(0).choice(np.flatnonzero((candidates.ep > 1) & (candidates.pp == 1)), 100)
    for index in some:
        assert not config_errors(settings(candidates[int(index)]))
    plan = make_plan(profile(), RECIPE, machines(), {"mp": (1,), "pp": (1,), "cp": (1,)})
    assert any(item.startswith("ep=") for item in overrides(plan.chosen, plan.profile, plan.recipe))
    for asked, words in (
        ({"ep": "3"}, "8 experts cannot be shared out evenly over 3 ranks of ep"),
        ({"ep": "8", "dp": "8", "level": "3", "replicas": "2"}, "and does not divide these: 4 x 1 x 1"),
    ):
        assert words in " ".join(why(plan, asked).sentences), asked
    assert why(plan, {"ep": 4}).candidate is not None
    dense = dataclasses.replace(
        profile(), kinds=tuple(dataclasses.replace(kind, experts=0) for kind in profile().kinds)
    )
    refused = why(make_plan(dense, RECIPE, machines(), plan.wanted), {"ep": 2}).sentences
    assert "it has no mixture of experts" in refused[0]
    compiled = why(plan, {"ep": 4, "compile": "true"}).candidate
    assert compiled is not None and compiled.compile  # what lies beside the experts


def test_no_schedule_is_proposed_where_routers_have_a_loss_of_their_own() -> None:
    wanted: dict[str, tuple[int, ...]] = {"pp": (2,), "mp": (1,), "cp": (1,), "ep": (1,)}
    with_loss = profile_module(mixture(output_router_logits=True), 32)
    for model, are_only_exact in ((profile(), False), (with_loss, True)):
        candidates, _ = enumerate_candidates(model, RECIPE, machines(), wanted)
        names = {candidates[index].pipeline_name for index in range(len(candidates.pipeline))}
        assert (names == {"exact"}) == are_only_exact and "exact" in names
    plan = make_plan(with_loss, RECIPE, machines(), wanted)
    assert "the loss of its routers (output_router_logits)" in why(plan, {"pp": "1f1b"}).sentences[0]


def test_tokens_that_leave_the_node_cost_more_and_are_warned_of() -> None:
    rows = Candidates.of([Candidate(dp=8, level=3, ep=ep) for ep in (1, 4, 8)])
    parts = step_time(profile(), RECIPE, machines(), rows).parts["ep"]
    assert parts[0] == 0 < parts[1] < parts[2] / 2
    memory = peak_memory(profile(), RECIPE, machines(), rows).bytes
    assert memory[1] < memory[0]
    (warning,) = make_plan(profile(), RECIPE, machines(), {"ep": (8,), "pp": (1,), "mp": (1,), "cp": (1,)}).warnings
    assert "8 ranks of ep are more than the 4 devices of a fast domain" in warning
    even = machines(constants=dataclasses.replace(BARE, imbalance=1.0))
    assert step_time(profile(), RECIPE, even, rows).parts["ep"][2] < parts[2]
    assert peak_memory(profile(), RECIPE, even, rows).bytes[2] < memory[2]


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_experts_that_autocast_leaves_in_fp32_are_slow_and_it_is_said(precision: str) -> None:
    hardware = dataclasses.replace(machines(), flops={"fp32": 1e12, "bf16": 1e13})
    model, recipe = profile_module(mixture(), 32, precision=precision), recipe_of(16, precision)
    (block,) = model.kinds
    in_fp32 = precision == "bf16-mixed"
    assert block.waits == any(item.one_by_one for item in block.matmuls) == in_fp32
    said = [warning for warning in make_plan(model, recipe, hardware).warnings if "dp.param_dtype=bf16" in warning]
    assert len(said) == in_fp32
    grouped = dataclasses.replace(
        block,
        waits=False,
        matmuls=tuple(dataclasses.replace(item, in_fp32=False, grouped=True) for item in block.matmuls),
    )
    times = [
        step_time(dataclasses.replace(model, kinds=(kind,)), recipe, hardware, Candidates())
        for kind in (block, grouped)
    ]
    slow, fast = (time.seconds[0] - time.parts["fixed"][0] for time in times)
    assert (slow > 1.5 * fast) == in_fp32
