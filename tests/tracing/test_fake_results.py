"""What operators returned before, made anew, is what torch's own mode for fake tensors makes of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from autolaunch_strategies.torch_private.fake_results import FakeTensorsWithResults

Call = Callable[[Tensor, Tensor], Any]

REMEMBERED: dict[str, Call] = {
    "product": lambda x, w: x @ w,
    "linear of three dims": lambda x, w: F.linear(x.unsqueeze(0), w.t()),
    "an int": lambda x, w: torch.ones_like(x, dtype=torch.int64) * 2,
    "a float": lambda x, w: torch.ones_like(x, dtype=torch.int64) * 2.0,
    "a bool": lambda x, w: torch.ones_like(x, dtype=torch.bool) * True,
    "another type": lambda x, w: x.to(torch.bfloat16) + w.sum().to(torch.bfloat16),
    "views": lambda x, w: x.view(2, 2, 6).transpose(1, 2)[:, 1:3].expand(2, 2, 2),
    "a view of a view": lambda x, w: x[1:, 2:].t().select(0, 1),
    "as_strided": lambda x, w: x[2:].as_strided((2, 2), (1, 6), 3),
    "as_strided from its own place": lambda x, w: x[2:].as_strided((2, 2), (1, 6)),
    "split": lambda x, w: x.split(2)[1],
    "chunks": lambda x, w: torch.cat(x.chunk(2, 1)[::-1], 1),
    "reshape of a transposed": lambda x, w: w.t().reshape(-1),
    "contiguous": lambda x, w: w.t().contiguous(),
    "in place": lambda x, w: x.clone().mul_(2).add_(1),
    "in place on a view": lambda x, w: x.clone()[1:].zero_(),
    "two outputs": lambda x, w: torch.max(x, 1),
    "normal": lambda x, w: F.layer_norm(x, (6,)),
    "attention": lambda x, w: F.scaled_dot_product_attention(*[x.view(1, 2, 2, 6)] * 3, is_causal=True),
    "dropout": lambda x, w: F.dropout(x, 0.5),
    "a loss": lambda x, w: F.cross_entropy(x, torch.ones_like(x[:, 0], dtype=torch.int64)),
    "embedding": lambda x, w: F.embedding(torch.ones_like(x[:, 0], dtype=torch.int64), w),
    "detached": lambda x, w: x.detach(),
    "gradients": lambda x, w: torch.autograd.grad((torch.tanh(x @ w) ** 2).sum(), (x, w)),
}
LEFT_TO_TORCH: dict[str, Call] = {
    "a change of shape in place": lambda x, w: x.clone().unsqueeze_(0),
    "a change of size in place": lambda x, w: x.detach().clone().resize_(2, 2),
    "complex": lambda x, w: torch.view_as_complex(x.view(4, 3, 2)).conj().imag,
    "an output argument": lambda x, w: torch.add(x.detach(), 1, out=torch.empty_like(x)),
    "a part of a conjugate": lambda x, w: (x.view(4, 3, 2)[1:], torch.view_as_complex(x.view(4, 3, 2)).conj().imag[1:]),
    "known values": lambda x, w: torch.tensor([1, 2]) + 1,
    "sparse": lambda x, w: torch.sparse_coo_tensor(size=(3, 3)).coalesce().values(),
}


@contextmanager
def asked() -> Iterator[list[Any]]:
    """The operators that torch's own mode was asked for meanwhile."""
    seen: list[Any] = []
    own = FakeTensorMode.dispatch

    def dispatch(self: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(func)
        return own(self, func, *args, **kwargs)

    with mock.patch.object(FakeTensorMode, "dispatch", dispatch):
        yield seen


def has_address(item: Tensor) -> bool:
    """Whether it may be asked where its memory is: user code does, to find out what shares memory."""
    try:
        item.data_ptr()
    except RuntimeError:
        return False
    return True


def about(call: Call) -> list[tuple[Any, ...]]:
    """All that there is to know of what a call returns, and which of its tensors share memory."""
    x, w = torch.empty(4, 6, requires_grad=True), torch.empty(6, 6, requires_grad=True)
    returned = call(x, w)
    outputs = [returned] if isinstance(returned, Tensor) else list(returned)
    memories = [item.untyped_storage()._cdata for item in (x, w, *outputs)]
    return [
        (
            item.shape,
            item.stride(),
            item.storage_offset(),
            item.dtype,
            item.device,
            item.requires_grad,
            type(item.grad_fn).__name__,
            item._is_view(),
            item.untyped_storage().nbytes(),
            memories.index(memory),
            torch._C._dispatch_key_set(item),
            has_address(item),
            {key: value for key, value in vars(item).items() if key not in ("fake_mode", "constant")},
        )
        for item, memory in zip(outputs, memories[2:], strict=True)
    ]


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", [*REMEMBERED, *LEFT_TO_TORCH])
def test_the_same_as_torch_without_results(name: str, device: str) -> None:
    call = (REMEMBERED | LEFT_TO_TORCH)[name]
    with FakeTensorMode(allow_non_fake_inputs=True), torch.device(device):
        expected = about(call)
    with FakeTensorsWithResults(allow_non_fake_inputs=True), torch.device(device):
        assert [about(call) for _ in range(3)] == [expected] * 3


@pytest.mark.parametrize("name", REMEMBERED)
def test_torch_is_asked_once(name: str) -> None:
    with FakeTensorsWithResults(allow_non_fake_inputs=True):
        about(REMEMBERED[name])
    with FakeTensorsWithResults(allow_non_fake_inputs=True), asked() as seen:
        about(REMEMBERED[name])
    made_from_nothing = {"empty", "ones", "zeros", "full", "scalar_tensor", "arange"}
    assert [item for item in seen if item.overloadpacket.__name__ not in made_from_nothing] == []


def test_what_else_a_result_depends_on() -> None:
    with FakeTensorsWithResults(allow_non_fake_inputs=True):
        whole = torch.ones(3, dtype=torch.int64)
        types = [(whole / 2).dtype]
        torch.set_default_dtype(torch.float64)
        try:
            types.append((whole / 2).dtype)
        finally:
            torch.set_default_dtype(torch.float32)
        assert types == [torch.float32, torch.float64]
        with torch.inference_mode():
            assert (whole / 2).is_inference()
        assert not (whole / 2).is_inference()


def test_views_in_inference_mode_are_of_the_kind_of_what_they_show() -> None:
    """As of a frozen teacher's inputs, and of what it makes of them."""
    with FakeTensorsWithResults(allow_non_fake_inputs=True):
        whole = torch.ones(2, 3)
        with torch.inference_mode():
            its_own = torch.ones(2, 3)
            assert [its_own.t().is_inference(), whole.t().is_inference()] == [True, False]
        assert [its_own.t().is_inference(), whole.t().is_inference()] == [True, False]


def test_tensors_of_another_mode_are_refused_as_by_torch() -> None:
    with FakeTensorsWithResults():
        mine = torch.empty(2)
        _ = mine + mine
    with FakeTensorsWithResults(), pytest.raises(AssertionError, match="fake mode"):
        _ = mine + mine
