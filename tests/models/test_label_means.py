"""The loss of a step is the mean over all of its labels, wherever they are: that of a loop by hand in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.models.label_cases import CLASSES, GROUPS
from tests.support.ranks import Group, GroupOf, differences
from tests.support.tiers import spread

SCRIPT = Path(__file__).with_name("label_cases.py")
pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def hand(group_of: GroupOf) -> Group:
    return group_of(SCRIPT, "hand", 1)


def check(hand: Group, found: Group, case: str) -> None:
    compare(hand.read(case.split("@")[1]), found, case)


def compare(expected: dict[str, Any], found: Group, case: str) -> None:
    weights: dict[str, list[float]] = {}
    for result in found.read_all(case):
        weights |= result.pop("weights")  # with stages, a rank has its own
        assert differences({key: expected[key] for key in result}, result, 1e-5) == []
    assert differences(expected["weights"], weights, 1e-5) == []


def cases(group: str) -> list[Any]:
    """Of the product of meshes, masks and accumulation each, beside those of one process; the rest is `every`."""
    named = [name for name in GROUPS[group] if "@" in name]
    seldom = spread(named, lambda name: name.split("@"))
    return [pytest.param(name, marks=pytest.mark.every if group != "one" and seldom(name) else ()) for name in named]


@pytest.mark.parametrize("case", cases("one"))
def test_one_process(hand: Group, one: Group, case: str) -> None:
    check(hand, one, case)


@pytest.mark.parametrize("case", cases("two"))
def test_two_ranks(hand: Group, two: Group, case: str) -> None:
    check(hand, two, case)


@pytest.mark.parametrize("case", cases("four"))
def test_four_ranks(hand: Group, four: Group, case: str) -> None:
    check(hand, four, case)


@pytest.mark.parametrize("mesh", ["dp2-level3", "mp2", "pp2-1f1b", "cp2"])
@pytest.mark.parametrize("kind", ["packed", "padded"])
def test_positions_and_masks_of_transformers(one: Group, two: Group, kind: str, mesh: str) -> None:
    pytest.importorskip("transformers")
    compare(one.read(f"hf-{kind}-1"), two, f"hf-{kind}-{mesh}")


@pytest.mark.parametrize("mesh", ["1", "dp2-level3", "pp2-exact", "cp2"])
def test_routers_learn_what_transformers_teaches_them(hand: Group, one: Group, two: Group, mesh: str) -> None:
    pytest.importorskip("transformers")
    found = one if mesh == "1" else two
    weights: dict[str, list[float]] = {}
    for result in found.read_all(f"routers-{mesh}"):
        weights |= result.pop("weights")
        del result["val_loss"]
        assert differences({key: hand.read("routers")[key] for key in result}, result, 1e-5) == []
    assert differences(hand.read("routers")["weights"], weights, 1e-5) == []


@pytest.mark.parametrize("loss", CLASSES)
def test_classes_that_do_not_count_and_ranks_without_a_sample(one: Group, two: Group, loss: str) -> None:
    assert differences(one.read(f"classes-{loss}"), two.read(f"classes-{loss}", 1), 1e-5) == []
