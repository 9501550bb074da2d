"""Spares every start the import of transformers that torchmetrics makes, and so lightning: a fifth of what it takes.

torchmetrics imports it, where it is installed, for one metric (`bert_score`), which then asks it for models by name.
"""

from __future__ import annotations

import builtins
import importlib
from types import ModuleType
from typing import Any

from autolaunch.when_imported import Execute, WhenImported

_IMPORTS_IT = "torchmetrics.functional.text.bert"


def import_transformers_when_used() -> None:
    """Have that module of torchmetrics import transformers when the metric is computed, not before."""
    WhenImported(_IMPORTS_IT, _execute)


class _Later:
    """A name of transformers that is looked up when it is used."""

    def __init__(self, name: str) -> None:
        self._name = name

    def _found(self) -> Any:
        return getattr(importlib.import_module("transformers"), self._name)

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self._found(), attribute)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._found()(*args, **kwargs)


class _Transformers(ModuleType):
    def __getattr__(self, name: str) -> Any:
        return _Later(name)


def _execute(execute: Execute, module: ModuleType) -> None:
    """Execute it with an `import` of its own, which gives names of transformers that are looked up later."""
    executing = True

    def import_(name: str, *args: Any, **kwargs: Any) -> Any:
        later = executing and name == "transformers"
        return _Transformers(name) if later else builtins.__import__(name, *args, **kwargs)

    module.__dict__["__builtins__"] = {**vars(builtins), "__import__": import_}
    try:
        execute(module)
    finally:
        executing = False
