"""Many families of models on two ranks along cp: the loss and every gradient equal those of one process, or they are
refused.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parent))
from pipeline_zoo_run import MORE
from strategy_runs import start, torchrun
from zoo_models import NAMES

SCRIPT = str(Path(__file__).parent / "context_zoo_run.py")
REFUSED: dict[str, str] = {}
"""Families whose sequences can't be divided, and what they are told."""

RING = ("llama", "gpt2", "qwen3", "gpt_neox", "mixtral", "opt")
STARTS: dict[str, tuple[str, int, list[str]]] = {
    "cp2": (
        "cp2",
        2,
        [f"{name}:gather" for name in (*NAMES, *MORE)]
        + [f"{name}:{backend}" for name in RING for backend in ("ring", "ulysses")],
    ),
}
"""Name of a start -> mesh, processes, cases."""

CASES = [
    pytest.param(name, case, id=f"{name}-{case}")
    for name, (_, _, cases) in STARTS.items()
    for case in cases
    if case.split(":")[0] not in REFUSED
]

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Of a start: what every rank wrote."""
    results: dict[str, list[dict[str, Any]]] = {}

    def of(name: str) -> list[dict[str, Any]]:
        if name not in results:
            mesh, ranks, cases = STARTS[name]
            directory = tmp_path_factory.mktemp(name)
            done = start(torchrun(ranks, SCRIPT, mesh, str(directory), *cases), timeout=300)
            assert done.returncode == 0, done.stdout[-4000:]
            results[name] = [torch.load(directory / f"{rank}.pt", weights_only=False) for rank in range(ranks)]
        return results[name]

    return of


@pytest.mark.parametrize(("name", "case"), CASES)
def test_loss_and_gradients_are_those_of_one_process(found: Any, name: str, case: str) -> None:
    ranks = found(name)
    for rank in ranks:
        assert case in rank, "an earlier case failed"
        assert "found" in rank[case], rank[case]
        loss, gradients = rank[case]["expected"]
        largest = max(gradient.abs().max() for gradient in gradients.values())
        own_loss, own = rank[case]["found"]
        torch.testing.assert_close(own_loss, loss, rtol=1e-5, atol=0)
        assert set(own) == set(gradients)
        for key, gradient in own.items():
            # What is rounding error beside the others (biases in front of a softmax) has no digits to compare.
            atol = 1e-5 * float(gradients[key].abs().max()) + 1e-7 * float(largest)
            torch.testing.assert_close(gradient, gradients[key], rtol=1e-5, atol=atol, msg=f"{key}: {{}}".format)


@pytest.mark.parametrize("family", REFUSED)
def test_what_can_not_be_divided_is_told_so(found: Any, family: str) -> None:
    for rank in found("cp2"):
        assert REFUSED[family] in rank[f"{family}:gather"]["refused"]
