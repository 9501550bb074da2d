"""What the operators of a recorded pass cost: products, bytes, kernels, and what is alive when.

The pass runs on shapes alone. Bytes are those of the recorded batch; two passes with different batches tell what one
sequence costs (see `assembly`).
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from autolaunch_strategies.planner.compiled import SHAPES_ALONE, JointPass, Kernel, kernel_of
from autolaunch_strategies.planner.profile import Attention, MatMul
from autolaunch_strategies.planner.sharded_dims import GATHERED, REDUCED, SAME, sharded_outputs, sharded_product
from autolaunch_strategies.torch_private.tracing import JOINS_SHARDED_DIMS, storage_key
from autolaunch_strategies.tracing.recorder import Observer, Operation
from autolaunch_strategies.training.save_groups import SAVE_GROUPS

_NO_KERNEL = {
    "detach", "alias", "lift_fresh", "_unsafe_view", "_reshape_alias", "empty", "empty_like", "empty_strided",
    "new_empty", "new_empty_strided", "set_", "resize_",
}  # fmt: skip
"""Operators that compute nothing, next to views."""
_LOOKUPS = {"embedding", "index_select", "gather", "index", "take", "take_along_dim"}
"""Operators that read as much of their first argument as they return."""
_PRODUCTS = {"mm": 0, "addmm": 1, "_addmm_activation": 1, "bmm": 0, "baddbmm": 1}
"""Matrix products, and the place of their left operand."""
_GROUPED = {"_grouped_mm", "_scaled_grouped_mm", "grouped_mm_fallback", "grouped_mm_fallback_backward"}
"""Products of rows that are shared out among experts; the last is that of `transformers`."""
_ATTENTION = {name for name in SAVE_GROUPS["attention"] if name != "_scaled_dot_product_attention_math"}
_SETTLED = itertools.count(-1, -1)
"""Numbers for memory that is used no longer; that in use has positive ones."""
_KEPT = {name for names in SAVE_GROUPS.values() for name in names}


@dataclass
class Tally:
    """What one part of a model cost in one recorded pass. Of a pair of bytes the second is what mp shards."""

    matmuls: list[MatMul] = field(default_factory=list)
    attention: list[tuple[Attention, bool]] = field(default_factory=list)
    """With whether heads are sharded."""
    heads: list[int] = field(default_factory=list)
    """Of every call of scaled_dot_product_attention, whatever computes it."""
    moved: list[float] = field(default_factory=lambda: [0.0, 0.0])
    kernels: list[int] = field(default_factory=lambda: [0, 0])
    saved: dict[int, tuple[int, bool]] = field(default_factory=dict)
    """Memory -> (bytes, whether sharded)."""
    gathered: set[int] = field(default_factory=set)
    """Memory of whole inputs of column-wise layers: they are gathered where sequence parallelism shards the rest."""
    made_whole: set[int] = field(default_factory=set)
    """Memory of what is made of outputs of such layers that are gathered (queries, keys and values of one matrix that
    heads don't divide): it is whole there, too."""
    routed_moved: float = 0.0
    """Of `moved`, what the experts of a mixture have moved."""
    backward_moved: list[float] = field(default_factory=lambda: [0.0, 0.0])
    """`moved`, of the backward pass, in which all that runs is charged to the part that is last."""
    backward_kernels: list[int] = field(default_factory=lambda: [0, 0])
    backward_routed_moved: float = 0.0
    routed_saved: dict[int, int] = field(default_factory=dict)
    """Of `saved`, what they have made: memory -> bytes."""
    casts: set[str] = field(default_factory=set)
    """Names of parameters of which autocast made a copy."""
    selective: list[float] = field(default_factory=lambda: [0.0, 0.0])
    exchanges: int = 0
    exchanged: float = 0.0
    """Bytes of all exchanges, as all-reduces: a gather counts half."""
    operators: list[Any] = field(default_factory=list)
    """What ran, with shapes: parts that ran the same are of one kind."""

    def gathered_bytes(self) -> int:
        """Bytes of saved activations that sequence parallelism leaves whole."""
        return sum(size for key, (size, sharded) in self.saved.items() if key in self.gathered and not sharded)

    def whole_bytes(self) -> int:
        """Bytes of saved activations that are made of what was gathered behind a column-wise layer."""
        return sum(size for key, (size, sharded) in self.saved.items() if key in self.made_whole and not sharded)

    def settle(self) -> None:
        """Tell what is saved from what will be in the same memory, once that is free."""
        settled = {key: next(_SETTLED) for key in self.saved if key >= 0}
        self.saved = {settled.get(key, key): value for key, value in self.saved.items()}
        self.routed_saved = {settled.get(key, key): value for key, value in self.routed_saved.items()}
        self.gathered = {settled.get(key, key) for key in self.gathered}
        self.made_whole = {settled.get(key, key) for key in self.made_whole}

    def saved_bytes(self) -> tuple[int, int]:
        """Bytes of saved activations: (all of them, those that mp shards)."""
        sizes = list(self.saved.values())
        return sum(size for size, _ in sizes), sum(size for size, sharded in sizes if sharded)


class Tape(Observer):
    """Follows a pass: charges what runs to `tally`, and writes down in `events` what is allocated and freed."""

    def __init__(self) -> None:
        self.tally = Tally()
        self.backward = False
        """In a backward pass memory and sharding are followed, and bytes and kernels counted by themselves."""
        self.quiet = False
        self.in_experts = False
        """Whether the experts of a mixture are running."""
        self.joins = False
        """Whether changes of shape are those of a product, see `joining`."""
        self._unseen = False
        """Memory that is made now is registered later."""
        self.events: list[tuple[int, bool, int]] = []
        """(bytes, whether sharded, its own place) of each allocation; when it is freed (the same negative, the place of
        the allocation)."""
        self.for_weights: set[int] = set()
        """Places in `events` of inputs and output gradients of linear layers: gradients of weights are made of them."""
        self.parameters: dict[int, str] = {}
        """Memory of parameters and buffers -> name."""
        self.used: dict[str, list[Tally]] = {}
        """Parameter -> the tallies of the parts that use it."""
        self.head_counts: set[int] = set()
        """Into how many parts views cut dims that mp shards."""
        self.joint: JointPass | None = None
        """Of the block that is running."""
        self.reads: dict[str, set[int]] = {}
        """Of what is in `watched`, what was read: name -> places."""
        self.watched: dict[int, tuple[str, int]] = {}
        """Memory of which it is asked whether anything reads it -> the name of who returned it, and at which place."""
        self._alive: dict[int, tuple[weakref.ref, int, bool, int]] = {}
        self._dims: dict[int, dict[Any, int]] = {}
        self._made_whole: set[int] = set()
        """Memory that is made of what was gathered behind a column-wise layer, up to a row-wise one."""
        self._routed: set[int] = set()
        """Memory that the experts of a mixture have made."""
        self._casts: set[int] = set()
        """Memory of the copies that autocast made of parameters."""

    # --- memory ---

    def add_state(self, name: str, tensor: torch.Tensor, dim: int | None) -> None:
        """Make a parameter or buffer known, with the dim along which mp shards it; it is no activation."""
        self.parameters[storage_key(tensor)] = name
        if dim is not None:
            self.shard(tensor, dim)

    def shard(self, tensor: torch.Tensor, dim: int) -> None:
        """From here on mp shards this tensor."""
        self._dims.setdefault(storage_key(tensor), {})[_window(tensor)] = dim

    def dim_of(self, tensor: torch.Tensor) -> int | None:
        """Along which dim mp shards a tensor."""
        dims = self._dims.get(storage_key(tensor))
        return dims.get(_window(tensor)) if dims else None

    def bytes_of(self, tensor: torch.Tensor) -> tuple[int, bool]:
        """(bytes of the memory that a tensor is in, whether that is sharded)."""
        entry = self._alive.get(storage_key(tensor))
        return (entry[1], entry[2]) if entry else (tensor.untyped_storage().nbytes(), False)

    def _register(self, tensor: torch.Tensor, sharded: bool) -> None:
        storage, key = tensor.untyped_storage(), storage_key(tensor)
        if key in self._alive or key in self.parameters:
            return
        size, born = storage.nbytes(), len(self.events)
        self._made_whole.discard(key)
        if self.in_experts:
            self._routed.add(key)
        if not self.backward:  # what was saved here before is gone: no backward pass will come to it
            self.tally.saved.pop(key, None)
            self.tally.routed_saved.pop(key, None)
            self.tally.made_whole.discard(key)

        def freed(_: Any) -> None:
            if (entry := self._alive.pop(key, None)) is not None:
                self._dims.pop(key, None)
                self._routed.discard(key)
                self._casts.discard(key)
                self.watched.pop(key, None)
                self.events.append((-size, entry[2], born))

        self._alive[key] = (weakref.ref(storage, freed), size, sharded, born)
        self.events.append((size, sharded, born))

    def _gather(self, tensor: torch.Tensor) -> None:
        """From here on what is in a tensor's memory is whole: its parts have been gathered into other memory."""
        key = storage_key(tensor)
        entry = self._alive.get(key)
        if entry is not None and entry[2]:
            storage, size, _, born = entry
            self._alive[key] = storage, size, False, born
            here = len(self.events)
            self.events += [(-size, True, here), (size, False, here)]
            if self.joint is not None:
                self.joint.gathered(born)

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """A hook for what autograd saves."""
        key = storage_key(tensor)
        if key not in self.parameters and key not in self.tally.saved:
            self.tally.saved[key] = self.bytes_of(tensor)
            if key in self._routed:
                self.tally.routed_saved[key] = self.tally.saved[key][0]
        return tensor

    def value_of(self, tensor: torch.Tensor) -> int | None:
        """The number of the memory that a tensor is in, which no other has had; None for parameters and the like."""
        entry = self._alive.get(storage_key(tensor))
        return entry[3] if entry else None

    def _note_passes(
        self,
        name: str,
        kernel: Kernel,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        arguments: Any = None,
    ) -> None:
        """Note an operator in `joint`.

        Args:
            arguments: all that it was called with besides tensors.
        """
        assert self.joint is not None
        if name in SHAPES_ALONE:
            inputs = ()
        read = [number for tensor in inputs if (number := self.value_of(tensor)) is not None]
        made = [
            (number, size, sharded, storage_key(tensor) in self._routed)
            for tensor in outputs
            if (number := self.value_of(tensor)) is not None
            for size, sharded in [self.bytes_of(tensor)]
        ]
        of_all = sum(_size(tensor) for tensor in inputs)
        if self.backward:
            self.joint.backward(kernel, read, made, of_all)
            return
        seen = [(self.value_of(tensor) or storage_key(tensor), _window(tensor), tensor.dtype) for tensor in inputs]
        call = (name, tuple(seen), repr(arguments))
        self.joint.forward(name, kernel, read, made, of_all, call)

    def are_read(self, tensors: Iterable[torch.Tensor]) -> None:
        """Note it, if that is asked."""
        for tensor in tensors:
            if (asked := self.watched.pop(storage_key(tensor), None)) is not None:
                self.reads.setdefault(asked[0], set()).add(asked[1])

    @contextmanager
    def unheard(self) -> Iterator[None]:
        """Within it nothing is charged; memory is followed."""
        before, self.quiet = self.quiet, True
        try:
            yield
        finally:
            self.quiet = before

    @contextmanager
    def unregistered(self) -> Iterator[None]:
        """Within it nothing is charged, and memory that is made is registered later."""
        with self.unheard():
            self._unseen = True
            try:
                yield
            finally:
                self._unseen = False

    @contextmanager
    def joining(self) -> Iterator[None]:
        """Within it a function of torch joins dims, which leaves sharded what code of a model that does it would not.

        `views` makes a tensor whole whose sharded dim that code joins to dims in front of it.
        """
        before, self.joins = self.joins, True
        try:
            yield
        finally:
            self.joins = before

    # --- operators ---

    @property
    def _charging(self) -> bool:
        return not self.quiet and not self.backward

    def operator(self, operation: Operation) -> None:
        inputs, outputs = operation.inputs, operation.outputs
        if self.watched and not self.quiet:
            self.are_read(inputs)
        dims = {id(tensor): dim for tensor in inputs if (dim := self.dim_of(tensor)) is not None} if self._dims else {}
        if self._charging:
            self._note_users(inputs)
            if operation.name == "_to_copy" and (name := self.parameters.get(storage_key(inputs[0]))) is not None:
                self.tally.casts.add(name)
                self._casts.add(storage_key(outputs[0]))
        exchange = self._shard_outputs(operation, dims)
        if exchange == GATHERED and operation.operator.is_view and not self.backward:
            self._gather(outputs[0])
        if not self._unseen:
            for tensor in outputs:
                self._register(tensor, self.dim_of(tensor) is not None)
            if not self.backward and exchange != REDUCED:
                is_made_whole = exchange == GATHERED and not _is_product(operation.name)
                self._follow_whole(inputs, outputs, is_made_whole)
            if self.joint is not None and not self.quiet and not _is_no_kernel(operation):
                pointwise = torch.Tag.pointwise in operation.operator.tags
                arguments = [item for item in operation.args if not isinstance(item, torch.Tensor)], operation.kwargs
                kernel = kernel_of(operation.name, pointwise, _multiplies(operation.name))
                self._note_passes(operation.name, kernel, inputs, outputs, arguments)
        if not self._charging:
            if not self.quiet and not _is_no_kernel(operation):
                self._charge_backward(operation, bool(dims))
            return
        if exchange:
            self.tally.exchanges += 1
            self.tally.exchanged += (
                sum(_size(tensor) for tensor in outputs)
                if exchange == REDUCED
                else sum(_size(tensor) for tensor in inputs if id(tensor) in dims) / 2
            )
        if not _is_no_kernel(operation):
            self._charge(operation, bool(dims))

    def _follow_whole(
        self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], is_made_whole: bool
    ) -> None:
        """Note which outputs are made of what was gathered."""
        if is_made_whole or any(storage_key(tensor) in self._made_whole for tensor in inputs):
            for tensor in outputs:
                if self.dim_of(tensor) is None:
                    self._made_whole.add(storage_key(tensor))
                    self.tally.made_whole.add(storage_key(tensor))

    def _note_users(self, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            parameter = self.parameters.get(storage_key(tensor))
            if parameter is not None:
                users = self.used.setdefault(parameter, [])
                if not users or users[-1] is not self.tally:
                    users.append(self.tally)

    def _shard_outputs(self, operation: Operation, dims: dict[int, int]) -> str:
        """Note what is sharded of the outputs, and charge matrix products; what ranks exchange.

        Args:
            dims: `id` of a sharded input -> along which dim.
        """
        name, inputs, outputs = operation.name, operation.inputs, operation.outputs
        if _is_product(name):
            return self._product(operation, dims)
        if not dims:
            return SAME
        if name == "embedding":
            return REDUCED
        pointwise = torch.Tag.pointwise in operation.operator.tags
        joins = JOINS_SHARDED_DIMS and (self.joins or self.backward)
        output_dims, exchange = sharded_outputs(name, pointwise, operation.args, dims, outputs, joins)
        whole = inputs[0].shape[dims[id(inputs[0])]] if id(inputs[0]) in dims else 0
        for tensor, dim in zip(outputs, output_dims, strict=False):
            if dim is not None:
                self.shard(tensor, dim)
                if not self.backward and operation.operator.is_view and tensor.shape[dim] < whole:
                    self.head_counts.add(tensor.shape[dim])
        return exchange

    def _charge(self, operation: Operation, reads_sharded: bool) -> None:
        tally, name, inputs, outputs = self.tally, operation.name, operation.inputs, operation.outputs
        sharded = reads_sharded or any(self.dim_of(tensor) is not None for tensor in outputs)
        tally.operators.append((operation.operator, *(tensor.shape for tensor in (*inputs, *outputs))))
        tally.kernels[0] += 1
        tally.kernels[1] += sharded
        if name in _KEPT:
            for tensor in outputs:
                tally.selective[0] += _size(tensor)
                tally.selective[1] += _size(tensor) if self.dim_of(tensor) is not None else 0
        if _is_product(name):
            return
        if name == "convolution":
            self._convolution(operation.args, outputs[0])
            return
        if name in _ATTENTION:
            query, key, value = operation.args[:3]
            names = [argument.name for argument in operation.operator._schema.arguments]
            causal = bool(dict(zip(names, operation.args, strict=False)).get("is_causal", False))
            self.attention(query, key, value, causal)
            return
        moved = _moved(operation)
        tally.moved[0] += moved
        tally.routed_moved += moved if self.in_experts else 0
        tally.moved[1] += moved if sharded else 0

    def _charge_backward(self, operation: Operation, reads_sharded: bool) -> None:
        tally, name = self.tally, operation.name
        sharded = reads_sharded or any(self.dim_of(tensor) is not None for tensor in operation.outputs)
        tally.backward_kernels[0] += 1
        tally.backward_kernels[1] += sharded
        if _multiplies(name):
            return
        moved = _moved(operation)
        tally.backward_moved[0] += moved
        tally.backward_moved[1] += moved if sharded else 0
        tally.backward_routed_moved += moved if self.in_experts else 0

    def attention(self, query: Any, key: Any, value: Any, causal: bool) -> None:
        """Charge one call of fused attention; q, k, v are [..., heads, s, d]."""
        heads = query.shape[-3] if query.dim() > 2 else 1
        key_heads = key.shape[-3] if key.dim() > 2 else 1
        width = (query.shape[-1] + value.shape[-1]) // 2
        count = query.numel() // max(1, heads * query.shape[-2] * query.shape[-1])
        sharded = self.dim_of(query) is not None
        if query.shape[-2] == key.shape[-2]:
            call = Attention(heads, key_heads, width, query.shape[-2], causal, count)
            self.tally.attention.append((call, sharded))
            return
        which = "count" if sharded else ""
        self.tally.matmuls += [
            MatMul(query.shape[-2], query.shape[-1], key.shape[-2], heads * count, which),
            MatMul(query.shape[-2], key.shape[-2], value.shape[-1], heads * count, which),
        ]

    def fused_attention(
        self, query: Any, key: Any, value: Any, causal: bool, result: torch.Tensor, sums: torch.Tensor
    ) -> None:
        """Charge a kernel for attention that is no operator of the recorded pass: its output and one sum per row."""
        dim = self.dim_of(query)
        sharded = dim is not None
        for tensor in (result, sums):
            if dim is not None:
                self.shard(tensor, dim)
            self._register(tensor, sharded)
        if not self.backward:
            self._follow_whole((query, key, value), (result, sums), is_made_whole=False)
        if self.joint is not None:
            self._note_passes("attention", Kernel.PRODUCT, (query, key, value), (result, sums))
        if self.backward:
            return
        self.tally.operators.append(("attention", query.shape, key.shape, causal))
        self.tally.kernels[0] += 1
        self.tally.kernels[1] += sharded
        size = _size(result) + _size(sums)
        self.tally.selective[0] += size
        self.tally.selective[1] += size if sharded else 0
        self.attention(query, key, value, causal)

    def fused_backward(self, saved: Sequence[torch.Tensor | None], made: Sequence[torch.Tensor]) -> None:
        """Charge the backward pass of such a kernel, which reads what is saved."""
        self.tally.backward_kernels[0] += 1
        self.tally.backward_kernels[1] += any(self.dim_of(tensor) is not None for tensor in made)
        if self.joint is not None:
            self._note_passes("attention", Kernel.PRODUCT, [tensor for tensor in saved if tensor is not None], made)

    def _product(self, operation: Operation, dims: dict[int, int]) -> str:
        """Charge a matrix product and note what is sharded of its result; what ranks exchange for it."""
        name, result = operation.name, operation.outputs[0]
        place = _PRODUCTS.get(name, 0)
        left, right = operation.args[place : place + 2]
        if name in _GROUPED:
            self._grouped(left, right)
            return GATHERED if dims else SAME
        left_dim, right_dim = dims.get(id(left)), dims.get(id(right))
        if name == "linear":  # [..., inner] x [columns, inner]
            which, dim, exchange = sharded_product(
                None if left_dim is None else int(left_dim == left.dim() - 1),
                None if right_dim is None else 1 - right_dim,
                False,
            )
            dim = None if dim is None else result.dim() - 1 if dim == 1 else left_dim
            shape = (left.numel() // left.shape[-1], left.shape[-1], right.shape[0], 1)
        else:
            batched = left.dim() == 3
            which, dim, exchange = sharded_product(left_dim, right_dim, batched)
            shape = (left.shape[-2], left.shape[-1], right.shape[-1], left.shape[0] if batched else 1)
        if dim is not None:
            self.shard(result, dim)
        if self.backward and name == "mm" and not any(self._is_weight(tensor) for tensor in (left, right)):
            self.for_weights.update(number for item in (left, right) if (number := self.value_of(item)) is not None)
        if self._charging and all(shape):
            if which == "columns" and left_dim is None:
                self.tally.gathered.add(storage_key(left))
            self.tally.matmuls.append(
                MatMul(
                    *shape,
                    which,
                    name in _KEPT,
                    left_gradient=left.requires_grad,
                    right_gradient=right.requires_grad,
                    in_fp32=left.dtype == torch.float32,
                )
            )
        return exchange

    def _is_weight(self, tensor: torch.Tensor) -> bool:
        key = storage_key(tensor)
        return key in self.parameters or key in self._casts

    def _grouped(self, left: torch.Tensor, right: torch.Tensor) -> None:
        """Rows [n, inner] that are shared out among experts [e, inner, columns]."""
        if not self._charging or right.dim() != 3 or left.dim() != 2:
            return
        experts = right.shape[0]
        self.tally.matmuls.append(
            MatMul(max(1, left.shape[0] // experts), right.shape[1], right.shape[2],
                   left.shape[0] / max(1, left.shape[0] // experts), kept=False, routed=True,
                   in_fp32=left.dtype == torch.float32, grouped=left.dtype == torch.bfloat16)
        )  # fmt: skip

    def _convolution(self, args: Any, result: torch.Tensor) -> None:
        image, weight, transposed, groups = args[0], args[1], args[6], args[8]
        large = image if transposed else result
        rows = large.shape[0] * large.shape[2:].numel()
        inner = weight.shape[1] * weight.shape[2:].numel()
        self.tally.matmuls.append(MatMul(rows, inner, weight.shape[0] // groups, groups, kept=False))


def _moved(operation: Operation) -> int:
    """Bytes that an operator reads and writes which does not multiply."""
    inputs, outputs = operation.inputs, operation.outputs
    if operation.name in _LOOKUPS:
        return 2 * sum(_size(tensor) for tensor in outputs) + sum(_size(tensor) for tensor in inputs[1:])
    looked_at = () if operation.name in SHAPES_ALONE else inputs
    read = sum(_size(tensor) for tensor in {id(item): item for item in looked_at}.values())
    return read + sum(_size(tensor) for tensor in outputs)


def _is_no_kernel(operation: Operation) -> bool:
    return getattr(operation.operator, "is_view", False) or operation.name in _NO_KERNEL


def _multiplies(name: str) -> bool:
    """Whether an operator, of either pass, is a product, attention or a convolution."""
    return _is_product(name) or "attention" in name or "convolution" in name


def _is_product(name: str) -> bool:
    return name in _PRODUCTS or name in _GROUPED or name == "linear"


def _window(tensor: torch.Tensor) -> Any:
    return tensor.storage_offset(), tuple(tensor.shape), tuple(tensor.stride())


def _size(tensor: torch.Tensor) -> int:
    """Bytes that reading it takes: what is expanded is read once."""
    count = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if stride:
            count *= size
    return (count if tensor.numel() else 0) * tensor.element_size()
