"""At which positions of a batch the labels of a language model stand; torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LABELS = ("next", "same")
"""next: label t is the token after input t. same: label t is the token at t, as `transformers` has it."""

_SHIFTED = ("text", "tokens", "synthetic")


def labels_of(data_cfg: Mapping[str, Any]) -> str:
    """Which of `LABELS` the batches of the group `data` have."""
    if "_target_" not in data_cfg and data_cfg["name"] in _SHIFTED:
        return "next"
    return data_cfg.get("labels") or "same"
