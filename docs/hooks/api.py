"""The page of what can be imported from `autolaunch_strategies`: its `__all__`, each with its docstring."""

from __future__ import annotations

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

import autolaunch_strategies

_INTRODUCTION = """# Python

What `autolaunch_strategies` gives to scripts. It imports torch and Lightning, and neither Hydra nor the command. How it
is used:
[In a script of your own](../loops.md).
"""

_FIRST = ("MeshStrategy", "parallelize", "to_distributed")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    names = [*_FIRST, *(name for name in autolaunch_strategies.__all__ if name not in _FIRST)]
    text = "\n".join([_INTRODUCTION, *(f"::: autolaunch_strategies.{name}\n" for name in names)])
    files.append(File.generated(config, "reference/api.md", content=text))
    return files
