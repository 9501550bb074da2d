"""Functions of sharded tensors on two ranks: values and gradients are compared with one process in the cases."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.ranks import Group, GroupOf
from tests.support.tiers import tiered

SCRIPT = Path(__file__).with_name("functions_cases.py")


@pytest.fixture(scope="module")
def results(group_of: GroupOf) -> Group:
    return group_of(SCRIPT, "all", 2)


CASES = ["writes", "writes_without_gradients", "gradients_sharded_otherwise", "losses", "rules", "gradients_asked_for"]
LONG = ["writes", "losses"]
"""Half a minute each: many functions along every dim."""


@pytest.mark.parametrize("case", tiered(CASES, lambda case: case not in LONG))
def test_equals_one_process(results: Group, case: str) -> None:
    for rank in range(2):
        results.read(case, rank)
