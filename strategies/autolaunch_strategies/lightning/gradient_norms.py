"""Lightning's utility `grad_norm`, which looks at one rank's gradients, for modules of which a rank holds a part."""

from __future__ import annotations

from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities import grad_norm
from torch import nn

from autolaunch_strategies.apply.order import Parallelized
from autolaunch_strategies.apply.registry import all_applied
from autolaunch_strategies.data_parallel.gradients import gradient_norm

_of_one_rank = FunctionType(grad_norm.__code__, grad_norm.__globals__, argdefs=grad_norm.__defaults__)


def _instead(module: Any, norm_type: Any, group_separator: str = "/") -> dict[str, Any]:
    from autolaunch_strategies.lightning.gradient_norms import gradient_norms

    return gradient_norms(module, norm_type, group_separator)


def replace_grad_norm() -> None:
    """Let `lightning.pytorch.utilities.grad_norm` be `gradient_norms`, also where it has been imported before."""
    grad_norm.__code__ = _instead.__code__


def gradient_norms(module: nn.Module, norm_type: float | str, group_separator: str = "/") -> dict[str, Any]:
    """The norm of the gradient of each parameter, and of all together, under the names of Lightning's `grad_norm`.

    On every rank what one process has. Collective over the mesh for a module that was parallelised, or a part of one;
    Lightning's own function for any other.

    Raises:
        ValueError: `norm_type` is not positive.
    """
    applied = next((item for item in all_applied() if any(part is module for part in item.module.modules())), None)
    kind = float(norm_type)
    if applied is None or kind <= 0:
        return _of_one_rank(module, norm_type, group_separator)
    trained = [(name, parameter) for name, parameter in module.named_parameters() if parameter.grad is not None]
    norms = {name: gradient_norm([parameter], kind) for name, parameter in trained}
    if applied.pipeline is not None:
        norms = _of_all_stages(norms, applied, module)
    named: dict[str, Any] = {f"grad_{kind}_norm{group_separator}{name}": norm for name, norm in norms.items()}
    if norms:
        named[f"grad_{kind}_norm_total"] = torch.tensor(list(norms.values())).norm(kind)
    return named


def _of_all_stages(norms: dict[str, torch.Tensor], applied: Parallelized, module: nn.Module) -> dict[str, torch.Tensor]:
    pipeline = applied.pipeline
    assert pipeline is not None
    parts: list[Any] = [None] * pipeline.group.size()
    dist.all_gather_object(parts, {name: float(norm) for name, norm in norms.items()}, group=pipeline.group)
    of_stages = {name: norm for part in parts for name, norm in part.items()}
    path = next(name for name, part in applied.module.named_modules() if part is module)
    order = {name: place for place, name in enumerate(pipeline.cutting.sizes)}

    def place(name: str) -> int:
        return order.get(f"{path}.{name}" if path else name, len(order))

    return {name: torch.tensor(of_stages[name], device=pipeline.device) for name in sorted(of_stages, key=place)}
