"""Activation checkpointing, and its relatives: less memory for what the backward pass needs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from autolaunch_strategies.config.errors import ConfigError

RECOMPUTE_MODES = ("none", "full", "selective", "offload")


@dataclass
class Recompute:
    """What is computed again in the backward pass, or kept in host memory, instead of being kept on the device."""

    mode: str | int = "none"
    """`none`, `full` (every block), an integer n (every n-th block), `selective` (keep the outputs of `save`) or
    `offload` (keep all, in host memory).
    """
    save: tuple[str, ...] = ("mm", "attention")
    """Selective only: operators whose outputs are kept: `mm`, `attention`, `collective`, or `aten.<name>`."""


def parse_recompute(value: Any, save: Iterable[str] = ("mm", "attention")) -> Recompute:
    """Read ``recompute=``: one of `RECOMPUTE_MODES`, or an integer n >= 1 for every n-th block.

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
            f"{', '.join(RECOMPUTE_MODES)}, or a number n for every n-th block",
        )
    return Recompute(mode, tuple(save))
