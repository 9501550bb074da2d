"""The names that torch itself lets a pickle of tensors have."""

from __future__ import annotations

from typing import Any

from torch import _weights_only_unpickler as weights_only


def names_that_torch_allows() -> dict[str, Any]:
    """Qualified name -> object, of `torch.load(weights_only=True)` and of `torch.serialization.add_safe_globals`."""
    return {**weights_only._get_allowed_globals(), **weights_only._get_user_allowed_globals()}
