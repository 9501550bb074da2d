"""Attention to a part of the keys: the output, and the log-sum-exp by which outputs of several parts are merged."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from autolaunch_strategies.model.random_positions import attention
from autolaunch_strategies.torch_private import attention as kernels

_INFINITY = float("inf")


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool,
    mask: torch.Tensor | None,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention without dropout, and the logarithm of what its softmax divided by.

    Args:
        q: [b, h, s_q, d].
        k: [b, h_kv, s_k, d], where h_kv divides h: each key head serves h / h_kv query heads that follow each other.
        v: [b, h_kv, s_k, d_v].
        causal: query i sees keys 0 to i; s_q and s_k are the same then.
        mask: bool (True: seen) or float (added to the scores), 4-D, broadcastable to [b, h, s_q, s_k].

    Returns:
        The output [b, h, s_q, d_v] in the dtype of q, and the log-sum-exp [b, h, s_q] in fp32 (fp64 for fp64).
        A query that sees no key has an output of 0 and a log-sum-exp of -infinity.
    """
    assert not causal or q.shape[2] == k.shape[2], "kernels differ in where the diagonal of a rectangle is"
    bias, blind = _bias(q, k, causal, mask)
    causal = causal and bias is None
    name = _kernel(q, k, v, bias)
    if name == "plain":
        out, lse = _plain(q, k, v, causal, bias, scale)
    else:
        width_v = v.shape[3]
        q, k, v = _fitted(name, q, k, v)
        if name == "cpu":
            out, lse = kernels.attention_on_cpu(q, k, v, causal, bias, scale)
        elif name == "flash" and kernels.takes_cudnn(q, k, v, causal, scale):
            out, lse = kernels.cudnn_attention(q, k, v, causal, scale)
        elif name == "flash":
            out, lse = kernels.flash_attention(q, k, v, causal, scale)
        else:
            out, lse = kernels.efficient_attention(q, k, v, causal, _aligned(bias, q, k), scale)
            lse = lse[:, :, : q.shape[2]]
        out = out[..., :width_v]
    if blind is not None:
        out, lse = out.masked_fill(blind[..., None], 0.0), lse.masked_fill(blind, -_INFINITY)
    return out, lse


