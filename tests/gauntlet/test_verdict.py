"""The gauntlet's own judgement: a verdict has to be able to be bad."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autolaunch_strategies.config import ConfigError
from tests.gauntlet.report import page
from tests.gauntlet.verdict import judge

PHASE = "gauntlet: "


def of_one_process() -> dict[str, Any]:
    initial = {"w": torch.ones(3), "b": torch.zeros(2)}
    trained = {"w": torch.tensor([1.0, 1.1, 1.2]), "b": torch.tensor([0.5, 0.0])}
    return {"losses": [2.0, 1.5], "norms": [0.5, 0.25], "initial": initial, "weights": trained}


def of_a_rank(**changes: Any) -> dict[str, Any]:
    alone = of_one_process()
    told = {"losses": alone["losses"], "norms": alone["norms"], "weights": alone["weights"], "share": 0.5}
    return {"result": {**told, **changes}}


def raised(error: Exception, phase: str = "before the first step") -> dict[str, Any]:
    error.add_note(f"{PHASE}{phase}")
    try:
        raise error
    except Exception as caught:
        import traceback

        return {"error": f"{type(caught).__name__}: {caught}", "traceback": traceback.format_exc()}


@pytest.mark.parametrize(
    ("changes", "verdict", "said"),
    [
        pytest.param({}, "right", "", id="the same"),
        pytest.param({"losses": [2.0, 1.5 + 1e-6]}, "right", "", id="rounding"),
        pytest.param({"losses": [2.0, 1.501]}, "wrong", "losses on rank 1", id="a loss"),
        pytest.param({"losses": [2.0]}, "wrong", "losses on rank 1", id="a step too few"),
        pytest.param({"losses": [2.0, float("nan")]}, "wrong", "losses on rank 1", id="no number"),
        pytest.param({"norms": [0.5, 0.26]}, "wrong", "norms on rank 1", id="a norm"),
    ],
)
def test_numbers_of_every_rank_count(changes: dict[str, Any], verdict: str, said: str) -> None:
    found = judge("cell", of_one_process(), {0: of_a_rank(), 1: of_a_rank(**changes)}, 2, PHASE)
    assert (found.verdict, found.message[: len(said)]) == (verdict, said)


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        pytest.param({"w": torch.tensor([1.0, 1.1, 1.21])}, "w is off by", id="less than a tenth of what was added"),
        pytest.param({"w": torch.full((3,), torch.nan)}, "w is off by", id="no number"),
        pytest.param({"w": torch.ones(1, 3)}, "w has shape", id="another shape"),
        pytest.param({"w on rank 1": torch.ones(3)}, "also w on rank 1", id="replicas that differ"),
        pytest.param({"w": None}, "no w", id="lost"),
    ],
)
def test_weights_count(weights: dict[str, Any], said: str) -> None:
    together = {**of_one_process()["weights"], **weights}
    together = {name: value for name, value in together.items() if value is not None}
    found = judge("cell", of_one_process(), {0: of_a_rank(weights=together)}, 1, PHASE)
    assert found.verdict == "wrong"
    assert found.message.startswith(said)


def test_a_model_that_does_not_train_proves_nothing() -> None:
    alone = {**of_one_process(), "initial": of_one_process()["weights"]}
    assert judge("cell", alone, {0: of_a_rank()}, 1, PHASE).verdict == "wrong"


def test_a_refusal_is_said_by_all_ranks() -> None:
    refusal = raised(ConfigError("mesh=2", "why", "what", "mesh=1"))
    together = judge("cell", of_one_process(), {0: refusal, 1: refusal}, 2, PHASE)
    assert (together.verdict, together.where) == ("refused", "before the first step")
    assert judge("cell", of_one_process(), {1: refusal}, 2, PHASE).verdict == "hang"
    assert judge("cell", of_one_process(), {0: refusal, 1: raised(KeyError("w"))}, 2, PHASE).verdict == "crash"


def test_an_error_of_somebody_else_is_a_crash() -> None:
    error = raised(RuntimeError("shape mismatch"), "in step 1")
    found = judge("cell", of_one_process(), {0: error, 1: error}, 2, PHASE)
    assert (found.verdict, found.where) == ("crash", "in step 1")


def test_a_rank_that_does_not_come_to_an_end_hangs() -> None:
    assert judge("cell", of_one_process(), {0: of_a_rank()}, 2, PHASE).verdict == "hang"


def test_the_page_counts_every_cell_once() -> None:
    cells = {
        "lib:model": {"verdict": "one process", "parameters": 1234},
        "lib:model@2": {"verdict": "right", "share": 0.5},
        "lib:model@1x2": {"verdict": "right", "share": 0.9},
        "lib:model@1x1x2": {"verdict": "refused", "message": "pp: why\n  write: this"},
        "lib:other": {"verdict": "not run", "message": "no such library"},
    }
    text = page(cells)
    assert "| lib | 3 | 2 | 1 | 0 | 0 | 0 | 67 |" in text
    assert "holds 0.90 in the median; in 1 of 1 models more than 0.8" in text
    assert "| lib:model | 1,234 | 0.50 | 0.90 | refused |  |" in text
    assert "- refused: `lib:model@1x1x2`: pp: why" in text
