"""Makes `Trainer(strategy="autolaunch")` work after `import autolaunch`, which imports neither torch nor lightning."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from autolaunch.when_imported import Execute, WhenImported

NAME = "autolaunch"
_REGISTRY_HOME = "lightning.pytorch.strategies"


def register_strategy() -> None:
    """Register MeshStrategy's name with lightning: now if lightning is imported, else once somebody imports it."""
    if _REGISTRY_HOME in sys.modules:
        _register(sys.modules[_REGISTRY_HOME])
    else:
        WhenImported(_REGISTRY_HOME, _execute_and_register)


def _execute_and_register(execute: Execute, home: ModuleType) -> None:
    execute(home)
    _register(home)


def _register(home: Any) -> None:
    if NAME not in home.StrategyRegistry:
        home.StrategyRegistry.register(NAME, _make_strategy, description="MeshStrategy on all devices along dp")


def _make_strategy(**options: Any) -> Any:
    from autolaunch_strategies import MeshStrategy

    return MeshStrategy(**options)
