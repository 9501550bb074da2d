"""Compiled blocks with every pair of axes: what one eager process gives."""

from __future__ import annotations

from pathlib import Path

import pytest

from autolaunch_strategies.config import parse_mesh
from tests.support.ranks import Group, GroupOf, differences, problems
from tests.support.tiers import tiered
from tests.training.compile_cases import CASES, counterpart

SCRIPT = Path(__file__).with_name("compile_cases.py")
TOLERANCE = 1e-5
pytestmark = pytest.mark.timeout(600)
EVERYDAY = {
    "2x2:dp=1,mp=seq_parallel,recompute=selective", "1x2x2:mp=tensor_parallel,pp=exact,accumulate=2",
    "2x1x1x2:dp=1,cp=ulysses,recompute=full",
}  # fmt: skip
"""Each axis once beside another."""
OF_CI = ("2x2:dp=3,mp=seq_parallel,backend=inductor",)
"""Beside them, inductor."""


def seldom(case: str) -> bool:
    """Half a minute to a minute and a half each."""
    return case not in OF_CI


@pytest.fixture(scope="module")
def one(group_of: GroupOf) -> Group:
    return group_of(SCRIPT, "one", 1)


@pytest.fixture(scope="module")
def four(group_of: GroupOf) -> Group:
    return group_of(SCRIPT, "4", 4)


@pytest.fixture(scope="module")
def eight(group_of: GroupOf) -> Group:
    return group_of(SCRIPT, "8", 8)


@pytest.mark.parametrize("case", tiered((text for text in CASES if "bf16" not in text), EVERYDAY, seldom))
def test_equals_one_eager_process(one: Group, four: Group, eight: Group, case: str) -> None:
    group = {4: four, 8: eight}[parse_mesh(case.partition(":")[0]).size]
    assert problems(one, group, counterpart(case), case, TOLERANCE) == []


@pytest.mark.every  # a minute
@pytest.mark.parametrize("case", [text for text in CASES if "bf16" in text])
def test_bf16_mixed_is_close(one: Group, four: Group, case: str) -> None:
    expected, found = one.read(counterpart(case)), four.read(case)
    assert differences(expected["first"]["losses"], found["first"]["losses"], 1e-2) == []
