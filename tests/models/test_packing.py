"""Documents that share a row are trained as each by itself: loss, gradient norm and weights, on every axis."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.models.packing_cases import GROUPS, KERNEL, NAMES
from tests.models.test_label_means import compare
from tests.support.ranks import Group, GroupOf

SCRIPT = Path(__file__).with_name("packing_cases.py")
pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]
pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def hand(group_of: GroupOf) -> Group:
    return group_of(SCRIPT, "hand", 1)


@pytest.fixture(scope="module")
def eight(group_of: GroupOf) -> Group:
    return group_of(SCRIPT, "eight", 8)


def cases(group: str) -> list[Any]:
    """Our model and two of transformers in turn, the one with a window where attention is shared; others in `every`."""
    named = [case for case in GROUPS[group] if "-kernel@" not in case]
    meshes = list(dict.fromkeys(case.split("@")[1] for case in named))
    wanted = {f"{'hf-gemma3_text' if 'cp' in mesh else NAMES[at % 3]}@{mesh}" for at, mesh in enumerate(meshes)}
    wanted -= {f"hf-gemma3_text@{mesh}" for mesh in ("cp4-usp", "dp2xcp2")}  # stages beside cp are the longest way
    return [pytest.param(case, marks=() if group == "one" or case in wanted else pytest.mark.every) for case in named]


@pytest.mark.parametrize("case", cases("one"))
def test_one_process(hand: Group, one: Group, case: str) -> None:
    compare(hand.read(case.split("@")[0]), one, case)


@pytest.mark.parametrize("case", cases("two"))
def test_two_ranks(hand: Group, two: Group, case: str) -> None:
    compare(hand.read(case.split("@")[0]), two, case)


@pytest.mark.parametrize("name", [NAMES[0], pytest.param(NAMES[1], marks=pytest.mark.every)])
@pytest.mark.parametrize(
    "mesh", ["sp2", *(pytest.param(mesh, marks=pytest.mark.every) for mesh in KERNEL if mesh != "sp2")]
)
def test_by_the_kernel_for_documents(hand: Group, two: Group, mesh: str, name: str) -> None:
    compare(hand.read(name), two, f"{name}-kernel@{mesh}")


@pytest.mark.parametrize("case", cases("four"))
def test_four_ranks(hand: Group, four: Group, case: str) -> None:
    compare(hand.read(case.split("@")[0]), four, case)


@pytest.mark.every  # a minute
@pytest.mark.parametrize("case", cases("eight"))
def test_eight_ranks(hand: Group, eight: Group, case: str) -> None:
    compare(hand.read(case.split("@")[0]), eight, case)
