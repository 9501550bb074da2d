"""The kernels of attention, and the function that chooses among them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

HEADS = ("query", "key", "value")
ATTENTION_ARGUMENTS = (*HEADS, "attn_mask", "dropout_p", "is_causal")
"""Of `scaled_dot_product_attention`, in their order."""


@contextmanager
def attention_replaced(attention: Callable[..., Any]) -> Iterator[None]:
    """Within it functions of torch that are written in Python call `attention` for scaled dot product attention.

    Function modes don't see those calls: a mode is taken away while a function of torch runs that it let through.
    """
    functional: Any = torch.nn.functional
    original = functional.scaled_dot_product_attention

    def answered(*args: Any, **kwargs: Any) -> Any:
        functional.scaled_dot_product_attention = original  # what answers may use it
        try:
            return attention(*args, **kwargs)
        finally:
            functional.scaled_dot_product_attention = answered

    functional.scaled_dot_product_attention = answered
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = original


def with_heads_for_kernels(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, device_type: str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [..., h_kv, s, d], repeated to the heads of `q` where no fused kernel takes fewer of them.

    On a GPU only flash attention does: in 16 bits and without a mask. Else torch takes the function that writes all
    scores to memory. Tensors of other types than torch's own find their kernel by themselves.

    Args:
        q: [..., h, s, d], before autocast.
        device_type: of `q`, if another one is asked about.
    """
    kind = device_type or q.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else q.dtype
    has_kernel = mask is None and dtype in (torch.bfloat16, torch.float16) and q.shape[-1] <= 256
    if kind != "cuda" or has_kernel or type(q) is not torch.Tensor or k.shape[-3] == q.shape[-3]:
        return k, v
    repeats = q.shape[-3] // k.shape[-3]
    return k.repeat_interleave(repeats, -3), v.repeat_interleave(repeats, -3)


def attention_on_cpu(q: Any, k: Any, v: Any, causal: bool, bias: Any, scale: float) -> tuple[Any, Any]:
    """The attention kernel of CPUs: output [b, h, s_q, d] and log-sum-exp [b, h, s_q]; fewer key heads allowed."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)


def attention_on_cpu_backward(
    grad: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, causal: bool, bias: Any, scale: float
) -> tuple[Any, Any, Any]:
    """Gradients of q, k and v of `attention_on_cpu`."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, lse, 0.0, causal, attn_mask=bias, scale=scale
    )


def flash_attention(q: Any, k: Any, v: Any, causal: bool, scale: float) -> tuple[Any, Any]:
    """The flash kernel of GPUs: output [b, h, s_q, d] and log-sum-exp [b, h, s_q]; fewer key heads allowed."""
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
    return out, lse


def flash_attention_backward(
    grad: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, causal: bool, scale: float
) -> tuple[Any, Any, Any]:
    """Gradients of q, k and v of `flash_attention`."""
    unused = torch.empty(2, dtype=torch.uint64, device=q.device)  # the random state, read with dropout only
    return torch.ops.aten._scaled_dot_product_flash_attention_backward(
        grad, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, unused, unused, scale=scale
    )


def takes_cudnn(q: Any, k: Any, v: Any, causal: bool, scale: float) -> bool:
    """Whether torch's own function takes cuDNN's kernel for these tensors on their GPU (16 bits, without a mask).

    It does so on Hopper and Blackwell with a cuDNN since 9.15, where that is faster than flash attention
    (`check_prefer_cudnn_attention`, sdp_utils.cpp), unless `torch.nn.attention.sdpa_kernel` says otherwise.
    """
    # Torch is asked of the forward pass. The backward one has wider heads with some versions only, and its sums are not
    # the same each time.
    if max(q.shape[3], v.shape[3]) > 128 or torch.are_deterministic_algorithms_enabled():
        return False
    fewer = k.shape[1] != q.shape[1]
    chosen = torch._fused_sdp_choice(q, k, v, None, 0.0, causal, scale=scale, enable_gqa=fewer)
    return chosen == torch.nn.attention.SDPBackend.CUDNN_ATTENTION.value


