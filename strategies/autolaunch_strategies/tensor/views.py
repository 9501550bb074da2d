"""Where sharded tensors (`DTensor`) meet plain ones in code that knows nothing of either.

Between a column-wise and a row-wise layer activations are DTensors, so that the model's own code sees the shapes it was
written for: a fused projection that is split afterwards stays right. Everything else is plain. While `MixedTensors` is
active each call of a torch function with both kinds is made whole: plain tensors are the same on every rank of the
mesh, so they become replicated DTensors, differentiably.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from contextlib import nullcontext
from functools import lru_cache
from inspect import signature
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from autolaunch_strategies.model.document_attention import document_attention
from autolaunch_strategies.model.random_streams import RANDOM_FUNCTIONS, own_stream, run_random
from autolaunch_strategies.sharded_sequence.shard import SequenceShard
from autolaunch_strategies.tensor.losses import OF_WHOLE_SAMPLES, POINTWISE_LOSSES, cross_entropy, pointwise_loss
from autolaunch_strategies.tensor.replicas import Replicator, combined, on_whole_tensors, plain
from autolaunch_strategies.tensor.sharding_errors import raise_explained
from autolaunch_strategies.tensor.writes import (
    WRITES_BY_INDEX,
    is_copy,
    place_gradient,
    remember_inference,
    remember_views,
    remembers,
    set_item,
    write,
)
from autolaunch_strategies.torch_private.attention import ATTENTION_ARGUMENTS, HEADS, with_heads_for_kernels
from autolaunch_strategies.torch_private.backward import run_backward
from autolaunch_strategies.torch_private.collectives import OF_THE_MACHINE
from autolaunch_strategies.torch_private.meshes import local_index
from autolaunch_strategies.torch_private.modes import changes_first
from autolaunch_strategies.torch_private.operators import assert_on_device
from autolaunch_strategies.torch_private.sharding_rules import read_whole_numbers, register_missing_rules

__all__ = ["MixedTensors", "Replicator", "plain"]

log = logging.getLogger(__name__)


class MixedTensors(TorchFunctionMode):
    """Active while a model with sharded parameters runs: see the module's text."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        register_missing_rules()
        read_whole_numbers()
        self.replicate = Replicator(mesh)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if SequenceShard in types:
            own = _OF_SHARDS.get(func)
            result = None if own is None else own(self.replicate, func, args, kwargs or {})
            if result is not None:
                return result
            with self:  # what is computed of this rank's positions may be sharded, too
                return SequenceShard.__torch_function__(func, types, args, kwargs)
        try:
            result = self._run(func, args, kwargs or {})
            if not torch.compiler.is_compiling() and torch.is_inference_mode_enabled():
                remember_inference(result, func, args, kwargs or {})
            return result
        except Exception as error:
            raise_explained(error)
            raise

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is torch.Tensor.backward:
            with self:  # not within it while a function of its own runs; what is computed again must be
                return _backward(*args, **kwargs)
        sharded = _first_sharded(args)
        if sharded is None and kwargs:
            sharded = _first_sharded(kwargs.values())
        changes = (sharded is not None or remembers()) and changes_first(func, args, kwargs)
        if changes and args and is_copy(args[0]):
            return write(self.replicate, func, args, kwargs)
        if sharded is None:
            return func(*args, **kwargs)
        if changes and args and isinstance(args[0], torch.Tensor) and type(args[0]) is not DTensor:
            return func(*tree_map(plain, args), **tree_map(plain, kwargs))  # a plain tensor stays plain
        replicate = self.replicate.for_mesh(sharded.device_mesh)
        own = _SPECIAL.get(func)
        if own is not None and (result := own(replicate, func, args, kwargs)) is not NotImplemented:
            return result
        if func is torch.cat and args:  # an empty cache of keys is a tensor of no dims that fit
            args = ([tensor for tensor in args[0] if tensor.shape != (0,)], *args[1:])
        if _has_whole(args) or _has_whole(kwargs.values()):
            args, kwargs = tree_map(
                lambda leaf: replicate(leaf) if isinstance(leaf, torch.Tensor) else leaf, (args, kwargs)
            )
        try:
            result = func(*args, **kwargs)
            if changes and args and isinstance(args[0], DTensor):  # not the lists of `torch._foreach_mul_`
                place_gradient(args[0], func)
            return combined(result)
        except (NotImplementedError, RuntimeError, IndexError) as error:
            if isinstance(error, OF_THE_MACHINE) or (changes and not isinstance(args[0], torch.Tensor)):
                raise
            run = write if changes else on_whole_tensors  # what is wrong anyway fails again here
            result = remember_views(run(replicate, func, args, kwargs), args[0] if args else None)
            _warn_once(getattr(func, "__name__", str(func)), str(error))
            return result


