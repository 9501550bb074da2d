"""What is killed goes on exactly: a few trials of `tests.kills`, which runs many when it is called itself."""

from __future__ import annotations

import pytest

from tests.kills import MESHES, PHASES, Harness

pytestmark = [pytest.mark.full, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Harness:
    return Harness(tmp_path_factory.mktemp("kills"), seed=1)


@pytest.mark.parametrize(("mesh", "phase"), list(zip(MESHES, PHASES, strict=True)))
def test_a_killed_run_goes_on_exactly(mesh: str, phase: str, harness: Harness) -> None:
    trial = harness.trial(mesh, phase)
    assert trial.problem is None, trial
