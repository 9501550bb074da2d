"""Functions as operators of torch: graphs and selective recomputation see one call, and nothing of what is in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

NAMESPACE = "autolaunch"
"""Of the operators that are defined here, in `torch.ops`."""

_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")


def define_operator(signature: str, run: Callable[..., Any], shapes: Callable[..., Any]) -> None:
    """Make `torch.ops.autolaunch.<name>`, for every device and without a gradient of its own.

    Args:
        signature: as torch writes it: `name(Tensor x, int n) -> Tensor`. What it returns shares nothing with what it
            is given.
        run: what it does.
        shapes: returns tensors like those that `run` returns (shape, stride, dtype), whatever is in them.
    """
    name = signature.partition("(")[0]
    _LIBRARY.define(signature)
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"autolaunch::{name}", shapes, lib=_LIBRARY)
