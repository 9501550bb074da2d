"""Writes in place into sharded tensors, also where torch would write into a copy.

A slice along a sharded dim is a view for autograd, but what a rank holds of it was gathered from other ranks: what is
written there, nobody would see. Such a write is made in a whole plain copy of what is viewed, of which each rank then
takes its part. So is one for which torch has no rule.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.utils._pytree import tree_leaves, tree_map

from autolaunch_strategies.tensor.replicas import Replicator, plain
from autolaunch_strategies.torch_private.aliases import Replay, TensorKeys, own_part, share_memory, viewed

_OF_NO_VALUES = ("requires_grad_", "detach_", "unsqueeze_", "squeeze_", "transpose_", "swapaxes_", "swapdims_", "t_")
"""Methods that change the tensor itself, and nothing in what it is a view of."""

_VIEW_METHODS = (
    *("select", "narrow", "chunk", "split", "tensor_split", "unbind", "view", "view_as", "reshape", "reshape_as"),
    *("flatten", "unflatten", "transpose", "swapaxes", "swapdims", "permute", "movedim", "moveaxis", "t", "squeeze"),
    *("unsqueeze", "expand", "expand_as", "diagonal", "unfold", "detach", "__getitem__"),
)
_VIEWS = {
    *(getattr(torch.Tensor, name) for name in _VIEW_METHODS),
    *(getattr(torch, name) for name in _VIEW_METHODS if hasattr(torch, name)),
    *(getattr(torch.Tensor, name).__get__ for name in ("T", "mT", "data")),
}
"""Functions that make views."""

_COPIED: Any = TensorKeys()
"""Whole copies of which views were made -> (the tensor that the views should be of, how the copy is made of it)."""


WRITES_BY_INDEX = (
    *("index_put_", "index_add_", "index_copy_", "index_fill_", "index_reduce_", "put_", "masked_scatter_"),
    *("scatter_", "scatter_add_", "scatter_reduce_", "fill_diagonal_", "tril_", "triu_"),
)
"""Methods in place whose rules of torch, where it has some, take the index of a whole tensor for one of a part."""


def remember_views(result: Any, original: Any) -> Any:
    """`result`, made of a whole copy of the sharded tensor `original`, so that writes into its views reach that."""
    if torch.compiler.is_compiling():
        return result
    for leaf in tree_leaves(result):
        if isinstance(leaf, torch.Tensor) and isinstance(original, DTensor) and (found := viewed(leaf)) is not None:
            copy = found[0]
            if copy is not original and copy not in _COPIED and copy.shape == original.shape:
                _COPIED[copy] = original, lambda whole: whole
    return result


def remember_inference(result: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """`result`, in inference mode, where autograd knows of no views: what functions that make some are given."""
    if func not in _VIEWS or (not isinstance(args[0], DTensor) and args[0] not in _COPIED):
        return result
    for i, leaf in enumerate(tree_leaves(result)):
        if leaf is not args[0]:
            _COPIED[leaf] = args[0], lambda whole, i=i: tree_leaves(func(whole, *args[1:], **kwargs))[i]
    return result


def remembers() -> bool:
    """Whether plain tensors may be views of copies."""
    return not torch.compiler.is_compiling() and bool(_COPIED)


def is_copy(tensor: Any) -> bool:
    """Whether `tensor` should be a view, but shares no memory with what it should be a view of.

    Compilers see neither views nor memory: to them nothing is a copy.
    """
    if torch.compiler.is_compiling():
        return False
    while isinstance(tensor, torch.Tensor) and (link := _link(tensor)) is not None:
        if not share_memory(tensor, link[0]):
            return True
        tensor = link[0]
    return False


def _link(tensor: torch.Tensor) -> tuple[torch.Tensor, Replay] | None:
    return _COPIED.get(tensor) or viewed(tensor)


def write(replicate: Replicator, func: Any, args: Any, kwargs: Any) -> Any:
    """A function that changes its first argument, on a whole copy of what that is a view of, or of itself.

    Differentiable; the tensors between the view and the viewed one are changed, too.
    """
    if getattr(func, "__name__", "") in _OF_NO_VALUES:
        return func(*args, **kwargs)
    target, replays, tensors = args[0], [], [args[0]]
    while (link := _link(tensors[-1])) is not None:
        tensors.append(link[0])
        replays.append(link[1])
    parts = [plain(tensors[-1]).clone()]
    for replay in reversed(replays):
        parts.append(replay(parts[-1]))
    result = func(parts[-1], *tree_map(plain, args[1:]), **tree_map(plain, kwargs))
    for tensor, part in zip(reversed(tensors), parts, strict=True):
        if tensor in _COPIED or viewed(tensor) is None:
            tensor.copy_(_as_placed(part, tensor))
        else:  # autograd follows what it is a view of
            with torch.no_grad():
                own_part(tensor).copy_(own_part(_as_placed(part, tensor)))
    return target if result is parts[-1] else result


def place_gradient(tensor: DTensor, func: Any) -> None:
    """After a write into a view: have the gradient of what is viewed sharded as that is.

    Autograd writes into that view of the gradient, which may otherwise be sharded so that the view is a copy.
    """
    link = None if torch.compiler.is_compiling() else viewed(tensor)
    if link is None and func is not torch.Tensor.__setitem__:
        return
    base: Any = tensor if link is None else link[0]
    if torch.is_grad_enabled() and base.requires_grad:
        placements = [Replicate() if placement.is_partial() else placement for placement in base.placements]
        base.register_hook(lambda gradient: gradient.redistribute(placements=placements))


def _as_placed(whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A whole plain tensor, placed as another one is. Differentiable."""
    if not isinstance(like, DTensor):
        return whole
    return _Placed.apply(whole, like.device_mesh, like.placements)


