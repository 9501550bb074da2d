"""The plan for mp that a model of the group `model` comes with. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def own_plan(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The plan for mp that the job's model comes with, if it brings one of the wanted kind."""
    if config["mp"] is None or config["module"]:
        return None
    plans = config["model"].get("mp_plans") or {}
    return plans.get("seq_parallel" if config["mp"]["sequence_parallel"] else "tensor_parallel")
