"""Activation checkpointing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from autolaunch_strategies.config.errors import ConfigError

RECOMPUTE_MODES = ("none", "full", "selective")


@dataclass
class Recompute:
    """Activation checkpointing: what is computed again in the backward pass instead of being kept."""

    mode: str | int = "none"
    """`none`, `full` (every block), an integer n (every n-th block) or `selective` (keep the outputs of `save`)."""
    save: tuple[str, ...] = ("mm", "attention")
    """Selective only: operators whose outputs are kept: `mm`, `attention`, `collective`, or `aten.<name>`."""


def parse_recompute(value: Any, save: Iterable[str] = ("mm", "attention")) -> Recompute:
    """Read ``recompute=``: none, full, selective, or an integer n >= 1 for every n-th block.

    Raises:
        ConfigError: anything else.
    """
    mode = "none" if value in (None, False) else "full" if value is True else value
    if isinstance(mode, str) and mode.isdecimal():
        mode = int(mode)
    if not (mode in RECOMPUTE_MODES or (isinstance(mode, int) and mode >= 1)):
        raise ConfigError(
            f"recompute={value}",
            "no such way of activation checkpointing",
            "none, full, selective, or a number n for every n-th block",
        )
    return Recompute(mode, tuple(save))
