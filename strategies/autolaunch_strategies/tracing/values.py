"""Values that the host asks of tensors without any: they are what they are where nothing is wrong."""

from __future__ import annotations

from typing import Any

import torch

SAY_THAT_SOMETHING_IS_WRONG = (torch.ops.aten.any, torch.ops.aten.isnan, torch.ops.aten.isinf, torch.ops.aten.ne)
"""`OpOverloadPacket`s whose truth values are False where nothing is."""

ASKS_VALUE = torch.ops.aten._local_scalar_dense
"""What `item` and `bool` come to."""


def healthy_value(tensor: torch.Tensor, is_wrong: bool) -> Any:
    """The value of a tensor with one element where nothing is wrong.

    Args:
        is_wrong: whether it is of `SAY_THAT_SOMETHING_IS_WRONG`.
    """
    if tensor.dtype == torch.bool:
        return not is_wrong
    return 1.0 if tensor.dtype.is_floating_point else 1
