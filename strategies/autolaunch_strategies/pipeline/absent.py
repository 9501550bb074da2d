"""What stands where a parameter is held by other stages: it can be asked what it is, and not be computed with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from autolaunch_strategies.config import ConfigError
from autolaunch_strategies.torch_private.modes import outside_of_modes

INSTEAD = "weight_decay of the optimizer, a penalty computed in the model's forward, or a mesh with pp of size 1"
_QUESTIONS = frozenset(
    ("__get__", "size", "dim", "ndimension", "numel", "nelement", "element_size", "is_floating_point", "is_complex",
     "stride", "storage_offset", "is_contiguous", "get_device", "type", "__repr__", "__hash__", "__len__",
     "__deepcopy__", "__reduce_ex__", "__dir__", "__format__")
)  # fmt: skip


class ReadOfAbsent(ConfigError):
    """Something computes with a parameter of other stages.

    Attributes:
        parameter: its name in the module that is trained.
    """

    parameter = ""


class Absent(torch.Tensor):
    """A parameter of other stages: its shape and type, without memory.

    Args:
        placeholder: a tensor on meta like it.
        name: of the parameter in the module that is trained.
        stages: those that hold it.
    """

    def __new__(cls, placeholder: torch.Tensor, name: str, stages: Sequence[int]) -> Absent:
        with outside_of_modes():  # of a fake tensor there can be no other class
            like = torch.empty_strided(
                placeholder.shape, placeholder.stride(), dtype=placeholder.dtype, device=placeholder.device
            )
            tensor = like.as_subclass(cls)
        tensor.name_, tensor.stages = name, stages
        return tensor

    name_: str
    stages: Sequence[int]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in _QUESTIONS:
            return super().__torch_function__(func, types, args, kwargs or {})
        absent = next(item for item in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(item, Absent))
        raise absent.refusal()

    def refusal(self) -> ReadOfAbsent:
        """What is said to code that computes with it."""
        homes = ", ".join(map(str, self.stages))
        error = ReadOfAbsent(
            "pp",
            f"{self.name_} is used outside of the call of the model, but it is held by stage {homes} alone",
            INSTEAD,
        )
        error.parameter = self.name_
        return error
