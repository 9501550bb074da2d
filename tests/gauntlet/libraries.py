"""The libraries of the table: imports what is installed; `python -m tests.gauntlet` preloads it into its ranks."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import warnings

import torch

LIBRARIES = {
    "timm": "timm", "torchvision": "torchvision.models", "x-transformers": "x_transformers",
    "vit-pytorch": "vit_pytorch", "litgpt": "litgpt", "diffusers": "diffusers", "peft": "peft",
    "pytorch-forecasting": "pytorch_forecasting", "lightning": "lightning.pytorch.demos", "torch": "torch",
    "transformers": "transformers",
}  # fmt: skip
"""Distribution -> what is imported of it."""


def import_torchvision() -> None:
    """Import it, and declare what it then asks for if its compiled operators can't be loaded.

    Its wheel on PyPI is built for CUDA and loads none of them beside a torch for CPUs. It describes the shapes of two
    when it is imported; no model of the table calls them.
    """
    global _declared
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        _declared = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            _declared.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        importlib.import_module("torchvision")


_declared: torch.library.Library | None = None


def is_installed(library: str) -> bool:
    return importlib.util.find_spec(LIBRARIES[library].partition(".")[0]) is not None


def version(library: str) -> str:
    return importlib.metadata.version(library)


def preload() -> None:
    """Import all that is there; what can't be imported fails again, and says why, in the rows that need it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for module in LIBRARIES.values():
            with contextlib.suppress(Exception):
                importlib.import_module(module)


with contextlib.suppress(ImportError):
    import_torchvision()
