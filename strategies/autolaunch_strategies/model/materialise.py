"""Give a parallelised module its values: from a recorded construction, from files, or from what it already holds.

Never more than one parameter is held whole on a device, and each rank keeps its own part only. What a constructor made
in host memory goes to the device when it has been sharded.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from autolaunch_strategies.config import ConfigError
from autolaunch_strategies.model.construction import Construction
from autolaunch_strategies.torch_private.calls import no_weak_references
from autolaunch_strategies.torch_private.gradient_hooks import swap_below_hooks
from autolaunch_strategies.torch_private.meshes import local_index, with_local

Index = tuple[slice, ...]


class WeightFiles(Protocol):
    """Weights by name that can be read in parts, such as a directory of safetensors."""

    def __contains__(self, name: str) -> bool: ...

    def read(self, name: str, index: Index | None = None) -> torch.Tensor: ...


@torch.no_grad()
def materialise(
    module: nn.Module,
    device: torch.device,
    construction: Construction | None,
    files: WeightFiles | None = None,
    offloaded: bool = False,
) -> None:
    """Replace every meta parameter and buffer of `module` by a real one on `device`.

    Args:
        offloaded: keep what is sharded in host memory. Random numbers are drawn on `device` all the same.
        construction: the record of the module's constructor; gives everything that `files` does not.
        files: weights by parameter name; they win over the construction.

    Raises:
        ConfigError: a tensor has no values: it is on meta, but neither recorded nor in the files.
    """
    with no_weak_references(module):
        _give_values(module, device, construction, files, offloaded)


def _give_values(
    module: nn.Module,
    device: torch.device,
    construction: Construction | None,
    files: WeightFiles | None,
    offloaded: bool,
) -> None:
    for name, tensor in _tensors(module):
        in_files = files is not None and name in files
        if not tensor.is_meta and not in_files:
            continue
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        index = local_index(tensor) if isinstance(tensor, DTensor) else None
        home = device if tensor.is_meta else local.device
        kept = torch.device("cpu") if offloaded and index is not None else home
        if in_files:
            assert files is not None
            values = files.read(name, index)
            if values.shape != local.shape:
                raise ConfigError(name, f"has shape {tuple(values.shape)} in the files, {tuple(local.shape)} here")
            values = values.to(kept, local.dtype, copy=True)
        else:
            whole = _whole(name, construction, home)
            values = whole if index is None else whole[index].clone().to(kept)
            del whole
        if tensor.is_meta:
            become(tensor, values.to(local.dtype))
        else:
            local.copy_(values)


def share_values(module: nn.Module, group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Give every rank the values that the first rank of `group` holds: parameters and buffers that are not on meta.

    For modules that each process built by itself, with whatever random state it had.

    Args:
        device: where tensors travel, one by one; they stay where they are.
    """
    if group is not None:
        _share([tensor for _, tensor in _tensors(module)], group, device)


@torch.no_grad()
def place_on(module: nn.Module, device: torch.device) -> None:
    """Move to `device` what is neither there nor on meta nor sharded, as `nn.Module.to` does; what is sharded stays."""

    def stays(tensor: torch.Tensor) -> bool:
        return isinstance(tensor, DTensor) or tensor.is_meta or tensor.device == device

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if stays(tensor) else tensor.to(device)

    for part in module.modules():
        own = [*part.parameters(recurse=False), *part.buffers(recurse=False)]
        if all(map(stays, own)):
            continue
        if not any(isinstance(tensor, DTensor) for tensor in own):
            part._apply(moved, recurse=False)  # some modules override it
            continue
        for parameter in part.parameters(recurse=False):
            if not isinstance(parameter, DTensor):
                parameter.data = moved(parameter.data)
        for name, buffer in part._buffers.items():
            part._buffers[name] = None if buffer is None else moved(buffer)


@torch.no_grad()
def share_statistics(module: nn.Module, group: dist.ProcessGroup | None) -> list[str]:
    """Give every rank of `group` the first one's buffers, of those that are saved.

    What a layer collects while it trains may come from each rank's own samples.

    Returns:
        the names of those that were others than the first rank's on any rank, by more than rounding; on all alike.
    """
    if group is None:
        return []
    saved = module.state_dict(keep_vars=True)
    buffers = {
        name: buffer
        for name, buffer in module.named_buffers()
        if name in saved and not buffer.is_meta and not isinstance(buffer, DTensor)
    }
    if not buffers:
        return []
    before = [buffer.detach().clone() for buffer in buffers.values()]
    _share(buffers.values(), group)
    others = [not _alike(*pair) for pair in zip(before, buffers.values(), strict=True)]
    on_any = torch.tensor(others, dtype=torch.int32, device=next(iter(buffers.values())).device)
    dist.all_reduce(on_any, dist.ReduceOp.MAX, group=group)
    return [name for name, other in zip(buffers, on_any.tolist(), strict=True) if other]


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    if not one.is_floating_point():
        return torch.equal(one, other)
    return torch.allclose(one.float(), other.float(), 1e-3, 1e-6, equal_nan=True)


@torch.no_grad()
def _share(tensors: Iterable[torch.Tensor], group: dist.ProcessGroup, device: torch.device | None = None) -> None:
    source = dist.get_global_rank(group, 0)
    for tensor in tensors:
        if tensor.is_meta or isinstance(tensor, DTensor):
            continue
        travelling = tensor.detach().to(device or tensor.device).contiguous()
        dist.broadcast(travelling, source, group=group)
        if travelling.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(travelling)


def _tensors(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Parameters and buffers by name, shared ones once, under their first name."""
    return [*module.named_parameters(), *module.named_buffers()]


def _whole(name: str, construction: Construction | None, device: torch.device) -> torch.Tensor:
    if construction is None or name not in construction.named:
        raise ConfigError(
            f"the model's {name}",
            "is on the meta device and nothing says what its values are",
            "build the model outside of torch.device('meta'), or in LightningModule.configure_model",
        )
    return construction.tensor(construction.named[name], device)


def become(tensor: torch.Tensor, local: torch.Tensor) -> None:
    """Turn a meta tensor into one with values, keeping the object: ties, references and hooks stay right."""
    real = local
    if isinstance(tensor, DTensor):
        real = with_local(tensor, local)
    if isinstance(tensor, nn.Parameter):
        real = nn.Parameter(real, requires_grad=tensor.requires_grad)
    real.__dict__.update(tensor.__dict__ | real.__dict__)  # what it has itself is its own: a fake tensor, its device
    swap_below_hooks(tensor, real)
