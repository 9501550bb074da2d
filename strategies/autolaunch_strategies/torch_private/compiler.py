"""The compiler imported once something asks for it, in a process that most likely compiles nothing."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

NAME = "torch._dynamo"
SETTINGS = f"{NAME}.config"


def import_compiler_when_asked() -> None:
    """Spare this process the half second in which torch imports its compiler, of which fake tensors need settings.

    Until then what is not to be compiled is not marked so, and nothing should be compiled after it.
    """
    if NAME in sys.modules:
        return
    spec = importlib.util.find_spec(NAME)
    assert spec is not None and spec.loader is not None and spec.submodule_search_locations is not None
    later = _Later(NAME)
    vars(later).update(__spec__=spec, __file__=spec.origin, __package__=NAME, __loader__=spec.loader)
    sys.modules[NAME] = torch.__dict__["_dynamo"] = later
    of_settings = importlib.util.spec_from_file_location(SETTINGS, f"{spec.submodule_search_locations[0]}/config.py")
    assert of_settings is not None and of_settings.loader is not None
    settings = sys.modules[SETTINGS] = importlib.util.module_from_spec(of_settings)
    of_settings.loader.exec_module(settings)
    vars(later)["config"] = settings


class _Later(ModuleType):
    """Stands for the compiler's package until something is asked of it that it lacks, also a module in it."""

    def __getattr__(self, name: str) -> Any:
        if name == "disable":
            return _as_it_is
        if name == "graph_break":
            return _nothing
        if name.startswith("__") and name != "__path__":
            raise AttributeError(name)
        spec = self.__spec__
        assert spec is not None and spec.loader is not None
        self.__class__ = ModuleType  # type: ignore[assignment]  # an ordinary one from now on
        self.__path__ = list(spec.submodule_search_locations or ())
        spec.loader.exec_module(self)
        return getattr(self, name)


def _as_it_is(fn: Callable[..., Any] | None = None, *_: Any, **__: Any) -> Callable[..., Any]:
    return _as_it_is if fn is None else fn  # without one it is a decorator, as `@torch.compiler.disable()`


def _nothing(*_: Any, **__: Any) -> None:
    """No graph is being made that could be broken."""
