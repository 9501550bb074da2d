"""What a step logs on the last pipeline stage is on every stage what one process has."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import Group, GroupOf, differences

CASES = Path(__file__).parent / "relay_cases.py"
Runs = Callable[[str], Group]
RANKS = {"one": 1, "two": 2, "four": 4}


@pytest.fixture(scope="module")
def runs(group_of: GroupOf) -> Runs:
    return functools.cache(lambda name: group_of(CASES, name, RANKS[name]))


@pytest.mark.parametrize(
    ("case", "group"),
    [
        pytest.param("fit", "two", id="values, metrics and hooks"),
        pytest.param("fit", "four", id="values, metrics and hooks with dp", marks=pytest.mark.full),
        pytest.param("batch_values", "two", id="a metric's value of each batch", marks=pytest.mark.full),
        pytest.param("microbatches", "two", id="several runs of a step per batch"),
        pytest.param("monitors", "two", id="monitors"),
        pytest.param("monitors", "four", id="monitors with dp", marks=pytest.mark.every),
        pytest.param("all_loops", "two", id="all loops of one trainer"),
        pytest.param("all_loops", "four", id="all loops of one trainer with dp", marks=pytest.mark.every),
        pytest.param("skipped_epoch", "two", id="the last stage ends an epoch", marks=pytest.mark.full),
        pytest.param("sharded_value", "four", id="a sharded value"),
    ],
)
def test_every_rank_shows_what_one_process_shows(runs: Runs, case: str, group: str) -> None:
    expected: Any = runs("one").read(case)
    assert len(expected["rows"]) > 4
    for rank in range(RANKS[group]):
        assert differences(expected, runs(group).read(case, rank), 1e-5) == []


@pytest.mark.parametrize(
    ("where", "error", "message"),
    [
        pytest.param("training_step", "ValueError", "no luck in training_step", id="step"),
        pytest.param(
            "log",
            "ValueError",
            "`self.log(many, tensor([1., 2.]))` was called, but the tensor must have a single element."
            " You can try doing `self.log(many, tensor([1., 2.]).mean())`",
            id="log",
        ),
        pytest.param("on_train_epoch_end", "ValueError", "no luck in on_train_epoch_end", id="hook"),
    ],
)
def test_an_error_on_the_last_stage_ends_all(runs: Runs, where: str, error: str, message: str) -> None:
    place = "training_step" if where == "log" else where
    assert runs("two").read("failures", 0)[where] == [error, message]
    assert runs("two").read("failures", 1)[where] == [
        "StageFailedError",
        f"{place} failed on the last pipeline stage: {error}: {message}",
    ]


def test_an_error_in_a_hook_of_another_stage_ends_all(runs: Runs) -> None:
    own, other = (runs("two").read("failures", rank)["on_before_zero_grad"] for rank in (1, 0))
    assert own == ["ValueError", "no luck in on_before_zero_grad"]
    assert other == ["StageFailedError", "on_before_zero_grad failed on another pipeline stage"]


@pytest.mark.parametrize("rank", [0, 1])
def test_modules_are_copied_without_the_relay(runs: Runs, rank: int) -> None:
    result = runs("two").read("copies", rank)
    assert result["seen"] == result["seen"] | {
        "copies": [8.0, 16.0],  # an unpickled metric exchanges its state with all ranks, as it did before
        "overridden": [True, False],
        "own hooks": [True, True],
        "keys": True,
    }
    assert result["added"] == []
    assert result["after"] == 3.0


def test_hooks_that_read_what_steps_collect_warn_once_on_other_stages(runs: Runs) -> None:
    empty = "torch.cat(): expected a non-empty list of Tensors"
    end = " on this pipeline stage, on which steps do not finish and collect nothing. It succeeded on the last stage,"
    assert runs("two").read("warned", 0) == []
    assert runs("two").read("warned", 1) == [
        f"on_train_batch_end raised KeyError ('logits'){end} whose logs count.",
        f"on_train_epoch_end raised ValueError ({empty}){end} whose logs count.",
    ]
