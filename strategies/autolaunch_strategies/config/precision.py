"""Arithmetic: lightning's names, and those of runs whose blocks multiply in float8."""

from __future__ import annotations

import importlib.util
from typing import Any

from autolaunch_strategies.config.errors import ConfigError

FLOAT8_RECIPES = {"float8": "rowwise", "float8-tensorwise": "tensorwise"}
"""Values of `precision=` for which linear layers of blocks multiply in float8 -> the recipe, by torchao's name."""

AROUND_FLOAT8 = "bf16-mixed"
"""What everything else computes in then."""


def lightning_precision(precision: str) -> Any:  # of lightning's literals, which are not known here
    """Lightning's name of the arithmetic of everything that is not multiplied in float8."""
    return AROUND_FLOAT8 if precision in FLOAT8_RECIPES else precision


def check_torchao() -> None:
    """Refuse float8 where the library that multiplies is missing.

    Raises:
        ConfigError: torchao is not installed.
    """
    if importlib.util.find_spec("torchao") is None:
        raise ConfigError("precision=float8", "torchao is not installed", write="pip install 'autolaunch[float8]'")
