"""From what a plan says to style objects: by name, by import path, or an object that stands there already."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle

from autolaunch_strategies.config import ConfigError
from autolaunch_strategies.plan.rules import StyleSpec
from autolaunch_strategies.tensor.styles import context, experts, hooks, sequence, tensor
from autolaunch_strategies.tensor.styles.base import Region, Style
from autolaunch_strategies.torch_private.collectives import OF_THE_MACHINE


class TorchStyle(Style):
    """One of torch's own styles (`ColwiseParallel`, `PrepareModuleInput`, ...) in a plan, with all its layouts.

    What it returns is what it returns with `parallelize_module`: with torch's default, ``use_local_output=True``, code
    after it sees this rank's part as a plain tensor, and must be written for that. Parameters used on such parts
    need a style of torch's, too (`SequenceParallel`), as there.
    """

    def __init__(self, style: ParallelStyle) -> None:
        self.style = style

    def apply(self, region: Region, name: str, module: nn.Module, only: str | None) -> None:
        placed: dict[str, Any] = {
            key: parameter for key, parameter in module._parameters.items() if isinstance(parameter, DTensor)
        }  # the first to place a parameter wins, but hooks stack: torch gets placeholders to place
        for key, parameter in placed.items():
            module._parameters[key] = nn.Parameter(
                torch.empty(parameter.shape, dtype=parameter.dtype, device="meta"), requires_grad=False
            )
        kept = set(placed)
        try:
            region.replacing_parameters(module, lambda: self.style._apply(module, region.mesh), kept)
        except OF_THE_MACHINE:
            raise
        except ConfigError:  # of a parameter that can't be replaced
            raise
        except (NotImplementedError, RuntimeError, ValueError) as error:
            raise ConfigError(
                f"mp.plan: {name}: {type(self.style).__name__}",
                f"torch can't apply it to {type(module).__name__}: {error}",
                "a style that fits the module",
            ) from error
        finally:
            module._parameters.update(placed)


def build_style(spec: StyleSpec, where: str) -> Style:
    """The style that a rule means.

    Raises:
        ConfigError: it is no style, or its class can't be found or made.
    """
    style: Any = spec.instance
    if style is None:
        try:
            style = _find(spec.name)(**{key: _instantiated(value) for key, value in spec.arguments.items()})
        except (ImportError, AttributeError, TypeError) as error:
            raise ConfigError(
                f"{where}: {spec.name}", f"can't be made: {error}", "the class of a style and its arguments"
            ) from error
    if isinstance(style, ParallelStyle):
        return TorchStyle(style)
    if not isinstance(style, Style):
        raise ConfigError(
            f"{where}: {spec.name}", "is not a style", "autolaunch_strategies.tensor.styles or torch's ParallelStyle"
        )
    return style


def _instantiated(value: Any) -> Any:
    """An argument with the objects in it made: ``{_target_: torch.distributed.tensor.Shard, dim: 1}``."""
    if isinstance(value, Mapping):
        inner = {key: _instantiated(item) for key, item in value.items() if key != "_target_"}
        return _find(value["_target_"])(**inner) if "_target_" in value else inner
    if isinstance(value, list | tuple):
        return tuple(_instantiated(item) for item in value)
    return value


def _find(name: str) -> Any:
    for module in (tensor, experts, sequence, hooks, context):
        if "." not in name and hasattr(module, name):
            return getattr(module, name)
    home, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(home), attribute)
