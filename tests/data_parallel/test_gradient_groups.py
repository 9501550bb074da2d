"""Parameters of two gradient groups in one model: gradients, their norm and the weights are those of one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.ranks import Group, GroupOf, differences

SCRIPT = Path(__file__).with_name("group_cases.py")


@pytest.fixture(scope="module")
def alone(group_of: GroupOf) -> Group:
    return group_of(SCRIPT, "alone", 1)


@pytest.fixture(scope="module")
def over_ranks(group_of: GroupOf) -> Group:
    return group_of(SCRIPT, "over_ranks", 4)


@pytest.mark.parametrize("ep", [2, 4])
@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_two_groups_train_as_one_process(level: int, ep: int, alone: Group, over_ranks: Group) -> None:
    """With ep=2 two ranks have the same experts, with ep=4 each has its own."""
    expected = alone.read("alone")
    for found in over_ranks.read_all(f"level{level}_ep{ep}"):
        assert differences(expected, found, 2e-5) == []
