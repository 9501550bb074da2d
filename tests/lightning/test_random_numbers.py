"""random_numbers=by_position: a model with dropout has the numbers of one process on every mesh."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers")
from tests.lightning.random_cases import GROUPS
from tests.support.ranks import Group, differences, problems
from tests.support.tiers import spread, tiered

SCRIPT = Path(__file__).with_name("random_cases.py")
pytestmark = pytest.mark.timeout(300)


EVERYDAY = {
    "drawing@mp2", "gpt2@dp2-level3-recompute", "gpt2@pp2-1f1b-own-checkpoints", "gpt2@cp2",
    "layerdrop@dp2-level3-by-rank",
}  # fmt: skip


def parts(case: str) -> tuple[str, str]:
    """The model, and the mesh and all that is with it."""
    model, _, run = case.partition("@")
    return model, run


@pytest.mark.parametrize("case", tiered(GROUPS["two"], EVERYDAY, spread(GROUPS["two"], parts, EVERYDAY)))
def test_two_ranks_draw_what_one_does(one: Group, two: Group, case: str) -> None:
    expected, found = one.read(case.split("@")[0]), two.read_all(case)
    for result in found:
        assert differences(expected["everywhere"], result["everywhere"], 1e-5) == []
    if not case.startswith("uneven"):  # there the mean over ranks is not that over samples
        assert differences(expected["first"], found[0]["first"], 1e-5) == []


_SELDOM = spread(GROUPS["four"], parts)


def seldom(case: str) -> bool:
    return case in ("bart@mp2cp2", "gpt2-eager@mp2cp2") or _SELDOM(case)  # two ranks draw alike


@pytest.mark.parametrize("case", tiered(GROUPS["four"], (), seldom))
def test_four_ranks_draw_what_one_does(one: Group, four: Group, case: str) -> None:
    assert problems(one, four, case.split("@")[0], case, 1e-5) == []


def test_accumulated_batches_draw_what_one_batch_does(one: Group) -> None:
    whole, parts = (one.read(case)["everywhere"]["weights"] for case in ("drawing", "accumulated"))
    assert differences(whole, parts, 1e-5) == []


def test_other_numbers_than_by_rank(one: Group) -> None:
    by_position, by_rank = (one.read(case)["first"]["losses"] for case in ("drawing", "drawing-by-rank"))
    assert differences(by_position, by_rank, 1e-4) != []
