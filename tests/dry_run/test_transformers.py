"""Dry runs of models of `transformers` beside the plan: masks, and queries, keys and values from one matrix."""

from __future__ import annotations

import pytest
import torch

from autolaunch_strategies.planner.memory import memory_account
from autolaunch_strategies.planner.module_profile import profile_module
from autolaunch_strategies.planner.profile import Recipe
from tests.dry_run.pretending import CausalModel, pretended_ranks, training_of
from tests.planner import memory_cases as cases
from tests.planner.test_memory import CPU
from tests.support.one_rank import without_process_group

transformers = pytest.importorskip("transformers")

SIZES = {"vocab_size": 512, "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
CONFIGS = {
    "qwen3": {**SIZES, "intermediate_size": 256, "num_key_value_heads": 2, "head_dim": 32},
    "gpt2": {"vocab_size": 512, "n_embd": 128, "n_layer": 4, "n_head": 4, "n_positions": cases.POSITIONS},
    "phi3": {**SIZES, "intermediate_size": 256, "num_key_value_heads": 2, "pad_token_id": 0},
    "granite": {**SIZES, "intermediate_size": 256, "num_key_value_heads": 2},
    "gpt_neo": {
        "vocab_size": 512,
        "hidden_size": 128,
        "num_layers": 4,
        "num_heads": 4,
        "max_position_embeddings": cases.POSITIONS,
        "attention_types": [[["global", "local"], 2]],
        "window_size": 16,
    },
}


@pytest.fixture(autouse=True)
def nobody_else() -> None:
    without_process_group()


SHARDS_THE_BATCH = pytest.mark.skipif(
    torch.torch_version.TorchVersion(torch.__version__) >= (2, 15),
    reason="from torch 2.15 on DTensor divides the batch where one matrix made queries, keys and values: it holds less",
)


def module(kind: str) -> CausalModel:
    return CausalModel(kind, CONFIGS[kind])


@pytest.mark.parametrize(
    "kind",
    ["qwen3", "granite", "gpt_neo", *(pytest.param(kind, marks=SHARDS_THE_BATCH) for kind in ("gpt2", "phi3"))],
)
def test_the_plan_says_what_a_step_holds(kind: str) -> None:
    """A row is one sequence and has no mask; what one matrix makes of queries, keys and values is gathered, and so are
    halves of one matrix. Granite has no place for sequence parallelism, and blocks of GPT Neo return their scores."""
    candidate = cases.candidate(cases.case(mp=2, sequence_parallel=1))
    account = memory_account(
        profile_module(module(kind), cases.POSITIONS, device_type="cpu"), Recipe(batch_size=cases.BATCH), CPU, candidate
    )
    for rank in pretended_ranks(training_of(candidate, lambda: module(kind))):
        assert account[0]["total"] == pytest.approx(rank.total, rel=0.05)


def test_what_attention_sends_back_is_kept() -> None:
    """With ulysses: what attention returned, by heads, and what became of it, by positions."""
    candidate = cases.candidate(cases.case(cp=2, backend="ulysses", ulysses=2))
    account = memory_account(
        profile_module(module("qwen3"), cases.POSITIONS, device_type="cpu"),
        Recipe(batch_size=cases.BATCH),
        CPU,
        candidate,
    )
    for rank in pretended_ranks(training_of(candidate, lambda: module("qwen3"))):
        assert account[0]["total"] == pytest.approx(rank.total, rel=0.035)


def test_halves_of_one_matrix_are_whole() -> None:
    """Queries, keys and values are one matrix in Phi-3, and so are the gate and what it opens: mp gathers both."""
    (block,) = profile_module(module("phi3"), cases.POSITIONS, device_type="cpu").kinds
    assert block.sharded_saved_bytes == block.if_compiled.sharded_saved_bytes == 0


@pytest.mark.parametrize("kind", ["qwen3", pytest.param("gpt2", marks=SHARDS_THE_BATCH)])
def test_whether_ranks_of_mp_share_the_heads(kind: str) -> None:
    (block,) = profile_module(module(kind), cases.POSITIONS, device_type="cuda", precision="bf16-mixed").kinds
    assert block.attention is not None and block.attention.divided == (kind == "qwen3")