def _backward(loss: Any, gradient: Any = None, *args: Any, **kwargs: Any) -> None:
    run_backward(plain(loss), plain(gradient), *args, **kwargs)


def _gradients(replicate: Replicator, func: Any, args: Any, kwargs: Any) -> Any:
    """`torch.autograd.grad`: of whole outputs, for the very tensors that are asked for and no replicas."""
    arguments = dict(zip(signature(func).parameters, args, strict=False)) | kwargs
    whole = {name: tree_map(plain, arguments.get(name)) for name in ("outputs", "grad_outputs")}
    return func(**arguments | whole)


def _first_sharded(values: Any) -> DTensor | None:
    for value in values:
        if type(value) is DTensor:
            return value
        if type(value) in (list, tuple) and (sharded := _first_sharded(value)) is not None:
            return sharded
    return None


def _has_whole(values: Any) -> bool:
    """Whether a tensor that is none of a mesh is among the arguments of a torch function (which knows lists only)."""
    for value in values:
        if isinstance(value, torch.Tensor):
            if not isinstance(value, DTensor):
                return True
        elif isinstance(value, list | tuple) and _has_whole(value):
            return True
    return False


@lru_cache(maxsize=256)
def _warn_once(name: str, error: str) -> None:
    first_line = (error.strip() or "no reason given").splitlines()[0]
    log.warning("%s does not run on sharded tensors and runs whole on every rank (%s)", name, first_line[:200])


def _attention(replicate: Replicator, func: Any, args: Any, kwargs: Any) -> Any:
    """Scaled dot product attention on each rank's own heads: q, k, v are [..., heads, s, d], sharded over heads."""
    return _by_heads(replicate, dict(zip(ATTENTION_ARGUMENTS, args, strict=False)) | kwargs)


def _by_heads(
    replicate: Replicator, arguments: dict[str, Any], see: Callable[[Any], Any] = lambda part: part
) -> DTensor:
    """Attention on each rank's own heads.

    Args:
        see: makes of this rank's queries, keys and values what attention is called with.
    """
    q = replicate(arguments.pop("query"))
    mask = arguments.pop("attn_mask", None)
    key, value = arguments.pop("key"), arguments.pop("value")
    local, placement = _own_heads(replicate, q, key, value, bool(arguments.get("enable_gqa")))
    if mask is not None:
        mask = replicate(mask)
        mask_placement: Any = Replicate()
        if placement != Replicate():
            mask_dim = mask.dim() - q.dim() + placement.dim
            if mask_dim >= 0 and mask.shape[mask_dim] > 1:
                mask_placement = Shard(mask_dim)
        mask = mask.redistribute(placements=[mask_placement]).to_local()
    with own_stream(q.redistribute(placements=[placement])) if arguments.get("dropout_p") else nullcontext():
        if arguments.get("enable_gqa"):
            query, *keys_and_values = local
            local = [query, *with_heads_for_kernels(query, keys_and_values[0], keys_and_values[1], mask)]
        attend: Any = F.scaled_dot_product_attention  # or what stands in its place for the time of a step
        out = attend(*map(see, local), attn_mask=mask, **arguments)
        out = out.local if isinstance(out, SequenceShard) else out
    return DTensor.from_local(out, replicate.mesh, [placement], run_check=False)


def _attention_of_shards(replicate: Replicator, func: Any, args: Any, kwargs: Any) -> Any:
    """As `_attention`, where sequences are sharded, too: cp is asked with shards of own heads. None: they are not."""
    arguments = dict(zip(ATTENTION_ARGUMENTS, args, strict=False)) | kwargs
    lead, dim = arguments["query"], arguments["query"].dim() - 2
    for name in HEADS:
        item = arguments[name]
        if not isinstance(item, SequenceShard) or (item.sequence_dim, item.positions) != (dim, lead.positions):
            return None
        arguments[name] = item.local
    sharded = _first_sharded(arguments[name] for name in HEADS)
    if sharded is None:
        return None
    replicate = replicate.for_mesh(sharded.device_mesh)
    arguments["attn_mask"] = plain(arguments.get("attn_mask"))

    def shard(part: torch.Tensor) -> SequenceShard:
        return SequenceShard.of(part, dim, lead.positions, lead.group)

    return shard(_by_heads(replicate, arguments, shard))


