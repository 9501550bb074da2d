"""One block of each kind is run for all of them: what a rank holds and exchanges is the same as if all were run."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autolaunch_strategies.config import parallel_config
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


@pytest.mark.parametrize(
    "name", ["mp_sp", *(pytest.param(name, marks=pytest.mark.full) for name in ("zero3", "mp_full", "full"))]
)
def test_four_layers_are_of_one_kind(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever styles, recomputation and gathering hang on them."""
    calls, run = [], replay._Call.run
    monkeypatch.setattr(replay, "MANY", 4)
    monkeypatch.setattr(replay._Call, "run", lambda *args: calls.append(1) or run(*args))
    with caplog.at_level("DEBUG", step.__name__):
        pretend(training(name), 0, World())
    assert len(calls) == 4 and "block by block" not in caplog.text


class Calls:
    """A module of blocks that count how often they are run."""

    def __init__(self, change: Callable[[int, nn.Module, Any], Any] | None = None) -> None:
        self.count, self.change = 0, change
        self.numbers: dict[int, int] = {}

    def module(self) -> Any:
        module = cases.module()
        for number, layer in enumerate(module.model.model.layers):
            self.numbers[id(layer)] = number
            layer.forward = functools.partial(self.run, layer, layer.forward)
        return module

    def run(self, layer: nn.Module, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.count += 1
        output = own(*args, **kwargs)
        return output if self.change is None else self.change(self.numbers[id(layer)], layer, output)

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


WIDTH = 32


class Block(nn.Module):
    """A block that can be made another one by its number, or by what it does with what it is given."""

    def __init__(self, number: int, odd: str = "") -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.number, self.odd = number, odd
        self.function: Any = F.silu if odd == "function" and number == 2 else F.relu
        self.settings = (2 if odd == "settings" and number == 2 else 1,)
        if odd == "unused":
            self.unused = nn.Linear(WIDTH, WIDTH)
        if odd == "frozen":
            self.requires_grad_(False)

    def forward(self, x: torch.Tensor, *others: Any) -> torch.Tensor:
        inner = self.function(self.first(x))
        for _ in range(self.settings[0] - 1):
            inner = torch.exp(inner)
        if self.odd == "mask":
            inner = inner.masked_fill(others[0][..., None], 0.0)
        if self.odd == "list":
            others[0].append(inner.mean())
        if self.odd == "other":
            inner = inner * others[0]
        return x + self.second(inner) if self.odd != "saved output" else torch.exp(self.second(inner))


class Stack(pl.LightningModule):
    """Blocks one after the other, and what their callers may do beside."""

    def __init__(self, odd: str) -> None:
        super().__init__()
        self.embed, self.head, self.odd = nn.Embedding(64, WIDTH), nn.Linear(WIDTH, 64), odd
        self.blocks = nn.ModuleList(Block(number, odd) for number in range(7))
        self.tapped: list[torch.Tensor] = []
        if odd == "hook":
            self.blocks[3].first.register_forward_hook(lambda module, args, output: self.tapped.append(output))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.tapped.clear()
        x = self.embed(ids)
        if self.odd == "parallel":
            return self.head(torch.cat([block(x) for block in self.blocks], -1).unflatten(-1, (7, WIDTH)).sum(-2))
        for number, block in enumerate(self.blocks):
            if self.odd == "outside":
                x = x + block(x)
            elif self.odd == "twice":
                x = block(block(x))
            elif self.odd == "mask":
                x = block(x, ids > number)
            elif self.odd == "list":
                x = block(x, self.tapped)
            elif self.odd == "other":
                x = block(x, self.head.bias[:1])
            else:
                x = block(x)
        if self.odd == "switched":
            self.blocks[2].odd = "saved output" if self.blocks[2].odd == "switched" else "switched"
        return self.head(x) + sum(item.mean() for item in self.tapped)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = F.cross_entropy(self(batch).flatten(0, 1), batch.flatten())
        return loss + self(batch).mean() if self.odd == "switched" else loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


USUAL = ["", "function", "settings", "hook", "mask", "outside", "list"]
RARE = ["unused", "frozen", "parallel", "twice", "other", "switched", "saved output"]


@pytest.mark.parametrize("odd", [*USUAL, *(pytest.param(odd, marks=pytest.mark.full) for odd in RARE)])
@pytest.mark.parametrize("recompute", [None, pytest.param(3, marks=pytest.mark.full)])
def test_blocks_that_only_seem_alike(odd: str, recompute: int | None) -> None:
    one = training_of(candidate("one"), lambda: Stack(odd))
    if recompute is not None:
        one = replace(one, parallel=parallel_config("1", recompute=recompute))
    replayed = pretend(one, 0, World())
    without_process_group()
    assert replayed == pretend(one, 0, World(), replays=False)


def test_what_autograd_refuses_is_refused() -> None:
    class Changes(Stack):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.embed(ids)
            for block in self.blocks:
                x = block(x)
                x += 1
            return self.head(x)

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        pretend(training_of(candidate("one"), lambda: Changes("saved output")), 0, World())


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
