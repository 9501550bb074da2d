"""Along which dim mp shards a tensor, followed through the operators of a recorded pass.

The rules are those that torch's `DTensor` and our `views` follow at run time, for one axis: what changes shape keeps a
sharded dim if the dim survives, elementwise operators keep it, products that sum over it end in an exchange, and
anything else works on the gathered tensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

SAME, GATHERED, REDUCED = "", "gathered", "reduced"
"""What happens between ranks: nothing, an operand is made whole, the result is added up over ranks."""

_RESHAPES = {"view", "_unsafe_view", "reshape", "_reshape_alias"}
_CUTS = {"split": 2, "split_with_sizes": 2, "chunk": 2, "slice": 1, "narrow": 1, "select": 1, "unbind": 1}
"""Operators that take a part along a dim, and the place of that dim among their arguments."""
_REDUCTIONS = {"sum", "mean", "amax", "amin", "prod", "var", "std", "var_mean", "logsumexp", "any", "all", "argmax"}
_ACROSS = {"_softmax": 1, "_safe_softmax": 1, "cumsum": 1}
"""Operators that keep shapes, but not along this argument's dim."""


class JoinedDim(int):
    """A dim into which a sharded one is joined, behind `outer` elements that are not: torch's `_StridedShard`."""

    outer: int

    def __new__(cls, dim: int, outer: int) -> JoinedDim:
        result = super().__new__(cls, dim)
        result.outer = outer
        return result


def _outer(dim: int) -> int:
    return dim.outer if isinstance(dim, JoinedDim) else 1


def _joined(dim: int | None, outer: int) -> int | None:
    return dim if dim is None or outer == 1 else JoinedDim(dim, outer)


def sharded_outputs(
    name: str,
    pointwise: bool,
    args: Sequence[Any],
    dims: dict[int, int],
    outputs: Sequence[torch.Tensor],
    joins: bool = False,
) -> tuple[list[int | None], str]:
    """(for each output the dim that is sharded, what ranks exchange for it).

    Args:
        name: of the operator, without its overload; no matrix product (see `sharded_product`).
        dims: `id` of a tensor argument -> its sharded dim; of those that are sharded.
        joins: whether a change of shape may join a sharded dim to those in front of it.
    """
    sharded = [leaf for arg in args for leaf in (arg if isinstance(arg, list | tuple) else (arg,)) if id(leaf) in dims]
    if name in _RESHAPES:
        shape, dim = sharded[0].shape, dims[id(sharded[0])]
        return _judged([_through_view(shape, dim, output.shape, joins) for output in outputs])
    outer, *others = {_outer(dims[id(tensor)]) for tensor in sharded}
    if others:
        return [None] * len(outputs), GATHERED
    output_dims, exchange = _followed(name, pointwise, args, sharded, dims, outputs)
    return [_joined(dim, outer) for dim in output_dims], exchange


def _followed(
    name: str,
    pointwise: bool,
    args: Sequence[Any],
    sharded: Sequence[torch.Tensor],
    dims: dict[int, int],
    outputs: Sequence[torch.Tensor],
) -> tuple[list[int | None], str]:
    """As `sharded_outputs`, of an operator that leaves dims joined as they are.

    Args:
        sharded: those of its arguments that are.
    """
    first = args[0] if args else None
    tensor = sharded[0]
    dim = dims[id(tensor)]
    if name in ("transpose", "t") and isinstance(first, torch.Tensor):
        one, other = (args[1] % tensor.dim(), args[2] % tensor.dim()) if name == "transpose" else (0, tensor.dim() - 1)
        return [{one: other, other: one}.get(dim, dim)] * len(outputs), SAME
    if name == "permute":
        return [[item % tensor.dim() for item in args[1]].index(dim)], SAME
    if name == "unsqueeze":
        return [dim + (args[1] % (tensor.dim() + 1) <= dim)], SAME
    if name == "squeeze":
        gone = range(tensor.dim()) if len(args) == 1 else args[1] if isinstance(args[1], list | tuple) else [args[1]]
        gone = [item % tensor.dim() for item in gone if tensor.shape[item] == 1]
        return [dim - sum(item < dim for item in gone)], SAME
    if name == "expand":
        return [dim + outputs[0].dim() - tensor.dim()], SAME
    if name in _CUTS:
        return _judged([_cut(name, args, tensor, dim, output) for output in outputs])
    if name in ("cat", "stack"):
        along = (args[1] if len(args) > 1 else 0) % outputs[0].dim()
        if name == "stack":
            return [dim + (along <= dim)], SAME
        return ([None], GATHERED) if along == dim else ([dim], SAME)
    if name in _REDUCTIONS:
        return _reduced(args, tensor, dim, outputs)
    if name in _ACROSS and args[_ACROSS[name]] % tensor.dim() == dim:
        return [None] * len(outputs), GATHERED
    if pointwise:
        dims_from_end = {item.dim() - dims[id(item)] for item in sharded}
        return ([outputs[0].dim() - dims_from_end.pop()], SAME) if len(dims_from_end) == 1 else ([None], GATHERED)
    return _judged([_alike(sharded, dims, output) for output in outputs], least=1)


