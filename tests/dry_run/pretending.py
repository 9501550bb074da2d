"""Trainings of the cases of the planner's memory, for dry runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch.nn import functional as F

from autolaunch_strategies.config import parallel_config
from autolaunch_strategies.dry_run.agreement import disagreements
from autolaunch_strategies.dry_run.ranks import pretend_ranks, telling_ranks
from autolaunch_strategies.dry_run.step import PretendedRank, Training
from autolaunch_strategies.lightning.first_step import first_step
from autolaunch_strategies.model.construction import Construction
from autolaunch_strategies.planner.candidate import Candidate
from tests.planner import memory_cases as cases


class NextToken(pl.LightningModule):
    """What its forward returns of tokens is trained to be the next ones."""

    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = torch.zeros(2, cases.POSITIONS, dtype=torch.int64)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class CausalModel(NextToken):
    """A language model of `transformers`.

    Args:
        kind: its model type.
        sizes: fields of its config.
    """

    def __init__(self, kind: str, sizes: Mapping[str, Any]) -> None:
        import transformers

        super().__init__()
        config = transformers.AutoConfig.for_model(kind, **sizes, use_cache=False)
        self.model = transformers.AutoModelForCausalLM.from_config(config)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(ids, use_cache=False).logits


def training_of(one: Candidate, module: Callable[[], Any]) -> Training:
    """What a candidate trains, on batches as those of `memory_cases`."""
    pp: object = "exact"
    if one.pp > 1:
        exact = one.pipeline_name == "exact"
        pp = {
            "loss": "exact" if exact else "microbatch",
            "schedule": "gpipe" if exact else one.pipeline_name,
            "microbatches": one.microbatches,
        }
    dp = {"sharding_level": one.level, **({"replicate": one.replicate} if one.level else {})}
    mp = "seq_parallel" if one.sequence_parallel else "auto"
    cp = one.backend_name if one.cp > 1 else None
    parallel = parallel_config(one.mesh, dp, mp, pp, cp, recompute=one.recompute_name, ep=one.ep)
    accumulated = one.microbatches if one.pp == 1 else 1
    shape = (cases.BATCH // one.dp // accumulated, cases.POSITIONS + 1)

    def build() -> tuple[Any, Construction]:
        construction = Construction(0)
        with construction.recording():
            return module(), construction

    return Training(
        parallel,
        build,
        lambda module, batch: first_step(module, lambda: batch),
        lambda: torch.empty(shape, dtype=torch.int64, device="meta"),
        accumulated,
    )


def pretended_ranks(training: Training, precision: str = "32-true") -> list[PretendedRank]:
    """One rank of each role; they agree on what they exchange."""
    if precision != "32-true":
        training = replace(training, precision=MixedPrecision(precision, "cpu"))
    ranks = pretend_ranks(training, telling_ranks(training.parallel.mesh))
    assert not disagreements({rank.rank: rank.exchanges for rank in ranks})
    return ranks
