"""Functions of torch as they run on the device that is planned for, while a pass is recorded on a CPU's shapes.

On CUDA attention is one kernel in most cases, and keeps queries, keys, values, its output and one number per row; so is
`rms_norm`, which a CPU computes in eight; autocast computes more functions in fp32 than on a CPU.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from autolaunch_strategies.planner.operators import Tape
from autolaunch_strategies.torch_private.attention import attention_replaced
from autolaunch_strategies.torch_private.tracing import FUSED_RMS_NORM, FUSED_RMS_NORM_BACKWARD
from autolaunch_strategies.tracing.recorder import Operation

_FP32_NAMES = (
    "exp", "expm1", "log", "log10", "log1p", "log2", "reciprocal", "rsqrt", "pow", "softplus", "layer_norm",
    "rms_norm", "group_norm", "norm", "cosine_similarity", "nll_loss", "kl_div", "l1_loss", "smooth_l1_loss",
    "huber_loss", "mse_loss", "cdist", "logsumexp", "prod", "softmax", "log_softmax", "cumprod", "cumsum", "sum",
    "cross_entropy", "__pow__", "__rpow__",
)  # fmt: skip
"""From torch's documentation of autocast: what CUDA autocasts to float32; and `rms_norm`, by what it returns there."""
_FP32 = {
    function
    for holder in (torch, torch.Tensor, F)
    for name in _FP32_NAMES
    if (function := getattr(holder, name, None)) is not None
}
_NO_MODULE = nn.Module()
_RMS_NORM = {torch.rms_norm, F.rms_norm}
_PRODUCTS = {
    *(torch.matmul, torch.linalg.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.Tensor.__rmatmul__),
    *(torch.einsum, torch.tensordot),
}
"""Functions of torch that join the dims which count products before they multiply."""


@contextmanager
def functions_of(device_type: str, tape: Tape, autocast: torch.dtype | None) -> Iterator[None]:
    """Within it functions do what they do on `device_type` (cuda or cpu).

    Args:
        autocast: the narrow type of mixed precision; None without it.
    """
    with ExitStack() as stack:
        if autocast is not None:
            stack.enter_context(torch.autocast("cpu", dtype=autocast))
        replaced = _Functions(tape, device_type)
        stack.enter_context(attention_replaced(replaced.attention))
        stack.enter_context(replaced)
        stack.enter_context(unpacked_sequences())
        yield


@contextmanager
def unpacked_sequences() -> Iterator[None]:
    """Within it `transformers` takes positions to be those of one sequence, which shapes alone don't tell it.

    It would build a mask for packed sequences otherwise, and with a mask attention and what is kept for it differ.
    """
    masks: Any = sys.modules.get("transformers.masking_utils")
    find = getattr(masks, "find_packed_sequence_indices", None)
    if find is None:
        yield
        return
    masks.find_packed_sequence_indices = lambda *_, **__: None
    try:
        yield
    finally:
        masks.find_packed_sequence_indices = find


