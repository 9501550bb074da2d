"""What was typed for a model, an optimizer or a schedule of ours, beside a LightningModule that brings its own."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf

from autolaunch_strategies.config import ConfigError

_OUR_OWN = ("model", "optimizer", "scheduler")
"""The keys in whose place a module of the user's stands."""
_NAMED = re.compile(rf"(?<!\w)(?<!\w\.)(?:{'|'.join(_OUR_OWN)})(?:\.\w+)*")
_OF_A_PLAN = ("optimizer", "optimizer.name", "optimizer._target_", "optimizer.momentum")
"""What a plan takes the state of the optimizer from, whose own is not asked."""


def keys_without_effect(config: DictConfig, typed: Sequence[str]) -> Iterator[ConfigError]:
    """The overrides that a job with a `module` makes no use of: nothing of the module or the data refers to them.

    Args:
        config: as composed, with its interpolations.
        typed: the overrides, as a person types them.
    """
    if config.get("module") is None:
        return
    used = _references({key: value for key, value in _plain(config).items() if key not in _OUR_OWN})
    for override in typed:
        key = override.lstrip("+~").partition("=")[0]
        if key.partition(".")[0] not in _OUR_OWN or override.startswith("~"):
            continue
        if any(_meet(key, reference) for reference in used) or (config.task == "plan" and key in _OF_A_PLAN):
            continue
        yield ConfigError(
            override,
            "has no effect: module is a LightningModule of your own, which brings its own model and optimizer",
            "its arguments and configure_optimizers, or keys that it refers to (module.lr=${optimizer.lr})",
        )


def _plain(config: DictConfig) -> dict[str, Any]:
    values: Any = OmegaConf.to_container(config, resolve=False)
    return values


def _references(values: Any) -> set[str]:
    """The dotted keys of ours that interpolations in values name, also to a resolver, or relative to their place."""
    if isinstance(values, str):
        return set(_NAMED.findall(values)) if "${" in values else set()
    parts = values.values() if isinstance(values, dict) else values if isinstance(values, list) else ()
    return {reference for part in parts for reference in _references(part)}


def _meet(key: str, reference: str) -> bool:
    """Whether one is the other, or lies in it."""
    return key == reference or key.startswith(f"{reference}.") or reference.startswith(f"{key}.")
