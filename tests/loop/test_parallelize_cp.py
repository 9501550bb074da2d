"""`parallelize` with an axis cp, in a training loop of one's own: equal to one process, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from autolaunch_strategies import ConfigError, ContextParallel, PrepareContextParallel, ProcessMesh, parallelize
from tests import ROOT
from tests.support.ranks import Group, python, start
from tests.support.tiers import tiered

SCRIPT = Path(__file__).with_name("cp_cases.py")
EXAMPLE = ROOT / "examples" / "context_parallel.py"


# The cases compare losses, norms of gradients and weights with one process themselves; a difference is an exception.


@pytest.mark.parametrize(
    "case",
    tiered(
        [
            "N15_all2all",
            "N16_ring",
            "N16_ring_full",
            "N15_all2all_full",
            "gather",
            "default_backend",
            "ring_by_name",
            "keyword_positions",
            "in_mp_config",
            "only_prepared",
            "unmatched_keys",
            "accumulation",
            "optimizer_afterwards",
            "without_plan_llama",
            "without_plan_nanogpt",
            "level3",
            "outputs_are_whole",
            "gradients_of_inputs",
            "inference_mode",
        ],
        lambda case: case not in ("N16_ring_full", "gather", "in_mp_config", "level3"),
    ),
)
def test_on_two_processes(two: Group, case: str) -> None:
    for rank in range(2):
        two.read(case, rank)


@pytest.mark.parametrize(
    "case",
    tiered(
        [
            *(f"dp2_cp2_level{level}" for level in (0, 1, 3)),
            "cp4_ring",
            "cp4_all2all",
            "ranks_laid_out_otherwise",
            "mp2_cp2",
            "mp2_cp2_plan",
            "mp2_cp2_sequence",
            "pp2_cp2",
        ],
        ["dp2_cp2_level1", "pp2_cp2"],
        ["mp2_cp2"],
    ),
)
def test_on_four_processes(four: Group, case: str) -> None:
    for rank in range(4):
        four.read(case, rank)


def test_example() -> None:
    def losses(count: int, *arguments: str) -> list[float]:
        done = start(python(str(EXAMPLE), *arguments, count=count))
        assert done.returncode == 0, done.stdout[-4000:]
        return [float(value) for value in re.findall(r"^step \d: loss (\S+)$", done.stdout, re.MULTILINE)]

    alone = losses(1)
    assert len(alone) == 5 and alone[-1] < alone[0] - 0.1
    assert losses(2) == pytest.approx(alone, abs=2e-5)
    assert losses(4, "--backend", "all2all") == pytest.approx(alone, abs=2e-5)


# --- what is checked before anything is started -----------------------------------------------------------------------

ONE = ProcessMesh([[0]], ["dp", "cp"])


@pytest.mark.parametrize(
    ("mesh", "config", "expected"),
    [
        pytest.param(ONE, {"cp_config": 1}, "cp_config: a mapping is needed, not int", id="type"),
        pytest.param(ONE, {"cp_config": {"plan": {}}}, "cp_config['plan']: no such key", id="key"),
        pytest.param(ProcessMesh([0], ["dp"]), {"cp_config": {}}, "cp_config: ProcessMesh(dp=1, ranks=[0]) has no axis "
                     "cp\n  allowed: a mesh with 'cp' among its dim_names", id="no cp"),
        pytest.param(ONE, {"cp_config": {"parallelize_plan": {"a": 3}}}, "a: not a style: 3", id="style"),
        pytest.param(ONE, {"cp_config": {"parallelize_plan": {"a(": "ContextParallel"}}}, "'a(': not a pattern",
                     id="pattern"),
    ],
)  # fmt: skip
def test_wrong_configs(mesh: Any, config: Any, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parallelize(nn.Linear(2, 2), None, mesh, config)
    assert expected in str(caught.value)


@pytest.mark.parametrize("style", [PrepareContextParallel, ContextParallel])
def test_wrong_backends(style: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        style("p2")
    assert f"{style.__name__}: backend=p2: " in str(caught.value)
    for name in ("p2p", "all2all", "gather", "ring", "ulysses", "usp"):
        assert name in str(caught.value)


def test_one_rank_computes_as_without(caplog: pytest.LogCaptureFixture) -> None:
    """On a mesh whose cp has one rank nothing changes, whatever the plan says."""
    import torch

    from tests.loop.cp_cases import Seed, batches, plan

    torch.manual_seed(0)
    model = Seed()
    tokens = batches(1)[0]
    expected = model(tokens[:, :-1], tokens[:, 1:])
    try:
        parallelize(model, None, ONE, {"cp_config": plan("p2p")})
        assert torch.equal(model(tokens[:, :-1], tokens[:, 1:]), expected)
        model(tokens[:, :8], tokens[:, :8] + tokens[:, :8].roll(1, 1) * 0)  # any length
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


EXPECTED = {
    "length": "ConfigError: cp=2 with llama: a sequence of 13 positions can't be cut into 2 x 2 parts of equal length"
    '\n  allowed: multiples of 4, such as 12, or padding\n  write:   cp_config={"pad": True}',
    "two backends": "ConfigError: cp_config['parallelize_plan']: llama.attention.sdpa: ContextParallel with "
    "backend=ulysses and cp.backend=ring: sequences are sharded in one way in the whole model",
    "a parameter": "ConfigError: cp.plan: llama.norm.weight: ContextParallel: it is a parameter",
}


@pytest.mark.parametrize("case", EXPECTED)
def test_what_is_refused(two: Group, case: str) -> None:
    for rank in range(2):
        assert EXPECTED[case] in two.read("refusals", rank)[case]
