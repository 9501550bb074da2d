"""Whether something is a LightningModule, asked without importing lightning: who has one has imported it."""

from __future__ import annotations

import sys

from torch import nn


def is_lightning_module(module: nn.Module) -> bool:
    """Whether it is a LightningModule."""
    base = getattr(sys.modules.get("lightning.pytorch"), "LightningModule", None)
    return base is not None and isinstance(module, base)


def has_no_forward(module: nn.Module) -> bool:
    """Whether its class leaves `forward` to be written."""
    if is_lightning_module(module):
        return type(module).forward is sys.modules["lightning.pytorch"].LightningModule.forward
    return type(module).forward is nn.Module.forward
