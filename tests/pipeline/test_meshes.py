"""pp with dp and mp, every schedule, and checkpoints that go on elsewhere: what one process gives, on 4 and 8 ranks."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
from tests.pipeline.cases import GROUPS, RECIPES
from tests.support.ranks import Group, GroupOf, problems, went_on
from tests.support.tiers import but_one_in, tiered

pytestmark = pytest.mark.timeout(600)
SCRIPT = Path(__file__).with_name("cases.py")
TOLERANCE = 1e-5


def same(group: str) -> list[str]:
    """The cases of a group that have a counterpart in one process."""
    return [name for name in GROUPS[group] if name.split("@")[0] in RECIPES]


FOUR = {
    "llama-8@dp2pp2-3-1f1b", "short-own@mp2pp2-tensor_parallel",
}  # fmt: skip
"""What runs every day: dp and mp beside stages, and schedules that two stages leave out; all levels are in full."""
_SELDOM = but_one_in(2, same("four"), FOUR)


def seldom(case: str) -> bool:
    return "biased" not in case and (case in ("short-tied@mp2pp2-seq_parallel", "hf-llama@pp4") or _SELDOM(case))


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints that pass from mesh to mesh."""
    return tmp_path_factory.mktemp("shelf")


@pytest.fixture(scope="module")
def one(group_of: GroupOf, shelf: Path) -> Group:
    return group_of(SCRIPT, "one", 1, SHELF=str(shelf))


@pytest.fixture(scope="module")
def four(group_of: GroupOf, shelf: Path) -> Group:
    return group_of(SCRIPT, "four", 4, SHELF=str(shelf))


@pytest.fixture(scope="module")
def eight(group_of: GroupOf, shelf: Path) -> Group:
    return group_of(SCRIPT, "eight", 8, SHELF=str(shelf))


@pytest.fixture(scope="module")
def back(group_of: GroupOf, shelf: Path) -> Group:
    return group_of(SCRIPT, "one-resumes", 1, SHELF=str(shelf))


@pytest.mark.parametrize("case", tiered(same("four"), FOUR, seldom))
def test_four_ranks_equal_one_process(one: Group, four: Group, case: str) -> None:
    assert problems(one, four, case.split("@")[0], case, TOLERANCE) == []


@pytest.mark.every  # half a minute each; test_staged.py trains on eight ranks every day
@pytest.mark.parametrize("case", same("eight"))
def test_eight_ranks_equal_one_process(one: Group, eight: Group, case: str) -> None:
    assert problems(one, eight, case.split("@")[0], case, TOLERANCE) == []


def test_a_stage_exchanges_its_gradients_behind_its_last_backward_pass(four: Group) -> None:
    """While earlier stages of the same rank still have theirs to do; embedding and head come with what is left."""
    done = [[key for key, _ in groupby(four.read("exchanges", rank))] for rank in range(4)]
    ends = ("B2", "exchange", "B0", "exchange"), ("B3", "exchange", "B1", "exchange")
    assert sorted(map(tuple, done)) == sorted([*ends, *ends])


def test_replicas_draw_masks_of_their_own(four: Group) -> None:
    """Dropout's; the data are the same on both."""
    seen = {four.read("masks", rank)["place"]: four.read("masks", rank)["seen"] for rank in (0, 1)}
    assert seen[0] and seen[1] and set(seen[0]).isdisjoint(seen[1])


@pytest.fixture
def saved(one: Group, four: Group, eight: Group) -> Callable[[str, str], None]:
    """Makes the checkpoint of a model that a mesh of 1, 4 or 8 ranks writes."""
    return lambda model, source: {"1": one, "4": four, "8": eight}[source].read_all(f"save-{model}") and None


@pytest.mark.every  # half a minute each; below runs go on with other stages of four ranks
@pytest.mark.parametrize(("model", "source"), [("tied", "8"), ("untied", "1")])
def test_a_run_goes_on_on_2x2x2(one: Group, eight: Group, saved: Any, model: str, source: str) -> None:
    saved(model, source)
    case = f"resume-{model}-from-{source}"
    assert went_on(one.read(f"uninterrupted-{model}"), eight, case, TOLERANCE) == []


@pytest.mark.parametrize(
    "case", tiered([name for name in GROUPS["four"] if name.startswith("resume-")], ["resume-tied-on-dp2pp2"])
)
def test_a_run_goes_on_with_other_stages(one: Group, four: Group, saved: Any, case: str) -> None:
    saved("tied", "4")
    assert went_on(one.read("uninterrupted-tied"), four, case, TOLERANCE) == []


@pytest.mark.parametrize(
    "case",
    [
        case if case == "resume-tied-from-4" else pytest.param(case, marks=pytest.mark.every)
        for case in GROUPS["one-resumes"]
    ],
)
def test_a_run_goes_on_in_one_process(one: Group, back: Group, saved: Any, case: str) -> None:
    _, model, _, source = case.split("-")
    saved(model, source)
    assert went_on(one.read(f"uninterrupted-{model}"), back, case, TOLERANCE) == []