class _Functions(TorchFunctionMode):
    def __init__(self, tape: Tape, device_type: str) -> None:
        super().__init__()
        self.tape, self.on_cpu = tape, device_type == "cpu"
        self.original = F.scaled_dot_product_attention

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is self.original:
            return self.attention(*args, **kwargs)
        if not self.on_cpu and func in (F.dropout, torch.dropout):
            return _dropout(func, *args, **kwargs)
        if not self.on_cpu and func in _FP32 and torch.is_autocast_enabled("cpu") and kwargs.get("dtype") is None:
            args, kwargs = tree_map(_widened, (args, kwargs))
        if not self.on_cpu and func in _RMS_NORM:
            return self._rms_norm(func, *args, **kwargs)
        if func in _PRODUCTS:
            with self.tape.joining():
                return func(*args, **kwargs)
        return func(*args, **kwargs)

    def _rms_norm(
        self,
        func: Any,
        input: torch.Tensor,
        normalized_shape: Sequence[int],
        weight: torch.Tensor | None = None,
        eps: float | None = None,
    ) -> torch.Tensor:
        """One kernel, if types agree (torch's `layer_norm.cpp`) and no normalised dim is sharded."""
        dim = self.tape.dim_of(input)
        whole = dim is None or dim < input.dim() - len(normalized_shape)
        if not whole or (weight is not None and weight.dtype != input.dtype):
            return func(input, normalized_shape, weight, eps)
        return _FusedNorm.apply(input, weight, len(normalized_shape), self.tape)

    def attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        """As `scaled_dot_product_attention`, on shapes alone."""
        self.tape.tally.heads.append(query.shape[-3] if query.dim() > 2 else 1)
        if self.on_cpu:
            return self.original(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        if torch.is_autocast_enabled("cpu"):
            narrow = torch.get_autocast_dtype("cpu")
            query, key, value = (tensor.to(narrow) for tensor in (query, key, value))
        if not _is_fused(query, key, value, enable_gqa):
            with sdpa_kernel(SDPBackend.MATH):
                return self.original(
                    query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
                )
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(attn_mask, float("-inf"))
        return _Fused.apply(query, key, value, attn_mask, is_causal, self.tape)


def _dropout(function: Any, input: torch.Tensor, p: float = 0.5, *args: Any, **kwargs: Any) -> torch.Tensor:
    """CUDA keeps a mask of one byte for each element, a CPU the numbers by which it multiplies."""
    training = kwargs.get("training", kwargs.get("train", args[0] if args else True))
    inplace = kwargs.get("inplace", args[1] if len(args) > 1 else False)
    if not training or p == 0 or inplace:
        return function(input, p, *args, **kwargs)
    return torch.native_dropout(input, p, True)[0]


def _is_fused(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, shared_heads: bool) -> bool:
    """Whether CUDA has one kernel for it: from torch's `sdp_utils.cpp`; that for fp32 has no shared key heads."""
    if query.dim() != 4 or query.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return False
    shared = shared_heads and query.shape[1] != key.shape[1]
    return not shared or (query.dtype != torch.float32 and query.shape[-1] <= 256)


def _widened(leaf: Any) -> Any:
    narrow = isinstance(leaf, torch.Tensor) and leaf.dtype in (torch.float16, torch.bfloat16)
    return leaf.float() if narrow else leaf


class _Fused(torch.autograd.Function):
    """Keeps what flash attention (arXiv 2205.14135) and the memory-efficient kernel keep."""

    @staticmethod
    def forward(
        context: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        causal: bool,
        tape: Tape,
    ) -> torch.Tensor:
        batch, heads, rows, _ = query.shape
        with tape.unregistered():
            # Heads lie next to each other in memory, so that joining them moves nothing.
            width = value.shape[-1]
            strides = (rows * heads * width, width, heads * width, 1)
            result = query.new_empty_strided((batch, heads, rows, width), strides)
            sums = query.new_empty(batch, heads, rows, dtype=torch.float32)
        tape.fused_attention(query, key, value, causal, result, sums)
        context.save_for_backward(query, key, value, mask, result, sums)
        context.tape = tape
        return result

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        query, key, value, *_ = context.saved_tensors
        own_gradients = [torch.empty_like(tensor) for tensor in (query, key, value)]
        for tensor, like in zip(own_gradients, (query, key, value), strict=True):
            if (dim := context.tape.dim_of(like)) is not None:
                context.tape.shard(tensor, dim)
        context.tape.fused_backward(context.saved_tensors, own_gradients)
        return (*own_gradients, None, None, None)


class _FusedNorm(torch.autograd.Function):
    """Keeps its input, and one number for each row."""

    @staticmethod
    def forward(
        context: Any, input: torch.Tensor, weight: torch.Tensor | None, normalized_dims: int, tape: Tape
    ) -> torch.Tensor:
        rows = (*input.shape[: input.dim() - normalized_dims], *([1] * normalized_dims))
        with tape.unregistered():
            result, scales = torch.empty_like(input), input.new_empty(rows, dtype=torch.float32)
        tape.operator(_operation(FUSED_RMS_NORM, [input, weight], [result, scales]))
        context.save_for_backward(input, weight, scales)
        context.tape = tape
        return result

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        input, weight, scales = context.saved_tensors
        with context.tape.unregistered():
            own_gradients = [
                torch.empty_like(tensor) if needed else None
                for tensor, needed in zip((input, weight), context.needs_input_grad[:2], strict=True)
            ]
        arguments = [gradients[0], input, scales, weight]
        context.tape.operator(_operation(FUSED_RMS_NORM_BACKWARD, arguments, own_gradients))
        return (*own_gradients, None, None)


def _operation(
    operator: Any, arguments: Sequence[torch.Tensor | None], results: Sequence[torch.Tensor | None]
) -> Operation:
    """A call of an operator with such tensors."""
    inputs, outputs = ([tensor for tensor in tensors if tensor is not None] for tensors in (arguments, results))
    return Operation(operator, inputs, {}, tuple(outputs), inputs, outputs, [], _NO_MODULE)
