"""One block of each kind is run for all of them: what a rank holds and exchanges is the same as if all were run."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from autolaunch_strategies.dry_run import replay, step
from autolaunch_strategies.dry_run.step import PretendedRank, pretend
from autolaunch_strategies.dry_run.world import World
from tests.dry_run.pretending import pretended_ranks, training_of
from tests.dry_run.test_dry_run import AGREES, candidate, parts, training
from tests.planner import memory_cases as cases
from tests.support.one_rank import without_process_group
from tests.support.tiers import spread, tiered

GARBAGE = 0.015
"""What is freed by collecting garbage, with cp, may be freed earlier or later."""
REPLAYED = [name for name in AGREES if "zb" not in name and "dualpipev" not in name]
"""Schedules of zero bubbles differentiate blocks in two parts."""
DAILY = ("zero3", "1f1b")


@pytest.fixture(autouse=True)
def nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    without_process_group()
    monkeypatch.setattr(replay, "MANY", 1)


@pytest.mark.parametrize("name", tiered(REPLAYED, DAILY, spread(REPLAYED, parts, DAILY)))
def test_replayed_blocks_do_what_blocks_do(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    replayed = pretended_ranks(training(name))
    monkeypatch.setattr("autolaunch_strategies.dry_run.ranks.pretend", functools.partial(pretend, replays=False))
    for rank, whole in zip(replayed, pretended_ranks(training(name)), strict=True):
        assert rank.exchanges == whole.exchanges
        assert rank.held == whole.held
        if candidate(name).cp > 1:
            assert rank.total == pytest.approx(whole.total, rel=GARBAGE)
        else:
            assert rank == whole


@pytest.mark.full
@pytest.mark.parametrize("name", ["zero3", "dp_pp_zero3", "mp_full", "exact_full"])
def test_replayed_blocks_know_autocast(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    replayed = pretended_ranks(training(name), "bf16-mixed")
    monkeypatch.setattr("autolaunch_strategies.dry_run.ranks.pretend", functools.partial(pretend, replays=False))
    assert replayed == pretended_ranks(training(name), "bf16-mixed")


class Calls:
    """A module of blocks that count how often they are run."""

    def __init__(self, change: Callable[[int, nn.Module, Any], Any] | None = None) -> None:
        self.count, self.change = 0, change

    def module(self) -> Any:
        module = cases.module()
        for number, layer in enumerate(module.model.model.layers):
            layer.forward = functools.partial(self.run, number, layer, layer.forward)
        return module

    def run(self, number: int, layer: nn.Module, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.count += 1
        output = own(*args, **kwargs)
        return output if self.change is None else self.change(number, layer, output)

    def pretended(self, replays: bool) -> tuple[PretendedRank, int]:
        """(what the one rank did, how often blocks were run)."""
        self.count = 0
        without_process_group()
        return pretend(training_of(candidate("one"), self.module), 0, World(), replays=replays), self.count


def test_the_first_and_the_last_block_are_run() -> None:
    calls = Calls()
    replayed, count = calls.pretended(replays=True)
    assert count == 2
    assert (replayed, 4) == calls.pretended(replays=False)


def keeps(number: int, layer: nn.Module, output: torch.Tensor) -> torch.Tensor:
    KEPT.append(output.detach() * 2)
    return output


def counts(number: int, layer: Any, output: torch.Tensor) -> torch.Tensor:
    layer.calls = getattr(layer, "calls", 0) + 1
    return output


def works_more_behind(number: int, layer: nn.Module, output: torch.Tensor) -> torch.Tensor:
    return output * 2 if number == 3 else output


def returns_a_window(number: int, layer: nn.Module, output: torch.Tensor) -> torch.Tensor:
    return torch.cat([output, output])[: len(output)]


KEPT: list[torch.Tensor] = []


@pytest.mark.parametrize("change", [keeps, counts, works_more_behind, returns_a_window])
def test_blocks_that_can_not_be_replayed_are_run(change: Callable[..., Any], caplog: pytest.LogCaptureFixture) -> None:
    calls = Calls(change)
    with caplog.at_level("DEBUG", step.__name__):
        replayed, count = calls.pretended(replays=True)
    assert "rank 0 is run block by block: " in caplog.text and count > 4
    KEPT.clear()
    assert replayed == calls.pretended(replays=False)[0]
    KEPT.clear()


def test_a_graph_that_is_differentiated_twice_is_run() -> None:
    def module() -> Any:
        built = cases.module()

        def training_step(batch: Any, batch_idx: int) -> torch.Tensor:
            ids = batch[:, :-1]
            loss = built.model(ids).float().mean()
            torch.autograd.grad(loss, built.model.lm_head.weight, retain_graph=True)
            torch.autograd.grad(loss, built.model.model.embed_tokens.weight, retain_graph=True)
            return loss

        built.training_step = training_step
        return built

    one = training_of(candidate("one"), module)
    without_process_group()
    replayed = pretend(one, 0, World())
    without_process_group()
    assert replayed == pretend(one, 0, World(), replays=False)
