"""A kernel for packed documents on a CPU: a plain loop over them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any
from unittest import mock

import torch

from autolaunch_strategies.model import document_attention
from autolaunch_strategies.torch_private import attention


@contextmanager
def kernel_on_cpu() -> Iterator[dict[str, int]]:
    """Within it attention of documents is computed by the loop, on any device and in any type; counts its calls."""
    calls = {"forward": 0, "backward": 0}

    def forward(*args: Any) -> tuple[Any, Any]:
        calls["forward"] += 1
        return varlen(*args)

    def backward(*args: Any) -> tuple[Any, Any, Any]:
        calls["backward"] += 1
        return varlen_backward(*args)

    with (
        mock.patch.object(attention, "varlen_attention", forward),
        mock.patch.object(attention, "varlen_attention_backward", backward),
        mock.patch.object(document_attention, "kernel_takes", lambda *tensors: True),
        mock.patch.object(document_attention, "device_reason", lambda device: None),
    ):
        yield calls


def varlen(q: Any, k: Any, v: Any, cumulative: Any, longest: int, scale: float) -> tuple[Any, Any]:
    """As `varlen_attention`."""
    _check(q, k, v, cumulative, longest)
    out, lse = torch.empty_like(q), q.new_empty((q.shape[1], len(q)))
    for start, end in pairwise(cumulative.tolist()):
        keys, values = (_repeated(item[start:end], q.shape[1]) for item in (k, v))
        scores = _scores(q[start:end], keys, scale)
        lse[:, start:end] = scores.logsumexp(-1)
        out[start:end] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
    return out, lse


def varlen_backward(
    grad: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, cumulative: Any, longest: int, scale: float
) -> tuple[Any, Any, Any]:
    """As `varlen_attention_backward`, from the log-sum-exp."""
    _check(q, k, v, cumulative, longest)
    dq, dk, dv = (torch.zeros_like(item) for item in (q, k, v))
    group = q.shape[1] // k.shape[1]
    for start, end in pairwise(cumulative.tolist()):
        part = slice(start, end)
        keys, values = (_repeated(item[part], q.shape[1]) for item in (k, v))
        weights = (_scores(q[part], keys, scale) - lse[:, part, None]).exp()
        inner = (grad[part] * out[part]).sum(-1).T[:, :, None]
        scores = weights * (torch.einsum("qhd,khd->hqk", grad[part], values) - inner) * scale
        dq[part] = torch.einsum("hqk,khd->qhd", scores, keys)
        dk[part] = torch.einsum("hqk,qhd->khd", scores, q[part]).unflatten(1, (-1, group)).sum(2)
        dv[part] = torch.einsum("hqk,qhd->khd", weights, grad[part]).unflatten(1, (-1, group)).sum(2)
    return dq, dk, dv


def _check(q: Any, k: Any, v: Any, cumulative: Any, longest: int) -> None:
    """What the kernel of a GPU takes for granted."""
    assert cumulative.dtype == torch.int32 and cumulative[0] == 0 and cumulative[-1] == len(q) == len(k) == len(v)
    assert longest == cumulative.diff().max() and cumulative.diff().min() > 0
    assert all(item.dim() == 3 and item.stride(-1) == 1 for item in (q, k, v))


def _repeated(heads: Any, count: int) -> Any:
    return heads.repeat_interleave(count // heads.shape[1], 1)


def _scores(q: Any, k: Any, scale: float) -> Any:
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    return scores.masked_fill(torch.ones(scores.shape[1:], dtype=torch.bool).triu(1), -torch.inf)
