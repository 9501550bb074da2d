"""What is killed goes on exactly: a few trials of `tests.kills`, which runs many when it is called itself."""

from __future__ import annotations

import pytest

from tests.kills import MESHES, PHASES, Harness
from tests.support.tiers import tiered

pytestmark = [pytest.mark.full, pytest.mark.timeout(240)]

TRIALS = list(zip(MESHES, PHASES, strict=True))


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Harness:
    return Harness(tmp_path_factory.mktemp("kills"), seed=1)


@pytest.mark.parametrize(("mesh", "phase"), tiered(TRIALS, [], [("1", "step"), ("1x2", "start")]))
def test_a_killed_run_goes_on_exactly(mesh: str, phase: str, harness: Harness) -> None:
    trial = harness.trial(mesh, phase)
    assert trial.problem is None, trial
