"""pp with dp and mp, every schedule, and checkpoints that go on elsewhere: what one process gives, on 4 and 8 ranks."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parent))
from pipeline_cases import GROUPS, RECIPES
from pipeline_runs import Results, problems, run_cases
from strategy_runs import differences

pytestmark = pytest.mark.timeout(600)
TOLERANCE = 1e-5


def same(group: str) -> list[str]:
    """The cases of a group that have a counterpart in one process."""
    return [name for name in GROUPS[group] if name.split("@")[0] in RECIPES]


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints that pass from mesh to mesh."""
    return tmp_path_factory.mktemp("shelf")


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory, shelf: Path) -> Results:
    return run_cases(tmp_path_factory.mktemp("pipeline") / "one", "one", 1, shelf)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory, shelf: Path) -> Results:
    return run_cases(tmp_path_factory.mktemp("pipeline") / "four", "four", 4, shelf)


@pytest.fixture(scope="module")
def eight(tmp_path_factory: pytest.TempPathFactory, one: Results, shelf: Path) -> Results:
    return run_cases(tmp_path_factory.mktemp("pipeline") / "eight", "eight", 8, shelf)


@pytest.fixture(scope="module")
def back(tmp_path_factory: pytest.TempPathFactory, four: Results, eight: Results, shelf: Path) -> Results:
    return run_cases(tmp_path_factory.mktemp("pipeline") / "back", "one-resumes", 1, shelf)


@pytest.mark.parametrize("case", same("four"))
def test_four_ranks_equal_one_process(one: Results, four: Results, case: str) -> None:
    assert problems(one, four, case.split("@")[0], case, 4, TOLERANCE) == []


@pytest.mark.parametrize("case", same("eight"))
def test_eight_ranks_equal_one_process(one: Results, eight: Results, case: str) -> None:
    assert problems(one, eight, case.split("@")[0], case, 8, TOLERANCE) == []


def test_replicas_draw_masks_of_their_own(four: Results) -> None:
    """Dropout's; the data are the same on both."""
    seen = {four.read("masks", rank)["place"]: four.read("masks", rank)["seen"] for rank in (0, 1)}
    assert seen[0] and seen[1] and set(seen[0]).isdisjoint(seen[1])


def went_on(whole: Results, model: str, resumed: Results, case: str, ranks: int) -> list[str]:
    """Where a resumed second epoch differs from that of the run that nobody interrupted."""
    expected = whole.read(f"uninterrupted-{model}")
    steps = len(expected["first"]["losses"]) // 2
    lines = []
    for rank in range(ranks):
        found = resumed.read(case, rank)
        for name in ("norms", "reported", "rates"):
            lines += differences(expected["everywhere"][name][steps:], found["everywhere"][name], TOLERANCE, name)
        for name in ("weights", "metrics", "step"):
            lines += differences(expected["everywhere"][name], found["everywhere"][name], TOLERANCE, name)
        if rank == 0:
            lines += differences(expected["first"]["losses"][steps:], found["first"]["losses"], TOLERANCE, "losses")
    return lines


@pytest.mark.parametrize("source", ["1", "8"])
@pytest.mark.parametrize("model", ["tied", "untied"])
def test_a_run_goes_on_on_2x2x2(one: Results, eight: Results, model: str, source: str) -> None:
    assert went_on(one, model, eight, f"resume-{model}-from-{source}", 8) == []


@pytest.mark.parametrize("case", [name for name in GROUPS["four"] if name.startswith("resume-")])
def test_a_run_goes_on_with_other_stages(one: Results, four: Results, case: str) -> None:
    assert went_on(one, "tied", four, case, 4) == []


@pytest.mark.parametrize("case", GROUPS["one-resumes"])
def test_a_run_goes_on_in_one_process(one: Results, back: Results, case: str) -> None:
    assert went_on(one, case.split("-")[1], back, case, 1) == []
