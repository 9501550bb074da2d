"""The engine of autolaunch: a Lightning strategy over an N-D device mesh, usable without the command line."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autolaunch_strategies.config import ConfigError, DataParallel, MeshShape, ParallelConfig
    from autolaunch_strategies.strategy import MeshStrategy

__all__ = ["ConfigError", "DataParallel", "MeshShape", "MeshStrategy", "ParallelConfig"]

_HOMES = {"MeshStrategy": "strategy"}  # everything else lives in config, which imports no torch


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES.get(name, 'config')}"), name)
