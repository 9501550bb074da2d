"""Batch norm over the whole batch: its statistics are those of all ranks that hold parts of it.

torch's own `SyncBatchNorm` runs on GPUs only, takes the place of modules, and takes the whole world for one batch.
Here modules stay what they are: while the forward of a batch norm runs, its call of `F.batch_norm` is given the
statistics of the inputs of all ranks along dp.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from autolaunch_strategies.data_parallel.loader import Counted
from autolaunch_strategies.tensor.views import plain

_BatchNorm = nn.modules.batchnorm._BatchNorm


def batch_norms(module: nn.Module) -> dict[str, nn.Module]:
    """The parts of a module that take statistics from a batch, by name."""
    return {name: part for name, part in module.named_modules() if isinstance(part, _BatchNorm)}


def share_batch_statistics(module: nn.Module, group: dist.ProcessGroup | None, counted: Counted) -> None:
    """Let every batch norm of a module take its statistics from the inputs of all ranks of a group.

    They have to call the same ones in the same order. A `SyncBatchNorm` does as all others do. Copies and pickles of
    the module take statistics from their own input.

    Args:
        group: the ranks that hold different samples of one batch; None if there is one.
        counted: whether this rank's input belongs to the batch.
    """
    for part in batch_norms(module).values():
        if group is not None or isinstance(part, nn.SyncBatchNorm):
            part.forward = _ForwardOnWholeBatch(part, group, counted)


class _ForwardOnWholeBatch:
    """The forward of one batch norm, where `F.batch_norm` sees the inputs of all ranks of a group."""

    def __init__(self, module: nn.Module, group: dist.ProcessGroup | None, counted: Counted) -> None:
        self.module, self.group, self.counted = module, group, counted

    def __getstate__(self) -> dict[str, Any]:
        return {"module": self.module, "group": None}

    @torch.compiler.disable
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        kind: Any = _BatchNorm if isinstance(self.module, nn.SyncBatchNorm) else type(self.module)
        if self.group is None:
            return kind.forward(self.module, *args, **kwargs)
        with _WholeBatch(self.group, self.counted()):
            return kind.forward(self.module, *args, **kwargs)


class _WholeBatch(TorchFunctionMode):
    def __init__(self, group: dist.ProcessGroup, is_counted: bool) -> None:
        super().__init__()
        self.group, self.is_counted = group, is_counted

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.batch_norm:
            return _batch_norm(self.group, self.is_counted, func, *args, **kwargs)
        return func(*args, **kwargs)


def _batch_norm(
    group: dist.ProcessGroup,
    is_counted: bool,
    function: Callable[..., torch.Tensor],
    input: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> torch.Tensor:
    if not training:
        return function(input, running_mean, running_var, weight, bias, training, momentum, eps)
    weight, bias = plain(weight), plain(bias)
    return batch_norm_over(group, plain(input), running_mean, running_var, weight, bias, momentum, eps, is_counted)


def batch_norm_over(
    group: dist.ProcessGroup,
    input: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    momentum: float,
    eps: float,
    is_counted: bool = True,
) -> torch.Tensor:
    """`F.batch_norm` in training of the inputs of all ranks of `group`, joined along the batch. Differentiable.

    Collective, in the forward and in the backward pass. Variances are sums of squares around the mean of all: as exact
    as on one process, for a second exchange of one number per channel.

    Args:
        input: [b, c, ...]; b may differ between ranks, and be 0.
        running_mean, running_var: [c], updated in place as `F.batch_norm` does, the same on every rank.
        is_counted: False for an input that is normalised, but is no part of the batch.

    Returns:
        this rank's part, of the shape and type of `input`.

    Raises:
        ValueError: all ranks together have one value per channel.
    """
    exact = input if input.dtype == torch.float64 else input.float()
    dims = [dim for dim in range(exact.dim()) if dim != 1]
    shape = [-1 if dim == 1 else 1 for dim in range(exact.dim())]
    part = slice(None if is_counted else 0)
    counted = exact[part]
    count_here = exact.new_tensor([counted.numel() // exact.shape[1]])
    sums: torch.Tensor = _SumOverRanks.apply(torch.cat([counted.sum(dims), count_here]), group)
    count = sums[-1].detach()
    few = counted.numel() <= exact.shape[1]  # so a rank with more need not look at a value of a device
    if few and count <= 1:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {input.size()}")
    mean = sums[:-1] / count
    centred = exact - mean.view(shape)
    variance: torch.Tensor = _SumOverRanks.apply(centred[part].square().sum(dims), group) / count
    with torch.no_grad():
        for running, value in ((running_mean, mean), (running_var, variance * (count / (count - 1)))):
            if running is not None:
                running.mul_(1 - momentum).add_(value.to(running.dtype), alpha=momentum)
    output = centred * torch.rsqrt(variance + eps).view(shape)
    if weight is not None:
        output = output * weight.view(shape)
    if bias is not None:
        output = output + bias.view(shape)
    return output.to(input.dtype)


class _SumOverRanks(torch.autograd.Function):
    """The sum of the tensors of all ranks of a group; so is, backwards, the gradient of each."""

    @staticmethod
    def forward(context: Any, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        context.group = group
        total = tensor.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        return _SumOverRanks.apply(gradients[0], context.group), None
