"""Hooks of the user's own around a module, made for the mesh; Paddle's PrepareLayerInput and PrepareLayerOutput."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from torch import nn

from autolaunch_strategies.plan.rules import check_callable
from autolaunch_strategies.tensor.styles.base import Region, Style


class PrepareLayerInput(Style):
    """Change what a module is called with.

    Args:
        fn: ``fn(process_mesh=mesh)`` returns a hook ``(module, inputs) -> inputs``, inputs being the positional ones.
            Its import path (``my.module.function``) will do, too.
    """

    def __init__(self, fn: Callable[..., Any] | str) -> None:
        self.fn = check_callable(_imported(fn), "PrepareLayerInput")

    def apply(self, region: Region, name: str, module: nn.Module, only: str | None) -> None:
        module.register_forward_pre_hook(self.fn(process_mesh=region.mesh))


class PrepareLayerOutput(Style):
    """Change what a module returns.

    Args:
        fn: ``fn(process_mesh=mesh)`` returns a hook ``(module, inputs, outputs) -> outputs``; or its import path.
    """

    def __init__(self, fn: Callable[..., Any] | str) -> None:
        self.fn = check_callable(_imported(fn), "PrepareLayerOutput")

    def apply(self, region: Region, name: str, module: nn.Module, only: str | None) -> None:
        module.register_forward_hook(self.fn(process_mesh=region.mesh))


def _imported(fn: Any) -> Any:
    if not isinstance(fn, str):
        return fn
    home, _, name = fn.rpartition(".")
    return getattr(importlib.import_module(home), name)
