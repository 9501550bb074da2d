"""The config of a run as loggers are given it: all of it, but nothing that came from the environment."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import lightning.pytorch as pl

_SECRET = re.compile(r"(^|_)(api_?key|access_key|password|secret|token)$", re.IGNORECASE)
"""Names of keys that hold what nobody else may see, also where it was typed."""

_NAME = re.compile(r"[\w.\- ]+")
"""Names of keys that every logger takes; a mapping with others (patterns of plans) is given as one text."""


def log_config(loggers: Iterable[Any], config: Mapping[str, Any], left_out: Collection[str]) -> None:
    """Give loggers the config of a run as its hyperparameters; for the first rank, once.

    Args:
        loggers: Lightning's, or such as have its `log_hyperparams`, which flattens what it has to.
        config: the resolved job.
        left_out: dotted keys whose values come from the environment.
    """
    for logger in loggers:
        if isinstance(logger, pl.loggers.Logger):
            logger.log_hyperparams(shown_config(config, left_out))


def shown_config(config: Mapping[str, Any], left_out: Collection[str] = (), prefix: str = "") -> dict[str, Any]:
    """A config without the keys `left_out` and without secrets, as mappings of plain values."""
    shown: dict[str, Any] = {}
    for name, value in config.items():
        key = f"{prefix}{name}"
        if _SECRET.search(str(name)) or any(out == key or out.startswith(f"{key}[") for out in left_out):
            continue
        if isinstance(value, Mapping):
            inner = shown_config(value, left_out, f"{key}.")
            shown[name] = inner if all(_NAME.fullmatch(str(item)) for item in inner) else json.dumps(inner)
        else:
            shown[name] = value
    return shown
