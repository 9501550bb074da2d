"""The backend by which ranks share a GPU gives what gloo gives, here for tensors of the CPU.

Its tests on a GPU are `tests/gpu/test_parity.py`; these run the same cases.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests import ROOT
from tests.gpu.parity_cases import MESHES
from tests.support import staged
from tests.support.one_rank import without_process_group
from tests.support.ranks import Group, GroupOf, problems
from tests.support.tiers import but_one_in, tiered

pytestmark = pytest.mark.timeout(600)
CASES = ROOT / "tests/gpu/parity_cases.py"
TOLERANCE = 1e-5
CASES_ON = [(count, case) for count, cases in MESHES.items() for case in cases]
EVERYDAY = [(8, "dense:fsdp-sp-1f1b")]


@pytest.fixture(scope="module")
def ranks(group_of: GroupOf) -> Callable[[str, int], Group]:
    return lambda name, count: group_of(CASES, name, count)


@pytest.mark.parametrize(
    ("count", "case"),
    tiered(CASES_ON, EVERYDAY, but_one_in(3, CASES_ON, EVERYDAY)),
)
def test_a_fit_through_host_memory_equals_one_process(
    ranks: Callable[[str, int], Group], count: int, case: str
) -> None:
    assert problems(ranks("one", 1), ranks(str(count), count), case.split(":")[0], case, TOLERANCE) == []


@pytest.mark.parametrize("rank", tiered([0, 1], []))
def test_each_collective_is_that_of_gloo(group_of: GroupOf, rank: int) -> None:
    through_host, gloo = (group_of(Path(__file__).with_name("staged_cases.py"), name, 2) for name in ("staged", "gloo"))
    expected = gloo.read("collectives", rank)
    found = through_host.read("collectives", rank)
    assert found == expected and len(found) > 20


def test_a_barrier_waits_on_the_host_whatever_device_is_named() -> None:
    without_process_group()
    dist.init_process_group(staged.NAME, store=dist.HashStore(), rank=0, world_size=1)
    try:
        options = dist.BarrierOptions()
        options.device = torch.device("cuda", 0)
        assert dist.group.WORLD is not None
        dist.group.WORLD.barrier(opts=options).wait()
    finally:
        dist.destroy_process_group()
