"""The plans that `transformers` models come with."""

from __future__ import annotations

from torch import nn

from autolaunch_strategies.plan.rules import Rule


def transformers_plan(model: nn.Module, sequence_parallel: bool, ranks: int) -> list[Rule] | None:
    """The plan that a `transformers` model comes with, as rules; None if it has none that serves."""
    return None
