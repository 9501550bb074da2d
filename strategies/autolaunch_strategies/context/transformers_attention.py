"""Attention of `transformers` models by the call that can be answered for sharded sequences."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import MutableMapping
from typing import Any

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


def blocks_without_torch_attention(model: nn.Module) -> dict[nn.Module, str]:
    """Modules of `transformers` models that can't compute attention by that call -> how it is computed instead."""
    transformers = sys.modules.get("transformers")
    written_out: dict[nn.Module, str] = {}
    if transformers is None:
        return written_out
    for module in model.modules():
        if isinstance(module, transformers.PreTrainedModel) and not getattr(module, "_supports_sdpa", False):
            chosen = str(getattr(module.config, "_attn_implementation", None) or "eager")
            written_out.update(dict.fromkeys(module.modules(), chosen))
    return written_out


def is_cache(value: Any) -> bool:
    """Whether it is what calls of blocks add to: what `transformers` keeps keys and values of earlier positions in, or
    a mapping that is no dict, such as that of layers which share keys and values (Gemma 3n)."""
    transformers = sys.modules.get("transformers")
    return isinstance(value, MutableMapping) or (transformers is not None and isinstance(value, transformers.Cache))
