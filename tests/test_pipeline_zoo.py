"""Many families of models in stages: the loss and every gradient equal those of one process, or they are refused."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parent))
from pipeline_zoo_run import CHANGED, MORE
from strategy_runs import start, torchrun
from zoo_models import NAMES

SCRIPT = str(Path(__file__).parent / "pipeline_zoo_run.py")
REFUSED = {
    "albert": [
        "pp.split_spec=null: the model shows no repeated blocks to cut between",
        "  allowed: a prefix of numbered blocks, a list of names and prefixes, {name or pattern: BEGINNING | END}, or "
        "null",
    ],
}
"""Families that can't be cut, and what they are told. Albert is one block that is called many times."""

_DEEP = ("llama_4", "gpt2_4", "qwen3_moe_4")
EXACT = [name for name in (*NAMES, *MORE, *CHANGED) if name not in _DEEP]
STARTS: dict[str, tuple[str, int, list[str]]] = {
    "pp2": (
        "1x1x2",
        2,
        [f"{name}:exact" for name in EXACT]
        + [f"{name}:{pp}" for name in _DEEP for pp in ("1f1b", "interleaved_1f1b", "zbv_zero_bubble")],
    ),
    "mp2pp2": (
        "1x2x2",
        4,
        ["llama_4:exact", "gpt2_4:exact", "gemma2:exact", "qwen3_moe_router_logits:exact", "t5:exact", "llama_4:1f1b"],
    ),
}
"""Name of a start -> mesh, processes, cases."""

CASES = [
    pytest.param(name, case, id=f"{name}-{case}")
    for name, (_, _, cases) in STARTS.items()
    for case in cases
    if case.split(":")[0] not in REFUSED
]

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Of a start: what every rank wrote."""
    results: dict[str, list[dict[str, Any]]] = {}

    def of(name: str) -> list[dict[str, Any]]:
        if name not in results:
            mesh, ranks, cases = STARTS[name]
            directory = tmp_path_factory.mktemp(name)
            done = start(torchrun(ranks, SCRIPT, mesh, str(directory), *cases), timeout=280)
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
    loss, gradients = ranks[0][case]["expected"]
    largest = max(gradient.abs().max() for gradient in gradients.values())
    held: set[str] = set()
    for rank in ranks:
        own_loss, own = rank[case]["found"]
        torch.testing.assert_close(own_loss.float(), loss, rtol=1e-5, atol=0)
        held |= set(own)
        for key, gradient in own.items():
            # What is rounding error beside the others (biases in front of a softmax) has no digits to compare.
            atol = 1e-5 * float(gradients[key].abs().max()) + 1e-7 * float(largest)
            torch.testing.assert_close(gradient, gradients[key], rtol=1e-5, atol=atol, msg=f"{key}: {{}}".format)
    assert held == set(gradients)
    assert all(stage["units"] for stage in ranks[0][case]["stages"])


@pytest.mark.parametrize("case", REFUSED)
def test_what_can_not_be_cut_is_told_so(found: Any, case: str) -> None:
    for rank in found("pp2"):
        assert rank[f"{case}:exact"]["refused"].splitlines() == REFUSED[case]
