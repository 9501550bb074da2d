"""Dry runs of models of `transformers` beside the plan: masks, and queries, keys and values from one matrix."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.nn import functional as F

from autolaunch_strategies.planner.memory import memory_account
from autolaunch_strategies.planner.module_profile import profile_module
from autolaunch_strategies.planner.profile import Recipe
from tests.dry_run.pretending import pretended_ranks, training_of
from tests.planner import memory_cases as cases
from tests.planner.test_memory import CPU
from tests.support.one_rank import without_process_group

transformers = pytest.importorskip("transformers")

SIZES = {"vocab_size": 512, "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
CONFIGS = {
    "qwen3": {**SIZES, "intermediate_size": 256, "num_key_value_heads": 2, "head_dim": 32},
    "gpt2": {"vocab_size": 512, "n_embd": 128, "n_layer": 4, "n_head": 4, "n_positions": cases.POSITIONS},
}


class Module(pl.LightningModule):
    def __init__(self, kind: str) -> None:
        super().__init__()
        config = transformers.AutoConfig.for_model(kind, **CONFIGS[kind], use_cache=False)
        self.model = transformers.AutoModelForCausalLM.from_config(config)
        self.example_input_array = torch.zeros(2, cases.POSITIONS, dtype=torch.int64)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(ids, use_cache=False).logits

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


@pytest.fixture(autouse=True)
def nobody_else() -> None:
    without_process_group()


SHARDS_THE_BATCH = pytest.mark.skipif(
    torch.torch_version.TorchVersion(torch.__version__) >= (2, 15),
    reason="from torch 2.15 on DTensor divides the batch where one matrix made queries, keys and values: it holds less",
)


@pytest.mark.parametrize("kind", ["qwen3", pytest.param("gpt2", marks=SHARDS_THE_BATCH)])
def test_the_plan_says_what_a_step_holds(kind: str) -> None:
    """A row is one sequence and has no mask; what one matrix makes of queries, keys and values is gathered."""
    candidate = cases.candidate(cases.case(mp=2, sequence_parallel=1))
    account = memory_account(
        profile_module(Module(kind), cases.POSITIONS, device_type="cpu"), Recipe(batch_size=cases.BATCH), CPU, candidate
    )
    for rank in pretended_ranks(training_of(candidate, lambda: Module(kind))):
        assert account[0]["total"] == pytest.approx(rank.total, rel=0.05)


@pytest.mark.parametrize("kind", ["qwen3", pytest.param("gpt2", marks=SHARDS_THE_BATCH)])
def test_whether_ranks_of_mp_share_the_heads(kind: str) -> None:
    (block,) = profile_module(Module(kind), cases.POSITIONS, device_type="cuda", precision="bf16-mixed").kinds
    assert block.attention is not None and block.attention.divided == (kind == "qwen3")
