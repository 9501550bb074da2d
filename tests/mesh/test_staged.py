"""The backend by which ranks share a GPU gives what gloo gives, here for tensors of the CPU.

Its tests on a GPU are `tests/gpu/test_parity.py`; these run the same cases.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests import ROOT
from tests.gpu.parity_cases import MESHES
from tests.support.ranks import Group, GroupOf, problems
from tests.support.tiers import tiered

pytestmark = pytest.mark.timeout(600)
CASES = ROOT / "tests/gpu/parity_cases.py"
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def ranks(group_of: GroupOf) -> Callable[[str, int], Group]:
    return lambda name, count: group_of(CASES, name, count)


@pytest.mark.parametrize(
    ("count", "case"),
    tiered([(count, case) for count, cases in MESHES.items() for case in cases], [(8, "dense:fsdp-sp-1f1b")]),
)
def test_a_fit_through_host_memory_equals_one_process(
    ranks: Callable[[str, int], Group], count: int, case: str
) -> None:
    assert problems(ranks("one", 1), ranks(str(count), count), case.split(":")[0], case, TOLERANCE) == []


@pytest.mark.parametrize("rank", tiered([0, 1], []))
def test_each_collective_is_that_of_gloo(group_of: GroupOf, rank: int) -> None:
    staged, gloo = (group_of(Path(__file__).with_name("staged_cases.py"), name, 2) for name in ("staged", "gloo"))
    expected = gloo.read("collectives", rank)
    found = staged.read("collectives", rank)
    assert found == expected and len(found) > 20
