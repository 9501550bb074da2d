"""Names of torch.distributed.checkpoint that are not public."""

from __future__ import annotations

from torch.distributed.checkpoint._traverse import set_element

__all__ = ["set_element"]