def sharded_product(left: int | None, right: int | None, batched: bool) -> tuple[str, int | None, str]:
    """(what of a `MatMul` is sharded, the sharded dim of the result, what ranks exchange).

    Args:
        left, right: the sharded dim of the operands [(b,) rows, inner] and [(b,) inner, columns]; None if whole.
        batched: whether the first dim counts products.
    """
    rows, inner = (1, 2) if batched else (0, 1)
    columns, under = inner, rows  # of the right operand
    if batched and 0 in (left, right):
        return "count", left if left == 0 else right, SAME
    if right == columns:
        return "columns", columns, GATHERED if left == inner else SAME
    if right == under:
        return "inner", None, REDUCED
    if left == rows:
        return "count", left, SAME
    return "", None, GATHERED if left is not None else SAME


def _judged(output_dims: list[int | None], least: int = 0) -> tuple[list[int | None], str]:
    """Nothing is exchanged if all outputs (or `least` of them) are sharded."""
    sharded = sum(dim is not None for dim in output_dims)
    return output_dims, SAME if sharded >= (least or len(output_dims)) else GATHERED


def _through_view(before: Sequence[int], dim: int, after: Sequence[int], joins: bool) -> int | None:
    """Where a sharded dim is after a change of shape: first among the dims that it becomes, or joined behind others."""
    front, size = math.prod(before[:dim]) * _outer(dim), before[dim] // _outer(dim)
    product = 1
    for place, length in enumerate(after if size else ()):
        if length > 1 and product * length > front:
            outer = front // product
            own = length // outer
            even = front % product == 0 and length % outer == 0 and (own % size == 0 or size % own == 0)
            # A part of a head, or joined with dims in front of it: the parts of ranks are not contiguous.
            return _joined(place, outer) if even and (joins or outer == 1) else None
        product *= length
    return None


def _cut(name: str, args: Sequence[Any], tensor: torch.Tensor, dim: int, output: torch.Tensor) -> int | None:
    along = args[_CUTS[name]] if len(args) > _CUTS[name] else 0
    along %= tensor.dim()
    if name in ("select", "unbind"):
        return None if along == dim else dim - (along < dim)
    return dim if along != dim or output.shape[dim] == tensor.shape[dim] else None


def _reduced(
    args: Sequence[Any], tensor: torch.Tensor, dim: int, outputs: Sequence[torch.Tensor]
) -> tuple[list[int | None], str]:
    named = args[1] if len(args) > 1 else None
    listed = list(range(tensor.dim())) if named is None or named == [] else named
    over = [item % tensor.dim() for item in (listed if isinstance(listed, list | tuple) else [listed])]
    if dim in over:
        return [None] * len(outputs), REDUCED
    kept = outputs[0].dim() == tensor.dim()
    return [dim if kept else dim - sum(item < dim for item in over)] * len(outputs), SAME


def _alike(operands: Sequence[torch.Tensor], dims: dict[int, int], output: torch.Tensor) -> int | None:
    """The dim of the first operand whose sharded dim has the same size in the output."""
    for tensor in operands:
        dim = dims[id(tensor)]
        if dim < output.dim() and output.shape[: dim + 1] == tensor.shape[: dim + 1]:
            return dim
    return None
