"""Activation checkpointing, and its relatives: less memory for what the backward pass needs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from autolaunch_strategies.config.errors import ConfigError

RECOMPUTE_MODES = ("none", "full", "selective", "offload", "budget")


@dataclass
class Recompute:
    """What is computed again in the backward pass, or kept in host memory, instead of being kept on the device."""

    mode: str | int = "none"
    """`none`, `full` (every block), an integer n (every n-th block), `selective` (keep the outputs of `save`),
    `offload` (keep all, in host memory) or `budget` (compiled blocks keep a share).
    """
    save: tuple[str, ...] = ("mm", "attention")
    """Selective only: operators whose outputs are kept: `mm`, `attention`, `collective`, or `aten.<name>`."""
    budget: float = 0.5
    """Budget only: the share that is kept of what a compiled block keeps by itself, 0 to 1."""


def parse_recompute(value: Any, save: Iterable[str] = ("mm", "attention"), budget: float = 0.5) -> Recompute:
    """Read ``recompute=``: one of `RECOMPUTE_MODES`, or an integer n >= 1 for every n-th block.

    Raises:
        ConfigError: anything else, or a budget that is not a share.
    """
    mode = "none" if value in (None, False) else "full" if value is True else value
    if isinstance(mode, str) and mode.isdecimal():
        mode = int(mode)
    if not (mode in RECOMPUTE_MODES or (isinstance(mode, int) and mode >= 1)):
        raise ConfigError(
            f"recompute={value}",
            "no such way of activation checkpointing",
            f"{', '.join(RECOMPUTE_MODES)}, or a number n for every n-th block",
        )
    if isinstance(budget, bool) or not isinstance(budget, (int, float)) or not 0 <= budget <= 1:
        raise ConfigError(f"recompute_budget={budget}", "not a share", "a number from 0 to 1", "recompute_budget=0.5")
    return Recompute(mode, tuple(save), float(budget))
