"""Functions as operators of torch: graphs and selective recomputation see one call, and nothing of what is in it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from autolaunch_strategies.torch_private.modes import without_torch_functions

NAMESPACE = "autolaunch"
"""Of the operators that are defined here, in `torch.ops`."""

_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
_RUN: dict[str, Callable[..., Any]] = {}
"""By name."""


def define_operator(signature: str, run: Callable[..., Any], shapes: Callable[..., Any]) -> None:
    """Make `torch.ops.autolaunch.<name>`, for every device and without a gradient of its own.

    Args:
        signature: as torch writes it: `name(Tensor x, int n) -> Tensor`. What it returns shares nothing with what it
            is given.
        run: what it does, on plain tensors; no function mode sees it.
        shapes: returns tensors like those that `run` returns (shape, stride, dtype), whatever is in them.
    """

    @functools.wraps(run)
    def run_unseen(*args: Any) -> Any:
        with without_torch_functions():
            return run(*args)

    name = signature.partition("(")[0]
    _RUN[name] = run_unseen
    _LIBRARY.define(signature)
    _LIBRARY.impl(name, run_unseen, "CompositeExplicitAutograd")
    torch.library.register_fake(f"autolaunch::{name}", shapes, lib=_LIBRARY)


def assert_on_device(holds: torch.Tensor, message: str) -> None:
    """Fail where a truth value is False, on a GPU without waiting for it, as torch does for an index out of range.

    Raises:
        RuntimeError: it is False, and on a CPU; on a GPU the next call that waits raises it.
    """
    torch._assert_async(holds, message)


def opened(operator: Any) -> Callable[..., Any] | None:
    """What an `OpOverload` that was defined here does, itself made of operators; None of one that was not."""
    return _RUN.get(operator.overloadpacket.__name__) if operator.namespace == NAMESPACE else None