def cudnn_attention(q: Any, k: Any, v: Any, causal: bool, scale: float) -> tuple[Any, Any]:
    """cuDNN's kernel: output [b, h, s_q, d_v] and log-sum-exp [b, h, s_q]; fewer key heads allowed."""
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, causal, False, scale=scale
    )
    return out, lse.squeeze(3)


def cudnn_attention_backward(
    grad: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, causal: bool, scale: float
) -> tuple[Any, Any, Any]:
    """Gradients of q, k and v of `cudnn_attention`."""
    unused = torch.empty((), dtype=torch.int64, device=q.device)  # the random state, read with dropout only
    lengths = None, None, q.shape[2], k.shape[2]
    return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        grad, q, k, v, out, lse[..., None], unused, unused, None, *lengths, 0.0, causal, scale=scale
    )


def varlen_attention(q: Any, k: Any, v: Any, cumulative: Any, longest: int, scale: float) -> tuple[Any, Any]:
    """The flash kernel of GPUs on sequences that lie one behind another, each causal and by itself.

    It is what `torch.nn.attention.varlen.varlen_attn` calls, whose own operators change from version to version.

    Args:
        q: [tokens, h, d], bf16 or fp16. `k`, `v`: [tokens, h_kv, d]; fewer heads allowed.
        cumulative: [sequences + 1] int32, where each begins, and behind them where the last one ends.
        longest: tokens of the longest sequence.

    Returns:
        output [tokens, h, d] and log-sum-exp [h, tokens].
    """
    lengths = cumulative, cumulative, longest, longest
    out, lse, *_ = torch.ops.aten._flash_attention_forward(q, k, v, *lengths, 0.0, True, False, scale=scale)
    return out, lse


def varlen_attention_backward(
    grad: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, cumulative: Any, longest: int, scale: float
) -> tuple[Any, Any, Any]:
    """Gradients of q, k and v of `varlen_attention`."""
    unused = torch.empty(2, dtype=torch.uint64, device=q.device)  # the random state, read with dropout only
    return torch.ops.aten._flash_attention_backward(
        grad, q, k, v, out, lse, cumulative, cumulative, longest, longest, 0.0, True, unused, unused, scale=scale
    )


def efficient_attention(q: Any, k: Any, v: Any, causal: bool, bias: Any, scale: float) -> tuple[Any, Any]:
    """The memory-efficient kernel of GPUs: output [b, h, s_q, d_v] and log-sum-exp [b, h, s_q, or more]."""
    out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, 0.0, causal, scale=scale)
    return out, lse


def efficient_attention_backward(
    grad: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, causal: bool, bias: Any, scale: float
) -> tuple[Any, Any, Any]:
    """Gradients of q, k and v of `efficient_attention`; `lse` as long as that returned it."""
    unused = torch.empty((), dtype=torch.int64, device=q.device)  # the random state, read with dropout only
    wanted = [True, True, True, False]
    return torch.ops.aten._scaled_dot_product_efficient_attention_backward(
        grad, q, k, v, bias, out, lse, unused, unused, 0.0, wanted, causal, scale=scale
    )[:3]


def attention_dropping(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    dropout_p: float,
    causal: bool,
    kept: torch.Tensor,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    """`scaled_dot_product_attention` without a kernel, with the weights dropped that are not `kept`.

    Args:
        kept: bool [..., queries, keys].
    """
    if enable_gqa:
        k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    scores = q @ k.transpose(-2, -1) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -float("inf")) if mask.dtype == torch.bool else scores + mask
    # torch's own has an argument for `kept`, too, and warns of it. Rows in which nothing is seen are 0, as there.
    weights = torch._safe_softmax(scores, -1)
    return (weights * kept.to(weights.dtype).div_(1 - dropout_p)).to(v.dtype) @ v
