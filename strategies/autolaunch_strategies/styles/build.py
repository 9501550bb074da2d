"""From what a plan says to style objects: by name, by import path, or an object that stands there already."""

from __future__ import annotations

import importlib
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle

from autolaunch_strategies.config import ConfigError
from autolaunch_strategies.plan.rules import StyleSpec
from autolaunch_strategies.styles import hooks, sequence, tensor
from autolaunch_strategies.styles.base import Region, Style


class TorchStyle(Style):
    """One of torch's own styles (`ColwiseParallel`, `PrepareModuleInput`, ...) in a plan."""

    def __init__(self, style: ParallelStyle) -> None:
        self.style = style

    def apply(self, region: Region, name: str, module: nn.Module, only: str | None) -> None:
        if any(isinstance(parameter, DTensor) for parameter in module.parameters(recurse=False)):
            return  # the first to place a parameter wins
        region.replacing_parameters(module, lambda: self.style._apply(module, region.mesh))


def build_style(spec: StyleSpec, where: str) -> Style:
    """The style that a rule means.

    Raises:
        ConfigError: it is no style, or its class can't be found or made.
    """
    made: Any = spec.made
    if made is None:
        try:
            made = _find(spec.name)(**spec.arguments)
        except (ImportError, AttributeError, TypeError) as error:
            raise ConfigError(
                f"{where}: {spec.name}", f"can't be made: {error}", "the class of a style and its arguments"
            ) from error
    if isinstance(made, ParallelStyle):
        return TorchStyle(made)
    if not isinstance(made, Style):
        raise ConfigError(
            f"{where}: {spec.name}", "is not a style", "autolaunch_strategies.styles or torch's ParallelStyle"
        )
    return made


def _find(name: str) -> Any:
    for module in (tensor, sequence, hooks):
        if "." not in name and hasattr(module, name):
            return getattr(module, name)
    home, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(home), attribute)