def _shards_on_whole_tensors(replicate: Replicator, func: Any, args: Any, kwargs: Any) -> Any:
    """As `on_whole_tensors`, where sequences stay sharded."""

    def whole(leaf: Any) -> Any:
        if isinstance(leaf, SequenceShard):
            return SequenceShard.of(plain(leaf.local), leaf.sequence_dim, leaf.positions, leaf.group)
        return plain(leaf)

    return func(*tree_map(whole, args), **tree_map(whole, kwargs))


def _document_attention(replicate: Replicator, func: Any, args: Any, kwargs: Any) -> Any:
    """Attention within documents on each rank's own heads, as `_attention`; documents are the same on every rank."""
    query, key, value, documents = args
    local, placement = _own_heads(replicate, replicate(query), key, value, grouped=True)
    documents = plain(documents)  # the tensor itself: what is read of it is read once
    if placement == Shard(0) and len(documents) > 1:
        documents = replicate(documents).redistribute(placements=[placement]).to_local()
    return DTensor.from_local(func(*local, documents, **kwargs), replicate.mesh, [placement], run_check=False)


def _own_heads(replicate: Replicator, q: DTensor, key: Any, value: Any, grouped: bool) -> tuple[list[Any], Any]:
    """This rank's parts of queries, keys and values, plain, and how the whole is placed: over heads if they are.

    Args:
        grouped: whether there may be fewer heads of keys than of queries.
    """
    k: Any = replicate(key)
    v: Any = replicate(value)
    head_dim = q.dim() - 3
    heads, kv_heads, ranks = q.shape[head_dim], k.shape[head_dim], replicate.mesh.size()
    own_heads = q.placements[0] == Shard(head_dim) and heads % ranks == 0
    grouped = own_heads and grouped
    if own_heads and kv_heads % ranks == 0:
        placement: Any = Shard(head_dim)
    elif grouped and (part := _shared_heads(heads, kv_heads, replicate.mesh)) is not None:
        placement = Shard(head_dim)
        k, v = (_part_of_whole(item, head_dim, part) for item in (k, v))
    elif any(item.placements[0] == Shard(0) for item in (q, k, v)) and q.shape[0] % ranks == 0:
        placement = Shard(0)
    else:
        placement = Replicate()
    local = [
        item.redistribute(placements=[placement]).to_local() if isinstance(item, DTensor) else item
        for item in (q, k, v)
    ]
    return local, placement


def _shared_heads(heads: int, kv_heads: int, mesh: DeviceMesh) -> tuple[int, int] | None:
    """(first, how many) of the key/value heads that the query heads of this rank use; None if that is no whole part."""
    own, group = heads // mesh.size(), heads // kv_heads
    if own % group and group % own:
        return None
    return mesh.get_local_rank() * own // group, max(own // group, 1)


def _part_of_whole(tensor: DTensor, dim: int, part: tuple[int, int]) -> torch.Tensor:
    """A part of a whole tensor, plain; the other ranks use other parts, so gradients of the whole are added up."""
    whole = tensor.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
    return whole.narrow(dim, *part)


def _reshape(replicate: Replicator, func: Any, args: Any, kwargs: Any) -> Any:
    """A change of shape that the parts of an unevenly sharded tensor do not survive is made on the whole tensor."""
    tensor = args[0]
    if isinstance(tensor, DTensor) and not _parts_survive(tensor, func, args[1:], kwargs):
        whole = tensor.redistribute(placements=[Replicate()] * tensor.device_mesh.ndim)
        return remember_views(func(whole, *args[1:], **kwargs), tensor)
    return func(*args, **kwargs)


