"""cp with dp, mp and pp, and over four ranks: what one process gives, on 4 and 8 ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers")
from tests.context.cases import GROUPS, RANKS, RECIPES
from tests.support.ranks import Group, GroupOf, differences, problems, went_on
from tests.support.tiers import spread, tiered

SCRIPT = Path(__file__).with_name("cases.py")
TOLERANCE = 1e-5
pytestmark = pytest.mark.timeout(600)


def same(group: str) -> list[str]:
    """The cases of a group that have a counterpart in one process."""
    return [name for name in GROUPS[group] if name.split("@")[0] in RECIPES and "bf16" not in name]


FOUR = {
    "llama@dp2xcp2-ring-level3", "llama@mp2xcp2-gather-sp", "llama@pp2xcp2-ring-exact", "nanogpt@cp4-usp",
    "own-lengths@dp2xcp2-gather-level3",
}  # fmt: skip
"""What runs every day: every other axis beside cp; two ranks meet every backend."""


def parts(case: str) -> tuple[str, ...]:
    """The model, the mesh, the backend, and what else there is."""
    model, _, run = case.partition("@")
    return model, *run.split("-")


_SELDOM = spread(same("four"), parts, FOUR)
LONG = (
    "hf-qwen3@mp2xcp2-ulysses-mp", "own-step@mp2xcp2-gather-sp", "written-out@pp2xcp2-gather-exact",
    "calls-attention-own@mp2xcp2-gather", "hf-gpt2@dp2xcp2-ulysses-level1",
    "hf-t5@dp2xcp2-gather-level3", "tasks@dp2xcp2-gather-level3",
    "hf-gpt2-padded@dp2xcp2-gather-level3", "own-step-linear@dp2xcp2-ring-level3",
)  # fmt: skip
"""Models that two ranks along cp meet in test_lightning.py, on meshes that others meet here."""


def seldom(case: str) -> bool:
    return case.startswith("captured@") or case in LONG or _SELDOM(case)  # test_compiled_meshes.py has what is compiled


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints that pass from mesh to mesh."""
    return tmp_path_factory.mktemp("shelf")


@pytest.fixture(scope="module")
def one(group_of: GroupOf, shelf: Path) -> Group:
    return group_of(SCRIPT, "one", RANKS["one"], SHELF=str(shelf))


@pytest.fixture(scope="module")
def two(group_of: GroupOf, shelf: Path) -> Group:
    return group_of(SCRIPT, "two", RANKS["two"], SHELF=str(shelf))


@pytest.fixture(scope="module")
def four(group_of: GroupOf, shelf: Path) -> Group:
    return group_of(SCRIPT, "four", RANKS["four"], SHELF=str(shelf))


@pytest.fixture(scope="module")
def eight(group_of: GroupOf, shelf: Path) -> Group:
    return group_of(SCRIPT, "eight", RANKS["eight"], SHELF=str(shelf))


@pytest.fixture(scope="module")
def back(group_of: GroupOf, shelf: Path) -> Group:
    return group_of(SCRIPT, "back", RANKS["back"], SHELF=str(shelf))


@pytest.mark.parametrize("case", tiered(same("four"), FOUR, seldom))
def test_four_ranks_equal_one_process(one: Group, four: Group, case: str) -> None:
    assert problems(one, four, case.split("@")[0], case, TOLERANCE) == []


@pytest.mark.every  # half a minute each; each pair of their axes is above
@pytest.mark.parametrize("case", same("eight"))
def test_eight_ranks_equal_one_process(one: Group, eight: Group, case: str) -> None:
    assert problems(one, eight, case.split("@")[0], case, TOLERANCE) == []


@pytest.mark.full
def test_bf16_mixed_is_close(one: Group, four: Group) -> None:
    expected, found = one.read("bf16-mixed")["first"], four.read("bf16-mixed@dp2xcp2-ring-level3")["first"]
    assert differences(expected["losses"], found["losses"], 1e-2) == []


RESUMED = [name for name in GROUPS["four"] if name.startswith("resume-")]


# Every day test_lightning.py goes on, on two ranks.
@pytest.mark.parametrize("case", tiered(RESUMED, [], ["resume-dp2xcp2-from-cp2", "resume-dp2xcp2-from-1"]))
def test_a_run_goes_on_on_dp2xcp2(one: Group, two: Group, four: Group, case: str) -> None:
    source = case.rpartition("-")[2]
    {"1": one, "cp2": two, "dp2xcp2": four}[source].read_all(f"save-{source}")
    assert went_on(one.read("uninterrupted"), four, case, TOLERANCE) == []


@pytest.mark.full
def test_a_run_goes_on_in_one_process(one: Group, four: Group, back: Group) -> None:
    four.read_all("save-dp2xcp2")
    assert went_on(one.read("uninterrupted"), back, "resume-1-from-dp2xcp2", TOLERANCE) == []


@pytest.mark.parametrize("heads", tiered(["own", "multi"], [], ["own"]))
def test_attention_is_not_gathered_where_a_block_calls_it_itself(four: Group, heads: str) -> None:
    """What is tried out and found wrong would be gathered, so this says that its numbers are right, too."""
    for run in four.read_all(f"how-{heads}"):
        assert run == {f"model.blocks.{number}": [["OPENED"], 2048, ["cumsum"]] for number in (0, 1)}