class _Placed(torch.autograd.Function):
    """As `Replicator` and `DTensor.redistribute`, which refuses placements of addends."""

    @staticmethod
    def forward(context: Any, whole: torch.Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> DTensor:
        kept = [Replicate() if placement.is_partial() else placement for placement in placements]
        replica = DTensor.from_local(whole.detach(), mesh, [Replicate()] * mesh.ndim, run_check=False)
        local = replica.redistribute(placements=kept).to_local()
        for dim, placement in enumerate(placements):
            if isinstance(placement, Partial) and placement.reduce_op == "sum" and mesh.get_local_rank(dim):
                local = torch.zeros_like(local)  # the first rank adds all of it
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=whole.shape, stride=replica.stride())

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        return plain(gradients[0]), None, None


def set_item(replicate: Replicator, func: Any, args: Any, kwargs: Any) -> Any:
    """`tensor[index] = value`, where torch has no rule, or would set it in a copy of a part of a sharded dim."""
    target, index, value = args
    to_add_up = any(placement.is_partial() for placement in target.placements)
    if isinstance(value, torch.Tensor):
        kept = not to_add_up and all(_takes_all(index, target.shape, placement) for placement in target.placements)
        return NotImplemented if kept else write(replicate, func, args, kwargs)
    if to_add_up:
        return write(replicate, func, args, kwargs)
    chosen = torch.zeros(target.shape, dtype=torch.bool, device=target.device)
    chosen[tree_map(plain, index)] = True
    return target.masked_fill_(replicate(chosen), value)  # no rank needs the parts of others


def _takes_all(index: Any, shape: torch.Size, placement: Placement) -> bool:
    """Whether an index of integers and slices takes all of the dim along which a tensor is sharded.

    Read off the strides of what it makes of a tensor in which this dim alone has one.
    """
    if not isinstance(placement, Shard):
        return True
    items = index if isinstance(index, tuple) else (index,)
    if not all(item is None or item is Ellipsis or type(item) in (int, slice) for item in items):
        return False
    dim = placement.dim % len(shape)
    line = torch.empty(shape[dim], device="meta").view([-1 if i == dim else 1 for i in range(len(shape))])
    part = line.expand(shape)[index]
    return part.storage_offset() == 0 and any(
        size == shape[dim] and stride == 1 for size, stride in zip(part.shape, part.stride(), strict=True)
    )
