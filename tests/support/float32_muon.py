"""Muon without bfloat16, whose roundings hide differences between meshes."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch

from autolaunch.models import muon


class Muon(muon.Muon):
    """Ours, with torch's Newton-Schulz iteration in float32: the same lines, on matrices that are not rounded."""

    def step(self, closure: Any = None) -> Any:
        with mock.patch.object(torch.Tensor, "bfloat16", lambda tensor: tensor.clone()):
            return super().step(closure)
