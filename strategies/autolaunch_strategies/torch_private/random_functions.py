"""Functions of torch that draw random numbers: others in their place, below what dispatches on types of tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional as F

_OWNERS: dict[str, Any] = {
    # What `F.dropout` and its kin call once they are on a plain tensor; modes and tables know them by `F.dropout`.
    **dict.fromkeys(("dropout", "dropout_", "feature_dropout", "feature_dropout_"), torch._VF),
    "scaled_dot_product_attention": F,
    **dict.fromkeys(("bernoulli_", "exponential_", "normal_", "uniform_"), torch.Tensor),
    **dict.fromkeys(("rand", "rand_like", "randn", "randn_like", "randint"), torch),
}


@contextmanager
def in_place_of(functions: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Within it, in every thread, code that looks these functions up finds those of `functions`.

    Args:
        functions: by the names in `ORIGINALS`.
    """
    owned = {name: name in vars(_OWNERS[name]) for name in functions}
    before = {name: getattr(_OWNERS[name], name) for name in functions}
    for name, function in functions.items():
        setattr(_OWNERS[name], name, function)
    try:
        yield
    finally:
        for name, was_own in owned.items():
            if was_own:
                setattr(_OWNERS[name], name, before[name])
            else:
                delattr(_OWNERS[name], name)


ORIGINALS: dict[str, Callable[..., Any]] = {name: getattr(owner, name) for name, owner in _OWNERS.items()}
"""What can be replaced, by name, as torch has it."""


def is_recording() -> bool:
    """Whether tensors that are made now have no values (`FakeTensorMode`)."""
    return torch._guards.detect_fake_mode() is not None


def is_in_backward() -> bool:
    """Whether a backward pass runs in this thread: a forward within it computes again."""
    return torch._C._current_graph_task_id() != -1
