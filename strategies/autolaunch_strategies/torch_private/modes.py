"""Function and dispatch modes: which are active, and how to leave them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.overrides import TorchFunctionMode


def is_active(mode: TorchFunctionMode) -> bool:
    """Whether calls of torch functions go through `mode` right now."""
    return any(active is mode for active in torch.overrides._get_current_function_mode_stack())


@contextmanager
def outside_of_modes() -> Iterator[None]:
    """Within it tensors are made that are kept: real ones, whatever mode (fake, inference, device) is active."""
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.inference_mode(False):
        yield


without_torch_functions = torch._C.DisableTorchFunction
"""A context in which neither function modes nor subclasses of tensors are asked: attributes are those of the object."""
