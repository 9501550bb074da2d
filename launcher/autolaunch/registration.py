"""Makes `Trainer(strategy="autolaunch")` work after `import autolaunch`, which imports neither torch nor lightning."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

NAME = "autolaunch"
_REGISTRY_HOME = "lightning.pytorch.strategies"


def register_strategy() -> None:
    """Register MeshStrategy's name with lightning: now if lightning is imported, else once somebody imports it."""
    if _REGISTRY_HOME in sys.modules:
        _register(sys.modules[_REGISTRY_HOME])
    else:
        sys.meta_path.insert(0, _WhenImported())


def _register(home: Any) -> None:
    if NAME not in home.StrategyRegistry:
        home.StrategyRegistry.register(NAME, _make_strategy, description="MeshStrategy on all devices along dp")


def _make_strategy(**options: Any) -> Any:
    from autolaunch_strategies import MeshStrategy

    return MeshStrategy(**options)


class _WhenImported:
    """A finder that finds nothing by itself: it only lets `_register` follow the import of lightning's registry."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != _REGISTRY_HOME:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_register(module: Any) -> None:
                execute(module)
                _register(module)

            # The loader of this one spec: nothing else is imported by it.
            spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]  # of this object alone
        return spec
