"""Experts whose parameters LoRA changes while they run (`target_parameters` of PEFT): each rank changes its own ones.

To a parameter of all experts PEFT adds a product of two matrices for each. Those of all experts stand in two linear
layers beside it, `lora_A` with rows [experts, r] and `lora_B` with columns [r, experts]. They are small: every rank has
them whole, as it has what lies beside experts, and uses what is for its own.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autolaunch_strategies.experts.exchange import used_in_parts
from autolaunch_strategies.tensor.views import plain


class ChangedExperts:
    """What a rank's experts compute with, of what it has of their parameters.

    Takes the place of the forwards of `adapters`, which change parameters of all: they only call what is inside.

    Args:
        adapters: of PEFT, each around the next, each for one parameter of the module in the innermost.
        first: this rank's first expert.
        local: how many it has.
        same_tokens: ranks that are called with the same tokens, which each does a part of; None if there are none.
    """

    def __init__(
        self, adapters: Sequence[nn.Module], first: int, local: int, same_tokens: dist.ProcessGroup | None
    ) -> None:
        self.own, self.same_tokens = slice(first, first + local), same_tokens
        self.adapters: dict[str, Any] = {str(adapter.parameter_name): adapter for adapter in adapters}
        for adapter in self.adapters.values():
            adapter.forward = functools.wraps(adapter.forward)(functools.partial(_inside, adapter))

    def __call__(self, name: str, parameter: torch.Tensor) -> torch.Tensor:
        """The part of a parameter that this rank has [local, ...] with what active adapters add to it."""
        adapter = self.adapters.get(name)
        if adapter is None or adapter.disable_adapters or adapter.merged:
            return parameter
        for key in adapter.active_adapters:
            if key in adapter.lora_A:
                left, right = own_factors(adapter, key, self.own, parameter.dim(), self.same_tokens)
                with torch.autocast(parameter.device.type, enabled=False):  # as PEFT, which keeps the parameter's type
                    add = torch.addmm if parameter.dim() == 2 else torch.baddbmm
                    left, right = left.to(parameter.dtype), right.to(parameter.dtype)
                    parameter = add(parameter, left, right, alpha=adapter.scaling[key])
        return parameter


def own_factors(
    adapter: Any, key: str, own: slice, dims: int, same_tokens: dist.ProcessGroup | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two matrices for each of the experts `own`, whose product is what LoRA `key` adds to it, but for a factor.

    Args:
        dims: of the parameter: 3, [experts, in, out] or [experts, out, in], or 2, which PEFT takes for one matrix.

    Returns:
        ([experts, rows, r], [experts, r, columns]), or ([experts, r], [r, columns]).
    """
    reads, gives = plain(adapter.lora_A[key].weight), plain(adapter.lora_B[key].weight)
    if same_tokens is not None:
        reads, gives = used_in_parts(reads, same_tokens), used_in_parts(gives, same_tokens)
    if dims == 2:
        return gives[own], reads
    experts = adapter.num_experts
    reads = reads.view(experts, -1, reads.shape[1])[own]  # [experts, r, in]
    gives = gives.view(gives.shape[0], -1, experts)[..., own].permute(2, 0, 1)  # [experts, out, r]
    if getattr(adapter, "_did_swap_in_out_features", False):
        return gives, reads
    return reads.transpose(1, 2), gives.transpose(1, 2)


def _inside(adapter: Any, *args: Any, **kwargs: Any) -> Any:
    return adapter.base_layer(*args, **kwargs)
