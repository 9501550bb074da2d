"""Layers that are sharded by themselves and parameters that are gathered when used: on ranks, against one process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
from tests.support.ranks import Group, GroupOf
from tests.support.tiers import spread, tiered
from tests.tensor.rest_cases import NAMES, OWN

SCRIPT = Path(__file__).with_name("rest_cases.py")
pytestmark = pytest.mark.timeout(300)

EVERYDAY = [*((name, "1x2", "tp") for name in (*OWN, "albert")), ("odd", "1x2", "selective")]
CELLS = [
    *(
        (name, mesh, way)
        for name in NAMES
        for mesh, way in (("1x2", "tp"), ("1x2", "sp"), ("2x2", "tp"))
        if (name, mesh) != ("clip", "2x2")
    ),  # its loss compares the samples of a batch with each other
    ("odd", "1x2", "selective"),
    ("convnext", "1x2", "selective"),
]
"""(model, mesh, tensor or sequence parallel, or with selective recomputation)."""
_SELDOM = spread(CELLS, tuple, EVERYDAY)
CASES = tiered(CELLS, EVERYDAY, lambda cell: cell[:2] in (("swin", "2x2"), ("deberta_v2", "2x2")) or _SELDOM(cell))


@pytest.fixture(scope="module")
def one_process(group_of: GroupOf) -> Group:
    return group_of(SCRIPT, "none", 1)


@pytest.fixture(scope="module")
def on(group_of: GroupOf) -> Callable[[str], Group]:
    return functools.cache(lambda mesh: group_of(SCRIPT, mesh, {"1x2": 2, "2x2": 4}[mesh]))


@pytest.mark.parametrize(("name", "mesh", "way"), CASES)
def test_equals_one_process(one_process: Group, on: Callable[[str], Group], name: str, mesh: str, way: str) -> None:
    expected, found = one_process.read(name), on(mesh).read_all(f"{name}-{way}")[0]
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-4)
    assert found["norms"] == pytest.approx(expected["norms"], rel=1e-4)
    assert found["weights"].keys() == expected["weights"].keys()
    for key, weight in expected["weights"].items():
        torch.testing.assert_close(found["weights"][key], weight, rtol=1e-4, atol=1e-6, msg=f"{key}: {{}}".format)
    if mesh == "1x2":
        assert found["held"] < 0.54
        assert found["rules"]["share"].startswith(f"each rank holds {found['held']:.0%} of the parameters")
