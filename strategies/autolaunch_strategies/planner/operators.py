"""What the operators of a recorded pass cost: products, bytes, kernels, and what is alive when.

The pass runs on shapes alone. Bytes are those of the recorded batch; two passes with different batches tell what one
sequence costs (see `module_profile`).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from autolaunch_strategies.planner.division import GATHERED, REDUCED, sharded_outputs, sharded_product
from autolaunch_strategies.planner.profile import Attention, MatMul
from autolaunch_strategies.torch_private.tracing import storage_key
from autolaunch_strategies.training.recompute import SAVE_GROUPS

_NO_KERNEL = {
    "detach", "alias", "lift_fresh", "_unsafe_view", "_reshape_alias", "empty", "empty_like", "empty_strided",
    "new_empty", "new_empty_strided", "set_", "resize_",
}  # fmt: skip
"""Operators that compute nothing, next to views."""
_LOOKUPS = {"embedding", "index_select", "gather", "index", "take", "take_along_dim"}
"""Operators that read as much of their first argument as they return."""
_PRODUCTS = {"mm": 0, "addmm": 1, "_addmm_activation": 1, "bmm": 0, "baddbmm": 1}
"""Matrix products, and the place of their left operand."""
_GROUPED = {"_grouped_mm", "_scaled_grouped_mm", "grouped_mm_fallback"}
"""Products of rows that are shared out among experts; the last is that of `transformers`."""
_ATTENTION = {name for name in SAVE_GROUPS["attention"] if name != "_scaled_dot_product_attention_math"}
_KEPT = {name for names in SAVE_GROUPS.values() for name in names}


@dataclass
class Tally:
    """What one part of a model cost in one recorded pass. Of a pair of bytes the second is what mp divides."""

    matmuls: list[MatMul] = field(default_factory=list)
    attention: list[tuple[Attention, bool]] = field(default_factory=list)
    """With whether heads are divided."""
    heads: list[int] = field(default_factory=list)
    """Of every call of scaled_dot_product_attention, whatever computes it."""
    moved: list[float] = field(default_factory=lambda: [0.0, 0.0])
    kernels: list[int] = field(default_factory=lambda: [0, 0])
    saved: dict[int, tuple[int, bool]] = field(default_factory=dict)
    """Memory -> (bytes, whether divided)."""
    gathered: set[int] = field(default_factory=set)
    """Memory of whole inputs of column-wise layers: they are gathered where sequence parallelism divides the rest."""
    selective: list[float] = field(default_factory=lambda: [0.0, 0.0])
    exchanges: int = 0
    exchanged: float = 0.0
    """Bytes of all exchanges, as all-reduces: a gather counts half."""
    operators: list[Any] = field(default_factory=list)
    """What ran, with shapes: parts that ran the same are of one kind."""

    def gathered_bytes(self) -> int:
        """Of what is saved, what sequence parallelism leaves whole."""
        return sum(size for key, (size, divided) in self.saved.items() if key in self.gathered and not divided)

    def saved_bytes(self) -> tuple[int, int]:
        """(of all, of what is divided)."""
        sizes = list(self.saved.values())
        return sum(size for size, _ in sizes), sum(size for size, divided in sizes if divided)


class Tape(TorchDispatchMode):
    """Follows a pass: charges what runs to `tally`, and writes down in `events` what is allocated and freed."""

    def __init__(self) -> None:
        super().__init__()
        self.tally = Tally()
        self.backward = False
        """In a backward pass only memory and division are followed."""
        self.quiet = False
        self.unseen = False
        """Memory that is made now is registered later."""
        self.events: list[tuple[int, bool, int]] = []
        """(bytes, whether divided, its own place) of each allocation; when it is freed (the same negative, the place of
        the allocation)."""
        self.parameters: dict[int, str] = {}
        """Memory of parameters and buffers -> name."""
        self.used: dict[str, list[Tally]] = {}
        """Parameter -> the tallies of the parts that use it."""
        self.head_counts: set[int] = set()
        """Into how many parts views cut dims that mp divides."""
        self._alive: dict[int, tuple[weakref.ref, int, bool]] = {}
        self._dims: dict[int, dict[Any, int]] = {}

    # --- memory ---

    def add_state(self, name: str, tensor: torch.Tensor, divided: int | None) -> None:
        """Make a parameter or buffer known; it is no activation."""
        self.parameters[storage_key(tensor)] = name
        if divided is not None:
            self.divide(tensor, divided)

    def divide(self, tensor: torch.Tensor, dim: int) -> None:
        """From here on mp divides this tensor."""
        self._dims.setdefault(storage_key(tensor), {})[_place(tensor)] = dim

    def dim_of(self, tensor: torch.Tensor) -> int | None:
        """Along which dim mp divides a tensor."""
        known = self._dims.get(storage_key(tensor))
        return known.get(_place(tensor)) if known else None

    def bytes_of(self, tensor: torch.Tensor) -> tuple[int, bool]:
        """(bytes of the memory that a tensor is in, whether that is divided)."""
        found = self._alive.get(storage_key(tensor))
        return (found[1], found[2]) if found else (tensor.untyped_storage().nbytes(), False)

    def _register(self, tensor: torch.Tensor, divided: bool) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._alive or key in self.parameters:
            return
        size = storage.nbytes()

        born = len(self.events)

        def freed(_: Any) -> None:
            if (known := self._alive.pop(key, None)) is not None:
                self._dims.pop(key, None)
                self.events.append((-size, known[2], born))

        self._alive[key] = (weakref.ref(storage, freed), size, divided)
        self.events.append((size, divided, born))

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """A hook for what autograd saves."""
        key = storage_key(tensor)
        if key not in self.parameters:
            self.tally.saved.setdefault(key, self.bytes_of(tensor))
        return tensor

    @contextmanager
    def unheard(self) -> Iterator[None]:
        """Within it nothing is charged; memory is followed."""
        before, self.quiet = self.quiet, True
        try:
            yield
        finally:
            self.quiet = before

    # --- operators ---

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket is getattr(torch.ops.aten, "_grouped_mm", None):
            output = _grouped_result(*args[:2], *args[2:3], **(kwargs or {}))
        else:
            output = func(*args, **(kwargs or {}))
        if func.namespace == "prim":
            return output
        outputs = (
            [output] if isinstance(output, torch.Tensor)
            else [item for item in tree_flatten(output)[0] if isinstance(item, torch.Tensor)]
        )  # fmt: skip
        leaves = tree_flatten((args, kwargs))[0] if kwargs or any(type(arg) in (list, tuple) for arg in args) else args
        given = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        name = func.overloadpacket.__name__
        dims = {id(tensor): dim for tensor in given if (dim := self.dim_of(tensor)) is not None} if self._dims else {}
        divided = bool(dims)
        if not self.quiet and not self.backward:
            for tensor in given:
                used = self.parameters.get(storage_key(tensor))
                if used is not None:
                    users = self.used.setdefault(used, [])
                    if not users or users[-1] is not self.tally:
                        users.append(self.tally)
        if name in _PRODUCTS or name in _GROUPED or name == "linear":
            exchange = self._product(name, args, given, dims, outputs)
        elif dims:
            pointwise = torch.Tag.pointwise in func.tags
            if name == "embedding":
                found: list[int | None] = [None]
                exchange = REDUCED
            else:
                found, exchange = sharded_outputs(name, pointwise, args, dims, outputs)
            for tensor, dim in zip(outputs, found, strict=False):
                if dim is not None:
                    self.divide(tensor, dim)
                    before = given[0].shape[dims[id(given[0])]] if id(given[0]) in dims else 0
                    if not self.backward and func.is_view and tensor.shape[dim] < before:
                        self.head_counts.add(tensor.shape[dim])
        else:
            exchange = ""
        if not self.unseen:
            for tensor in outputs:
                self._register(tensor, self.dim_of(tensor) is not None)
        if self.quiet or self.backward:
            return output
        if exchange:
            self._exchange(exchange, given, dims, outputs)
        if getattr(func, "is_view", False) or name in _NO_KERNEL:
            return output
        self._charge(func, name, args, given, outputs, divided)
        return output

    def _exchange(self, kind: str, given: Sequence[torch.Tensor], dims: Any, outputs: Sequence[torch.Tensor]) -> None:
        moved = (
            sum(_size(tensor) for tensor in outputs)
            if kind == REDUCED
            else sum(_size(tensor) for tensor in given if id(tensor) in dims) / 2
        )
        self.tally.exchanges += 1
        self.tally.exchanged += moved

    def _charge(
        self, func: Any, name: str, args: Any, given: list[torch.Tensor], outputs: list[torch.Tensor], divided: bool
    ) -> None:
        tally = self.tally
        divided = divided or any(self.dim_of(tensor) is not None for tensor in outputs)
        tally.operators.append((func, *(tensor.shape for tensor in (*given, *outputs))))
        tally.kernels[0] += 1
        tally.kernels[1] += divided
        if name in _KEPT:
            for tensor in outputs:
                tally.selective[0] += _size(tensor)
                tally.selective[1] += _size(tensor) if self.dim_of(tensor) is not None else 0
        if name in _PRODUCTS or name in _GROUPED or name == "linear":
            return
        if name == "convolution":
            self._convolution(args, outputs[0])
            return
        if name in _ATTENTION:
            query, key, value = args[:3]
            names = [argument.name for argument in func._schema.arguments]
            causal = bool(dict(zip(names, args, strict=False)).get("is_causal", False))
            self.attention(query, key, value, causal)
            return
        if name in _LOOKUPS:
            moved = 2 * sum(_size(tensor) for tensor in outputs) + sum(_size(tensor) for tensor in given[1:])
        else:
            moved = sum(_size(tensor) for tensor in {id(item): item for item in given}.values())
            moved += sum(_size(tensor) for tensor in outputs)
        tally.moved[0] += moved
        tally.moved[1] += moved if any(self.dim_of(tensor) is not None for tensor in (*given, *outputs)) else 0

    def attention(self, query: Any, key: Any, value: Any, causal: bool) -> None:
        """Charge one call of fused attention; q, k, v are [..., heads, s, d]."""
        heads = query.shape[-3] if query.dim() > 2 else 1
        key_heads = key.shape[-3] if key.dim() > 2 else 1
        width = (query.shape[-1] + value.shape[-1]) // 2
        count = query.numel() // max(1, heads * query.shape[-2] * query.shape[-1])
        divided = self.dim_of(query) is not None
        if query.shape[-2] == key.shape[-2]:
            call = Attention(heads, key_heads, width, query.shape[-2], causal, count)
            self.tally.attention.append((call, divided))
            return
        which = "count" if divided else ""
        self.tally.matmuls += [
            MatMul(query.shape[-2], query.shape[-1], key.shape[-2], heads * count, which),
            MatMul(query.shape[-2], key.shape[-2], value.shape[-1], heads * count, which),
        ]

    def fused_attention(
        self, query: Any, key: Any, value: Any, causal: bool, result: torch.Tensor, sums: torch.Tensor
    ) -> None:
        """Charge a kernel for attention that is no operator of the recorded pass: its output and one sum per row."""
        divided = self.dim_of(query)
        for tensor in (result, sums):
            if divided is not None:
                self.divide(tensor, divided)
            self._register(tensor, divided is not None)
        if self.backward:
            return
        self.tally.operators.append(("attention", query.shape, key.shape, causal))
        self.tally.kernels[0] += 1
        self.tally.kernels[1] += divided is not None
        size = _size(result) + _size(sums)
        self.tally.selective[0] += size
        self.tally.selective[1] += size if divided is not None else 0
        self.attention(query, key, value, causal)

    def _product(
        self, name: str, args: Any, given: list[torch.Tensor], dims: dict[int, int], outputs: list[torch.Tensor]
    ) -> str:
        """Charge a matrix product and divide its result; what ranks exchange for it."""
        first = _PRODUCTS.get(name, 0)
        left, right = args[first], args[first + 1]
        result = outputs[0]
        if name in _GROUPED:
            self._grouped(left, right)
            return GATHERED if dims else ""
        to_right = dims.get(id(right))
        if name == "linear":  # [..., inner] x [columns, inner]
            which, dim, exchange = sharded_product(
                1 if dims.get(id(left)) == left.dim() - 1 else None if id(left) not in dims else 0,
                None if to_right is None else 1 - to_right,
                False,
            )
            dim = None if dim is None else result.dim() - 1 if dim == 1 else dims[id(left)]
            shape = (left.numel() // left.shape[-1], left.shape[-1], right.shape[0], 1)
        else:
            batched = left.dim() == 3
            which, dim, exchange = sharded_product(dims.get(id(left)), to_right, batched)
            shape = (left.shape[-2], left.shape[-1], right.shape[-1], left.shape[0] if batched else 1)
        if dim is not None:
            self.divide(result, dim)
        if not self.quiet and not self.backward and all(shape):
            if which == "columns" and id(left) not in dims:
                self.tally.gathered.add(storage_key(left))
            self.tally.matmuls.append(MatMul(*shape, which, name in _KEPT))
        return exchange

    def _grouped(self, left: torch.Tensor, right: torch.Tensor) -> None:
        """Rows [n, inner] that are shared out among experts [e, inner, columns]."""
        if self.quiet or self.backward or right.dim() != 3 or left.dim() != 2:
            return
        experts = right.shape[0]
        self.tally.matmuls.append(
            MatMul(max(1, left.shape[0] // experts), right.shape[1], right.shape[2],
                   left.shape[0] / max(1, left.shape[0] // experts), kept=False)
        )  # fmt: skip

    def _convolution(self, args: Any, result: torch.Tensor) -> None:
        image, weight, transposed, groups = args[0], args[1], args[6], args[8]
        large = image if transposed else result
        rows = large.shape[0] * large.shape[2:].numel()
        inner = weight.shape[1] * weight.shape[2:].numel()
        self.tally.matmuls.append(MatMul(rows, inner, weight.shape[0] // groups, groups, kept=False))


def _grouped_result(left: torch.Tensor, right: torch.Tensor, offs: Any = None, **_: Any) -> torch.Tensor:
    """What `_grouped_mm` returns; torch's own function for shapes knows bf16 alone, kernels know more types."""
    if left.dim() == 2 and right.dim() == 2:
        shape = (offs.shape[0], left.shape[0], right.shape[1])
    else:
        shape = (
            (*left.shape[:-1], right.shape[-1]) if left.dim() == 3 == right.dim() else (left.shape[-2], right.shape[-1])
        )
    return left.new_empty(shape)


def _place(tensor: torch.Tensor) -> Any:
    return tensor.storage_offset(), tuple(tensor.shape), tuple(tensor.stride())


def _size(tensor: torch.Tensor) -> int:
    """Bytes that reading it takes: what is expanded is read once."""
    count = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if stride:
            count *= size
    return (count if tensor.numel() else 0) * tensor.element_size()
