"""Finders that find nothing by themselves: they only change how one module is executed, once somebody imports it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

Execute = Callable[[ModuleType], None]


class WhenImported:
    """Executes the module `name` by `instead(execute, module)` when it is imported; `execute` is how it would be."""

    def __init__(self, name: str, instead: Callable[[Execute, ModuleType], None]) -> None:
        self._name, self._instead = name, instead
        sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """As `importlib.abc.MetaPathFinder.find_spec`; it looks once."""
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module
            # The loader of this one spec: nothing else is imported by it.
            spec.loader.exec_module = partial(self._instead, execute)  # type: ignore[method-assign]  # of this object
        return spec
