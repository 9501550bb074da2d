"""Dry runs of mixtures of experts: every expert is taken to get as many tokens, and the plan says what a step holds."""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

pytest.importorskip("transformers")
from autolaunch_strategies.config import ConfigError, parallel_config
from autolaunch_strategies.dry_run.ranks import pretend_ranks
from autolaunch_strategies.dry_run.step import EVEN, PretendedRank
from autolaunch_strategies.planner.candidate import Candidate
from autolaunch_strategies.planner.memory import memory_account
from autolaunch_strategies.planner.module_profile import profile_module
from autolaunch_strategies.planner.profile import ModelProfile
from autolaunch_strategies.planner.recipe import recipe_of
from tests.dry_run.pretending import pretended_ranks, training_of
from tests.planner import memory_cases as cases
from tests.planner.test_memory import CPU
from tests.support.one_rank import without_process_group
from tests.support.tiers import spread, tiered

LAYERS, WIDTH, EXPERTS, CHOSEN = 4, 128, 8, 2
CASES = {
    "dp": cases.case(dp=2),
    "ep": cases.case(dp=2, ep=2),
    "ep_zero1": cases.case(dp=2, ep=2, level=1),
    "ep_zero3": cases.case(dp=4, ep=2, level=3),
    "ep_full": cases.case(dp=2, ep=2, recompute=1),
    "mp": cases.case(mp=2),
    "mp_ep": cases.case(mp=2, ep=2),
    "cp_ep": cases.case(cp=2, ep=2, backend="ring"),
    "pp_ep": cases.case(pp=2, dp=2, ep=2, pipeline="1f1b", microbatches=4),
}


def module() -> Any:
    import lightning.pytorch as pl
    import transformers

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            config = transformers.Qwen3MoeConfig(
                vocab_size=512, hidden_size=WIDTH, intermediate_size=384, moe_intermediate_size=96,
                num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=4, head_dim=32,
                num_experts=EXPERTS, num_experts_per_tok=CHOSEN, use_cache=False, max_position_embeddings=256,
            )  # fmt: skip
            self.model = transformers.AutoModelForCausalLM.from_config(config)
            self.example_input_array = torch.zeros(2, cases.POSITIONS, dtype=torch.int64)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.model(ids).logits

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            logits = self.model(batch[:, :-1]).logits
            return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    return Module()


def candidate(name: str) -> Candidate:
    return cases.candidate(CASES[name])


def pretended(name: str, precision: str = "32-true") -> list[PretendedRank]:
    without_process_group()
    return pretended_ranks(training_of(candidate(name), module), precision)


@functools.cache
def profile(precision: str) -> ModelProfile:
    return profile_module(module(), cases.POSITIONS, device_type="cpu", precision=precision)


PAIRS = [(name, precision) for precision in ("32-true", "bf16-mixed") for name in CASES]
_SELDOM = spread(PAIRS, tuple, [("ep_zero3", "bf16-mixed")])


@pytest.mark.parametrize(
    ("name", "precision"),
    tiered(PAIRS, [("ep_zero3", "bf16-mixed")], lambda pair: pair[0] in ("dp", "mp", "ep_zero1") or _SELDOM(pair)),
)
def test_the_plan_says_what_a_step_holds(name: str, precision: str) -> None:
    """Also of experts with bf16-mixed: autocast knows no grouped product, and copies none of their weights."""
    one = candidate(name)
    even = CPU.with_constants(replace(CPU.constants, imbalance=1.0), CPU.origin)  # as the dry run takes experts to be
    account = memory_account(profile(precision), recipe_of(cases.BATCH, precision), even, one)
    for rank in pretended(name, precision):
        assert rank.notes == ((EVEN,) if one.ep > 1 or one.mp > 1 else ())
        ours = account[rank.pipe_rank]
        assert ours["optimizer"] == pytest.approx(rank.held["optimizer"], rel=0.01)
        assert ours["total"] == pytest.approx(rank.total, rel=0.05)


@pytest.mark.full
def test_rows_travel_to_experts_and_back() -> None:
    rows = cases.BATCH // 2 * cases.POSITIONS * CHOSEN
    (rank, _) = pretended("ep")
    travelled = Counter(item.bytes for item in rank.exchanges if item.kind == "alltoall_base_")
    # There and back, and gradients the same ways; beside it how many rows come for each expert.
    assert travelled == {rows * WIDTH * 4: 4 * LAYERS, EXPERTS * 8: LAYERS}


@pytest.mark.full
def test_experts_that_are_called_by_values_are_refused() -> None:
    class Mixture(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = torch.nn.Linear(WIDTH, 2)
            self.experts = torch.nn.ModuleList([torch.nn.Linear(WIDTH, WIDTH) for _ in range(2)])

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            chosen, out = self.router(hidden).argmax(-1), torch.zeros_like(hidden)
            for number, expert in enumerate(self.experts):
                rows = (chosen == number).nonzero(as_tuple=True)
                out[rows] = expert(hidden[rows])
            return out

    def listed() -> Any:
        made = module()
        for layer in made.model.model.layers:
            layer.mlp = Mixture()
        return made

    without_process_group()
    training = training_of(candidate("dp"), listed)
    assert training.parallel == parallel_config("2", {"sharding_level": 0}, "auto", "exact")
    with pytest.raises(ConfigError, match="needs values, of which a dry run has none"):
        pretend_ranks(training, [0])
