"""Attention of `transformers` models by the call that can be answered for sharded sequences."""

from __future__ import annotations

import logging
import os
import sys

from torch import nn

log = logging.getLogger(__name__)


def use_torch_attention(model: nn.Module) -> None:
    """Let `transformers` models in `model` compute attention by torch's scaled_dot_product_attention, if they can.

    Models that cap scores (gemma2) say themselves that it does not do that. Nothing is imported.
    """
    transformers = sys.modules.get("transformers")
    if transformers is None:
        return
    # Key and value heads are then not repeated for every query head where there is a mask, either: they have to travel.
    os.environ.setdefault("TRANSFORMERS_SDPA_FORCE_GQA", "1")
    for module in model.modules():
        if not isinstance(module, transformers.PreTrainedModel):
            continue
        before = getattr(module.config, "_attn_implementation", None)
        if before in (None, "sdpa") or not getattr(module, "_supports_sdpa", False):
            continue
        module.set_attn_implementation("sdpa")
        log.info("cp: attention of %s is computed by sdpa instead of %s", type(module).__name__, before)


def attention_by_hand(block: nn.Module) -> str | None:
    """How `transformers` computes attention in a block, if that is not by scaled_dot_product_attention."""
    for module in block.modules():
        chosen = getattr(getattr(module, "config", None), "_attn_implementation", None)
        if isinstance(chosen, str) and chosen != "sdpa" and "attention" in type(module).__name__.lower():
            return chosen
    return None
