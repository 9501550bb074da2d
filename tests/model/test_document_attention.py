"""Attention within packed documents by a kernel equals torch's attention with a mask, and is one call to torch."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from autolaunch_strategies.model.document_attention import (
    device_reason,
    document_attention,
    documents_of,
    lengths_of,
    mask_of,
)
from autolaunch_strategies.training.recompute import _selective, saved_operators
from tests.support.documents import kernel_on_cpu

POSITIONS = torch.tensor([[0, 1, 2, 3, 0, 0, 1], [3, 4, 0, 1, 2, 0, 1], [0, 1, 2, 3, 4, 5, 6]])
"""The second row begins within a document; the third one is one."""


def test_documents_are_told_by_where_they_begin() -> None:
    documents = documents_of(POSITIONS == 0)
    assert documents.shape == (3, 1, 1, 7) and documents.dtype == torch.int32
    assert documents[:, 0, 0].tolist() == [[0, 0, 0, 0, 4, 5, 5], [0, 0, 2, 2, 2, 5, 5], [0] * 7]
    cumulative, longest = lengths_of(documents)
    assert (cumulative.tolist(), longest) == ([0, 4, 5, 7, 9, 12, 14, 21], 7)
    assert lengths_of(documents)[0] is cumulative  # read once for all layers
    documents[2, 0, 0, 3:] = 3  # and again once it is another one
    assert lengths_of(documents)[0].tolist() == [0, 4, 5, 7, 9, 12, 14, 17, 21]
    seen = mask_of(documents)[:, 0]
    assert seen[0, 6].tolist() == [False] * 5 + [True] * 2 and seen[2, 2].tolist() == [True] * 3 + [False] * 4


@pytest.mark.parametrize(("how", "kv_heads"), [("plain", 4), ("plain", 2), ("kept", 4), ("compiled", 2)])
def test_it_is_attention_with_a_mask(how: str, kv_heads: int) -> None:
    torch.manual_seed(1)
    documents = documents_of(POSITIONS == 0)
    given = [torch.randn(3, 7, heads, 8, dtype=torch.float64).transpose(1, 2) for heads in (4, kv_heads, kv_heads)]
    weights = torch.randn(3, 4, 7, 8, dtype=torch.float64)

    def loss(run: object, *heads: torch.Tensor) -> torch.Tensor:
        q, k, v = (item * 1.5 for item in heads)
        if run == "mask":
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask_of(documents), scale=0.3, enable_gqa=True)
        else:
            out = document_attention(q, k, v, documents, scale=0.3)
        return (out * weights).sum() + out.square().sum()

    leaves = [item.clone().requires_grad_() for item in given]
    expected = loss("mask", *leaves)
    expected.backward()
    with kernel_on_cpu() as calls:
        found = [item.clone().requires_grad_() for item in given]
        if how == "kept":
            value = checkpoint(loss, "", *found, use_reentrant=False, context_fn=_selective(["attention"]))
        else:
            run = torch.compile(loss, backend="aot_eager", fullgraph=True) if how == "compiled" else loss
            value = run("", *found)
        value.backward()
        assert calls == {"forward": 1, "backward": 1}, "what is kept is not computed again"
    assert torch.allclose(value, expected, rtol=1e-9, atol=1e-12)
    for one, another in zip(found, leaves, strict=True):
        assert torch.allclose(one.grad, another.grad, rtol=1e-9, atol=1e-12)


def test_without_the_kernel_it_is_torch_with_a_mask() -> None:
    torch.manual_seed(1)
    q, k, v = torch.randn(3, 3, 4, 7, 6).unbind()
    documents = documents_of(POSITIONS == 0)
    assert device_reason(q.device) == "there is no kernel for it on cpu"
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask_of(documents))
    assert torch.equal(document_attention(q, k, v, documents), expected)
    assert torch.ops.autolaunch.document_attention in saved_operators(["attention"])
    with torch.autocast("cpu", torch.bfloat16):
        assert document_attention(q, k, v, documents).dtype == torch.bfloat16
