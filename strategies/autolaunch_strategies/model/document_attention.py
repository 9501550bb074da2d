"""Attention within the documents of packed rows, by a kernel that computes nothing between documents.

A mask of [s, s] says the same to torch's own attention, which then computes all of it and has no flash kernel for it.
What says where documents begin is as static in shape as a mask: for each token the place of the first token of its
document. How many documents there are is read inside of the operator, so that recordings and graphs hold one call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import handle_torch_function, has_torch_function
from torch.utils.weak import WeakIdKeyDictionary

from autolaunch_strategies.torch_private import attention as kernels
from autolaunch_strategies.torch_private.backward import version_of
from autolaunch_strategies.torch_private.operators import define_operator

DTYPES = (torch.bfloat16, torch.float16)
"""What the kernel computes in."""

_WIDEST = 256
"""Largest size of a head that the kernel has."""


def documents_of(begins: torch.Tensor) -> torch.Tensor:
    """[b, 1, 1, s] int32: the place in its row of the first token of each token's document.

    Args:
        begins: bool [b, s], whether a token is the first one of a document. That of a row always is.
    """
    places = torch.arange(begins.shape[-1], dtype=torch.int32, device=begins.device)
    return torch.where(begins, places, 0).cummax(-1).values[:, None, None, :]


def is_documents(mask: Any) -> bool:
    """Whether what stands in the place of a mask is a tensor of `documents_of`; masks are bool or float."""
    return isinstance(mask, torch.Tensor) and mask.dtype == torch.int32


def mask_of(documents: torch.Tensor) -> torch.Tensor:
    """bool [b, 1, s, s]: what each token sees, its document up to itself.

    Args:
        documents: see `documents_of`.
    """
    keys = torch.arange(documents.shape[-1], dtype=torch.int32, device=documents.device)
    return (keys >= documents.transpose(-1, -2)) & (keys <= keys[:, None])


def document_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    documents: torch.Tensor,
    scale: float | None = None,
) -> torch.Tensor:
    """As `F.scaled_dot_product_attention` with `mask_of(documents)`, by the kernel wherever that takes the tensors.

    Args:
        query: [b, h, s, d]. `key`: [b, h_kv, s, d], h_kv a divisor of h. `value`: [b, h_kv, s, d_v].
        documents: of each row; see `documents_of`.
        scale: of the scores; None: 1 / sqrt(d).

    Returns:
        [b, h, s, d_v], laid out as [b, s, h, d_v] by the kernel.
    """
    tensors = query, key, value, documents
    if has_torch_function(tensors):
        return handle_torch_function(document_attention, tensors, *tensors, scale=scale)
    q, k, v = (_as_autocast_has_it(item) for item in (query, key, value))
    if not kernel_takes(q, k, v):
        grouped = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask_of(documents), scale=scale, enable_gqa=grouped)
    if len(documents) != len(q):
        documents = documents.expand(len(q), -1, -1, -1)
    return _DocumentAttention.apply(q, k, v, documents, q.shape[-1] ** -0.5 if scale is None else scale)


def kernel_takes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether the kernel computes tensors of these devices, types and shapes ([b, h, s, d])."""
    width = q.shape[-1]
    alike = q.dtype == k.dtype == v.dtype and k.shape[-1] == v.shape[-1] == width and q.shape[-2] == k.shape[-2]
    return q.is_cuda and q.dtype in DTYPES and alike and width % 8 == 0 and width <= _WIDEST


def device_reason(device: torch.device) -> str | None:
    """Why the kernel does not run on a device; None if it does."""
    if device.type != "cuda":
        return f"there is no kernel for it on {device.type}"
    if torch.version.hip is not None:
        return "the kernel was not tried on GPUs of AMD"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return f"{torch.cuda.get_device_name(device)} is older than the flash kernels (compute capability 8.0)"
    if not torch.backends.cuda.is_flash_attention_available():
        return "this build of torch has no flash kernels"
    return None


def _as_autocast_has_it(tensor: torch.Tensor) -> torch.Tensor:
    """As torch's own attention: rotary positions in fp32 make q and k so, too, and autocast takes that back."""
    kind = tensor.device.type
    if not torch.is_autocast_enabled(kind) or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype(kind))


class _DocumentAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: torch.Tensor, scale: float
    ) -> torch.Tensor:
        out, lse = DOCUMENT_ATTENTION(q, k, v, documents, scale)
        ctx.scale = scale
        ctx.save_for_backward(q, k, v, documents, out, lse)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        q, k, v, documents, out, lse = ctx.saved_tensors
        gradients = torch.ops.autolaunch.document_attention_backward(q, k, v, documents, grad, out, lse, ctx.scale)
        return *gradients, None, None


_LENGTHS: Any = WeakIdKeyDictionary()
"""Tensor of `documents_of` -> (its version, what was read of it): all layers are given the same one."""


def lengths_of(documents: torch.Tensor) -> tuple[torch.Tensor, int]:
    """([n + 1] int32 where each document begins in all rows one behind another, and their end; the longest's tokens).

    The host waits for the device, once for all layers of a forward pass and its backward pass.
    """
    version = version_of(documents)
    known = _LENGTHS.get(documents)
    if known is not None and known[0] == version != -1:
        return known[1]
    rows = documents.flatten(1)
    places = torch.arange(rows.shape[1], dtype=torch.int32, device=rows.device)
    begins = (rows == places).flatten().nonzero().flatten()
    cumulative = F.pad(begins, (0, 1), value=rows.numel()).to(torch.int32)
    lengths = cumulative, int(cumulative.diff().max())
    _LENGTHS[documents] = version, lengths
    return lengths


def _run(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    cumulative, longest = lengths_of(documents)
    out, lse = kernels.varlen_attention(_in_line(q), _in_line(k), _in_line(v), cumulative, longest, scale)
    return _in_rows(out, len(q)), lse


def _shapes(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    b, h, s, d = q.shape
    lse = q.new_empty((h, b * s), dtype=torch.promote_types(q.dtype, torch.float32))
    return q.new_empty((b, s, h, d)).transpose(1, 2), lse


def _run_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    documents: torch.Tensor,
    grad: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, ...]:
    cumulative, longest = lengths_of(documents)
    gradients = kernels.varlen_attention_backward(
        _in_line(grad), _in_line(q), _in_line(k), _in_line(v), _in_line(out), lse, cumulative, longest, scale
    )
    return tuple(_in_rows(gradient, len(q)) for gradient in gradients)


def _shapes_backward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any) -> tuple[torch.Tensor, ...]:
    return tuple(item.new_empty(item.transpose(1, 2).shape).transpose(1, 2) for item in (q, k, v))


def _in_line(tensor: torch.Tensor) -> torch.Tensor:
    """[b, h, s, d] as [b·s, h, d], the rows one behind another; a view where the layout is that already."""
    return tensor.transpose(1, 2).contiguous().flatten(0, 1)


def _in_rows(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """[b·s, h, d] as [b, h, s, d], laid out as before."""
    return tensor.contiguous().unflatten(0, (rows, -1)).transpose(1, 2)


_GIVEN = "Tensor q, Tensor k, Tensor v, Tensor documents"
define_operator(f"document_attention({_GIVEN}, float scale) -> (Tensor, Tensor)", _run, _shapes)
define_operator(
    f"document_attention_backward({_GIVEN}, Tensor grad, Tensor out, Tensor lse, float scale) "
    "-> (Tensor, Tensor, Tensor)",
    _run_backward,
    _shapes_backward,
)

DOCUMENT_ATTENTION = torch.ops.autolaunch.document_attention
"""The operator: (output, log-sum-exp), both new."""