def attend_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    causal: bool,
    mask: torch.Tensor | None,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k and v that come from these keys, where `out` and `lse` are those of attention to all keys.

    With s the scores and p = exp(s - lse): dv = p^T·grad, ds = p·(grad·v^T - sum(grad·out)), dq = ds·k, dk = ds^T·q.
    Only `out` and `lse` know of keys elsewhere, so parts add up to the whole (Dao et al., FlashAttention, appendix B).

    Args:
        grad: [b, h, s_q, d_v]. `out` alike. `lse`: [b, h, s_q]. The others as in `attend`.
    """
    bias, _ = _bias(q, k, causal, mask)
    causal = causal and bias is None
    if bias is not None:
        lse = lse.masked_fill(lse == -_INFINITY, _INFINITY)  # sees nothing: p = exp(-inf - inf) = 0, not NaN
    name = _kernel(q, k, v, bias)
    if name == "plain":
        return _plain_backward(grad, q, k, v, out, lse, causal, bias, scale)
    width, width_v, heads, key_heads = q.shape[3], v.shape[3], q.shape[1], k.shape[1]
    q, k, v = _fitted(name, q, k, v)
    grad, out = (_widened(x, v.shape[3]) for x in (grad, out))
    if name == "cpu":
        dq, dk, dv = kernels.attention_on_cpu_backward(grad, q, k, v, out, lse, causal, bias, scale)
    elif name == "flash" and kernels.takes_cudnn(q, k, v, causal, scale):
        dq, dk, dv = kernels.cudnn_attention_backward(grad, q, k, v, out, lse.contiguous(), causal, scale)
    elif name == "flash":
        dq, dk, dv = kernels.flash_attention_backward(grad, q, k, v, out, lse.contiguous(), causal, scale)
    else:
        out = out.transpose(1, 2).contiguous().transpose(1, 2)  # the kernel takes the stride of its rows for granted
        lse = F.pad(lse, (0, -lse.shape[2] % _lse_multiple()), value=_INFINITY).contiguous()
        bias = _aligned(bias, q, k)
        dq, dk, dv = kernels.efficient_attention_backward(grad, q, k, v, out, lse, causal, bias, scale)
        if key_heads != heads:
            dtype = torch.promote_types(q.dtype, torch.float32)
            dk, dv = (x.unflatten(1, (key_heads, -1)).sum(2, dtype=dtype) for x in (dk, dv))
    return dq[..., :width], dk[..., :width], dv[..., :width_v]


def attend_whole(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool,
    mask: torch.Tensor | None,
    dropout_p: float,
    scale: float,
) -> torch.Tensor:
    """Attention as torch does it itself: differentiable in everything, with dropout; arguments as in `attend`."""
    if mask is not None:
        if causal:
            mask, causal = _with_diagonal(mask, q.shape[2], k.shape[2]), False
        if mask.is_floating_point():
            mask = mask.to(q.dtype)
    flash = q.shape[3] == v.shape[3] and _kernel(q, k, v, mask) == "flash"
    if q.device.type != "cpu" and k.shape[1] != q.shape[1] and not flash:
        # Torch's only other kernel for fewer key heads writes all scores to memory.
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    return attention(q, k, v, mask, dropout_p, causal, scale=scale, enable_gqa=k.shape[1] != q.shape[1])


def _kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None) -> str:
    """cpu, flash (or cuDNN's, which takes the same), efficient or plain: the fastest that takes these tensors."""
    half = q.dtype in (torch.float16, torch.bfloat16)
    if q.device.type == "cpu" and (half or q.dtype in (torch.float32, torch.float64)):
        return "cpu"
    if q.device.type == "cuda" and (half or q.dtype == torch.float32):
        capability, width = torch.cuda.get_device_capability(q.device), max(q.shape[3], v.shape[3])
        ampere = capability >= (8, 0)
        flash = ampere and torch.backends.cuda.is_flash_attention_available()
        fits = width <= 256 and not (capability in _WITHOUT_WIDE_FLASH and 192 < width <= 224)
        if half and flash and bias is None and fits:
            return "flash"
        if ampere or q.dtype != torch.bfloat16:
            return "efficient"
    return "plain"


_WITHOUT_WIDE_FLASH = ((8, 6), (8, 9), (12, 0), (12, 1))
"""Compute capabilities without a backward pass of flash attention for some widths (sdp_utils.cpp of torch)."""


def _fitted(
    name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """With as many heads and as wide heads as the kernel demands; columns of zeros change nothing."""
    if name == "efficient":
        if k.shape[1] != q.shape[1]:
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        width, width_v = -(-q.shape[3] // 8) * 8, -(-v.shape[3] // 8) * 8
    else:
        width = max(q.shape[3], v.shape[3])
        width = width_v = -(-width // 8) * 8 if name == "flash" else width
    return _widened(q, width), _widened(k, width), _widened(v, width_v)


def _widened(tensor: torch.Tensor, width: int) -> torch.Tensor:
    """The tensor with columns of zeros up to a width, in memory as kernels demand; a copy only if it has to be.

    The numbers of one head stand next to each other. Rows start at multiples of 16 bytes on GPUs (which load that much
    at once), and no two at the same place (a gradient that was expanded).
    """
    if tensor.shape[3] != width:
        return F.pad(tensor, (0, width - tensor.shape[3])).contiguous()
    step, (*outer, inner) = 1 if tensor.device.type == "cpu" else 16 // tensor.element_size(), tensor.stride()
    fits = inner == 1 and tensor.storage_offset() % step == 0
    for stride, length in zip(outer, tensor.shape, strict=False):
        fits = fits and (length <= 1 or (stride > 0 and stride % step == 0))
    return tensor if fits else tensor.clone(memory_format=torch.contiguous_format)


def _lse_multiple() -> int:
    """The memory-efficient kernel of CUDA (not that of ROCm) wants rows of log-sum-exp filled up to 32."""
    return 1 if torch.version.hip else 32


def _aligned(bias: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor | None:
    """The bias in full size, rows starting at multiples of 16 numbers: what the memory-efficient kernel reads.

    What is the same for all samples, heads or queries stays once in memory.
    """
    if bias is None:
        return None
    keys = k.shape[2]
    bias = bias.expand(*bias.shape[:3], keys)
    starts = *bias.stride()[:3], bias.storage_offset()
    if keys % 16 or bias.stride(3) != 1 or any(start % 16 for start in starts):
        bias = F.pad(bias, (0, -keys % 16)).contiguous()[..., :keys]
    return bias.expand(q.shape[0], q.shape[1], q.shape[2], keys)


def _with_diagonal(mask: torch.Tensor, rows: int, keys: int) -> torch.Tensor:
    """The mask, and query i sees keys 0 to i only."""
    seen = torch.ones(rows, keys, dtype=torch.bool, device=mask.device).tril()
    return mask & seen if mask.dtype == torch.bool else mask.masked_fill(~seen, -_INFINITY)


def _bias(
    q: torch.Tensor, k: torch.Tensor, causal: bool, mask: torch.Tensor | None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """What is added to the scores (dtype of q), and which queries see nothing [b or 1, h or 1, s_q or 1]."""
    if mask is None:
        return None, None
    if causal:
        mask = _with_diagonal(mask, q.shape[2], k.shape[2])
    if mask.dtype == torch.bool:
        bias = torch.zeros(mask.shape, dtype=q.dtype, device=mask.device).masked_fill_(~mask, -_INFINITY)
        return bias, ~mask.any(-1)
    bias = mask.to(q.dtype)
    return bias, bias.amax(-1) == -_INFINITY


def _plain(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, bias: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention by its formula: for dtypes and devices that have no kernel."""
    scores, _, values = _scores(q, k, v, causal, bias, scale)
    lse = scores.logsumexp(-1)
    p = torch.exp(scores - lse.masked_fill(lse == -_INFINITY, _INFINITY)[..., None])
    return (p @ values).to(q.dtype), lse


def _plain_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
    bias: torch.Tensor | None,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    scores, keys, values = _scores(q, k, v, causal, bias, scale)
    grad, out, queries = (x.to(scores.dtype) for x in (grad, out, q))
    p = torch.exp(scores - lse[..., None])
    ds = p * (grad @ values.mT - (grad * out).sum(-1, keepdim=True))
    dk, dv = (x.unflatten(1, (k.shape[1], -1)).sum(2) for x in (ds.mT @ queries * scale, p.mT @ grad))
    return (ds @ keys * scale).to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _scores(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, bias: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scores [b, h, s_q, s_k] and the keys and values for each of the h heads, in fp32 or wider."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    keys, values = (x.to(dtype).repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q.to(dtype) @ keys.mT * scale
    if bias is not None:
        scores = scores + bias.to(dtype)
    if causal:
        scores = scores.masked_fill(~torch.ones_like(scores[0, 0], dtype=torch.bool).tril(), -_INFINITY)
    return scores, keys, values
