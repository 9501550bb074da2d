"""Activation checkpointing, and its relatives: less memory for what the backward pass needs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from autolaunch_strategies.config.errors import ConfigError, nearest

RECOMPUTE_MODES = ("none", "full", "selective", "budget", "offload")
DEFAULT_BUDGET = 0.5


@dataclass
class Recompute:
    """What is computed again in the backward pass, or kept in host memory, instead of being kept on the device."""

    mode: str | int = "none"
    """`none`, `full` (every block), an integer n (every n-th block), `selective` (keep the outputs of `save`), `budget`
    (compiled blocks keep a share of what they would keep) or `offload` (keep all, in host memory).
    """
    save: tuple[str, ...] = ("mm", "attention")
    """Selective only: operators whose outputs are kept: `mm`, `attention`, `collective`, or `aten.<name>`."""

    budget: float | None = None
    """`budget` only: the share, 0 (keep least, compute most again) to 1 (as `none`)."""


def parse_recompute(value: Any, save: Iterable[str] = ("mm", "attention"), budget: float | None = None) -> Recompute:
    """Read ``recompute=``: one of `RECOMPUTE_MODES`, or an integer n >= 1 for every n-th block.

    Args:
        save: ``recompute_save=``.
        budget: ``recompute_budget=``; None is `DEFAULT_BUDGET` where it counts.

    Raises:
        ConfigError: anything else; a budget that is no share, or that nothing reads.
    """
    mode = "none" if value in (None, False) else "full" if value is True else value
    if isinstance(mode, str) and mode.isdecimal():
        mode = int(mode)
    if not (mode in RECOMPUTE_MODES or (isinstance(mode, int) and mode >= 1)):
        close = nearest(str(value), RECOMPUTE_MODES, 0.7)
        raise ConfigError(
            f"recompute={value}",
            "no such way of activation checkpointing" + (f"; did you mean {close}?" if close else ""),
            f"{', '.join(RECOMPUTE_MODES)}, or a number n for every n-th block",
            f"recompute={close}" if close else "",
        )
    if mode == "budget":
        budget = DEFAULT_BUDGET if budget is None else budget
        if not 0 <= budget <= 1:
            raise ConfigError(
                f"recompute_budget={budget}",
                "not a share of what blocks keep",
                "a number from 0 (keep least) to 1 (compute nothing more again)",
                f"recompute_budget={DEFAULT_BUDGET}",
            )
    elif budget is not None:
        raise ConfigError(
            f"recompute_budget={budget} with recompute={value}",
            "it is read with recompute=budget alone",
            "recompute=budget, or no recompute_budget",
            f"recompute=budget recompute_budget={budget} compile=true",
        )
    return Recompute(mode, tuple(save), budget)