def _parts_survive(tensor: DTensor, func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a change of shape leaves a sharded dim in front of a group of dims that can be sharded as evenly.

    Looked at beforehand: an attempt that fails would be an operation that selective recomputation counts.
    """
    if tensor.device_mesh.ndim > 1 or not isinstance(tensor.placements[0], Shard):
        return True
    dim, ranks = tensor.placements[0].dim % tensor.dim(), tensor.device_mesh.size()
    shape = func(torch.empty(tensor.shape, device="meta"), *args, **kwargs).shape
    if shape[: dim + 1] == tensor.shape[: dim + 1] or tensor.numel() == 0:
        return True
    before = math.prod(tensor.shape[:dim])
    place = next((i for i in range(len(shape)) if math.prod(shape[:i]) == before and shape[i] > 1), None)
    if place is None:
        return False
    return shape[place] == tensor.shape[dim] or (shape[place] % ranks == 0 and tensor.shape[dim] % ranks == 0)


def _look_up(replicate: Replicator, func: Any, args: Any, kwargs: Any) -> Any:
    """An embedding whose rows are sharded: each rank looks up its own ones, and the results are to be added up.

    torch's rules know this of the forward pass alone: in the backward pass every rank makes the gradient of the whole
    table, and keeps its part.
    """
    names = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
    arguments = dict(zip(names, args, strict=False)) | kwargs
    indices, weight, padding = arguments["input"], arguments["weight"], arguments.get("padding_idx")
    if not isinstance(weight, DTensor) or weight.placements != (Shard(0),):
        return NotImplemented
    count, ranks = weight.shape[0], weight.device_mesh.size()
    of_others = any(arguments.get(name) for name in ("max_norm", "scale_grad_by_freq", "sparse"))
    if of_others or -(-count // ranks) * (ranks - 1) >= count:  # else the last ranks hold no rows
        return NotImplemented
    indices = plain(indices)
    assert_on_device(((indices >= 0) & (indices < count)).all(), f"an index that is no row of {count}")
    held = local_index(weight)[0]
    elsewhere = (indices < held.start) | (indices >= held.stop)
    rows = (indices - held.start).masked_fill(elsewhere, 0)
    if padding is not None:
        padding = (padding + count if padding < 0 else padding) - held.start
    local = func(rows, weight.to_local(), padding if padding in range(held.stop - held.start) else None)
    found = local.masked_fill(elsewhere.unsqueeze(-1), 0)
    return DTensor.from_local(found, weight.device_mesh, [Partial()], run_check=False)


def _convolution(replicate: Replicator, func: Any, args: Any, kwargs: Any) -> Any:
    """A convolution whose weight is sharded by the channels that it returns: each rank computes its own."""
    names = ["input", "weight", "bias", "stride", "padding", "dilation", "groups"]
    transposed = func in _TRANSPOSED_CONVOLUTIONS
    if transposed:
        names[5:] = ["output_padding", "groups", "dilation"]
    arguments = dict(zip(names, args, strict=False)) | kwargs
    weight, bias = arguments["weight"], arguments.get("bias")
    mesh, groups, along = replicate.mesh, arguments.get("groups", 1), int(transposed)
    sharded = isinstance(weight, DTensor) and weight.placements == (Shard(along),)
    if not sharded or (groups > 1 and (transposed or groups % mesh.size())):
        return on_whole_tensors(replicate, func, args, kwargs)
    source = replicate(arguments["input"]).redistribute(placements=[Replicate()])
    local = source.to_local(grad_placements=[Partial()])
    dim = local.dim() - weight.dim() + 1
    if groups > 1:
        arguments["groups"] = groups // mesh.size()
        local = local.chunk(mesh.size(), dim)[mesh.get_local_rank()]
    if bias is not None:
        bias = replicate(bias).redistribute(placements=[Shard(0)]).to_local()
    out = func(**arguments | {"input": local, "weight": weight.to_local(), "bias": bias}).contiguous()
    shape = list(out.shape)
    shape[dim] = weight.shape[along]
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(out, mesh, [Shard(dim)], run_check=False, shape=torch.Size(shape), stride=stride)


def _on_first_whole(replicate: Replicator, func: Any, args: Any, kwargs: Any) -> Any:
    """Values that leave torch: of the whole tensor, not of this rank's part or addend."""
    return func(plain(args[0]), *args[1:], **kwargs)


def _over_all(replicate: Replicator, func: Any, args: Any, kwargs: Any) -> Any:
    """A maximum of all values, with the dims said: torch's rule for its gradient knows no other."""
    if len(args) != 1 or kwargs.keys() & {"dim", "axis"}:
        return NotImplemented
    return combined(func(args[0], tuple(range(args[0].dim())), **kwargs))


def _along(replicate: Replicator, func: Any, args: Any, kwargs: Any) -> Any:
    """A running sum, its dim counted from the first: torch's rule does not know a sharded one counted from the last."""
    if type(args[0]) is not DTensor or (len(args) < 2 and "dim" not in kwargs):
        return NotImplemented
    tensor, dim, *others = args if len(args) > 1 else (*args, kwargs["dim"])
    kwargs = {name: value for name, value in kwargs.items() if name != "dim"}
    return combined(func(tensor, dim + tensor.dim() if -tensor.dim() <= dim < 0 else dim, *others, **kwargs))


def _on_parts(replicate: Replicator, func: Any, args: Any, kwargs: Any) -> Any:
    """A function of single elements for whose gradient torch has no sharding rule, on what each rank holds."""
    tensor = args[0] if args else None
    if type(tensor) is not DTensor or any(placement.is_partial() for placement in tensor.placements):
        return on_whole_tensors(replicate, func, args, kwargs)
    if changes_first(func, args, kwargs):
        return write(replicate, func, args, kwargs)
    out = func(tensor.to_local(), *args[1:], **kwargs)
    where = (tensor.device_mesh, tensor.placements)
    return DTensor.from_local(out, *where, run_check=False, shape=tensor.shape, stride=tensor.stride())


_OF_WHOLE_TENSORS = ("item", "tolist", "numpy", "__float__", "__int__", "__bool__")
_TRANSPOSED_CONVOLUTIONS = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
_CONVOLUTIONS = (F.conv1d, F.conv2d, F.conv3d, *_TRANSPOSED_CONVOLUTIONS)
"""torch's sharding rule for these looks at the batch only: on sharded channels the shapes no longer fit."""

_NORMS_WITH_STATISTICS = (F.batch_norm, torch.batch_norm, F.instance_norm, torch.instance_norm)
"""What these write into running statistics, which are plain, would be lost where DTensor shards those to fit."""

_WITHOUT_GRADIENT = (
    *(F.prelu, F.avg_pool1d, F.avg_pool2d, F.avg_pool3d, torch.prod, torch.Tensor.prod, torch.cumprod),
    *(torch.Tensor.cumprod, torch.logcumsumexp, torch.Tensor.logcumsumexp),
)
"""What torch has no sharding rule for in the backward pass, or a wrong one."""

_OF_ELEMENTS = (F.hardswish, F.hardsigmoid, F.relu6, F.hardtanh, F.logsigmoid, F.hardshrink)

_OF_SHARDS: dict[Any, Callable] = {
    F.scaled_dot_product_attention: _attention_of_shards,
    F.multi_head_attention_forward: _shards_on_whole_tensors,
}
"""What cp answers if it is asked with plain tensors of this rank's positions."""

_SPECIAL: dict[Any, Callable] = {
    F.scaled_dot_product_attention: _attention,
    document_attention: _document_attention,
    F.cross_entropy: cross_entropy,
    **dict.fromkeys(POINTWISE_LOSSES, pointwise_loss),
    **dict.fromkeys(OF_WHOLE_SAMPLES, on_whole_tensors),
    F.embedding: _look_up,
    torch.autograd.grad: _gradients,
    **dict.fromkeys((torch.amax, torch.amin, torch.Tensor.amax, torch.Tensor.amin), _over_all),
    **dict.fromkeys((torch.cumsum, torch.Tensor.cumsum), _along),
    **dict.fromkeys(_WITHOUT_GRADIENT, on_whole_tensors),
    **dict.fromkeys(_OF_ELEMENTS, _on_parts),
    F.multi_head_attention_forward: on_whole_tensors,
    F.group_norm: on_whole_tensors,  # torch has no sharding rule for its gradient
    **dict.fromkeys(_NORMS_WITH_STATISTICS, on_whole_tensors),
    **dict.fromkeys(_CONVOLUTIONS, _convolution),
    torch.Tensor.__setitem__: set_item,
    **dict.fromkeys((getattr(torch.Tensor, name) for name in WRITES_BY_INDEX), write),
    torch.Tensor.view: _reshape,
    torch.Tensor.reshape: _reshape,
    torch.Tensor.unflatten: _reshape,
    torch.Tensor.flatten: _reshape,
    torch.reshape: _reshape,
    torch.unflatten: _reshape,
    torch.flatten: _reshape,
    **dict.fromkeys(RANDOM_FUNCTIONS, run_random),
    **dict.fromkeys((getattr(torch.Tensor, name) for name in _OF_WHOLE_TENSORS), _on_first_whole),
}
