"""Attention of packed documents by the kernel of GPUs equals torch's attention with a mask in fp64 on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from autolaunch_strategies.model.document_attention import (
    device_reason,
    document_attention,
    documents_of,
    kernel_takes,
    mask_of,
)

DEVICE = torch.device("cuda")
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 3e-3}
"""Of the largest number of a tensor."""


@pytest.mark.parametrize(
    ("kv_heads", "width"),
    [pytest.param(4, 64, id="64"), pytest.param(2, 128, id="groups"), pytest.param(1, 40, id="odd")],
)
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=["bf16", "fp16"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_the_kernel_is_attention_with_a_mask(compiled: bool, dtype: torch.dtype, kv_heads: int, width: int) -> None:
    if reason := device_reason(DEVICE):
        pytest.skip(reason)
    torch.manual_seed(1)
    begins = torch.rand(3, 300) < 0.02
    begins[1, 7:9] = True  # a document of one token
    shapes = [(3, 300, heads, width) for heads in (4, kv_heads, kv_heads, 4)]
    *given, grad = (torch.randn(shape, dtype=dtype).transpose(1, 2) for shape in shapes)

    leaves = [item.double().requires_grad_() for item in given]
    expected = F.scaled_dot_product_attention(*leaves, attn_mask=mask_of(documents_of(begins)), enable_gqa=True)
    expected.backward(grad.double())

    found = [item.to(DEVICE).requires_grad_() for item in given]
    assert kernel_takes(*found)
    run = torch.compile(document_attention, fullgraph=True) if compiled else document_attention
    out = run(*found, documents_of(begins.to(DEVICE)))
    out.backward(grad.to(DEVICE))
    pairs = [(out, expected), *((one.grad, another.grad) for one, another in zip(found, leaves, strict=True))]
    for what, (one, another) in zip(("output", "dq", "dk", "dv"), pairs, strict=True):
        assert one is not None and another is not None and one.dtype == dtype
        difference = (one.cpu().double() - another).abs().max() / another.abs().max()
        assert difference <= TOLERANCE[dtype], f"{what} differs by {difference:.1e} of its largest number"
