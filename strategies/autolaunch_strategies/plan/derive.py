"""Derive a plan for a model that comes with none."""

from __future__ import annotations

from torch import nn

from autolaunch_strategies.config import ConfigError
from autolaunch_strategies.plan.rules import Rule


def derive_plan(model: nn.Module, sequence_parallel: bool, ranks: int) -> list[Rule]:
    """The rules for `model`, each with its reason.

    Raises:
        ConfigError: no plan can be found.
    """
    raise ConfigError(
        "mp.base",
        f"{type(model).__name__} comes with no plan",
        "a plan of your own in mp.plan, with mp.base=none",
    )
