"""Every axis, and some together, give what one process gives, on ranks that share one GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.gpu.parity_cases import MESHES
from tests.support.ranks import Group, problems

pytestmark = pytest.mark.timeout(600)
SCRIPT = Path(__file__).with_name("parity_cases.py")
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Group]:
    """Ranks on the GPU, of a group of cases, in new processes: CUDA must not come from a fork."""
    started: dict[str, Group] = {}
    directory = tmp_path_factory.mktemp("parity")

    def group(name: str, count: int) -> Group:
        if name not in started:
            started[name] = Group(SCRIPT, directory / name, name, count, timeout=500, cold=True, DEVICE="cuda")
        return started[name]

    yield group
    for some in started.values():
        some.close()


@pytest.mark.parametrize(("count", "case"), [(count, case) for count, cases in MESHES.items() for case in cases])
def test_ranks_on_one_gpu_equal_one_process(ranks: Callable[[str, int], Group], count: int, case: str) -> None:
    assert problems(ranks("one", 1), ranks(str(count), count), case.split(":")[0], case, TOLERANCE) == []
