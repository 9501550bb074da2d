"""`recompute=offload`: the gradients of `none`, bit by bit, while what blocks save waits in host memory."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autolaunch_strategies.model.blocks import Block
from autolaunch_strategies.training import offload
from tests.support.ranks import Group, GroupOf

SIZE, BLOCKS = 16, 4


class Layer(nn.Module):
    """Saves views of one storage, an output, a cast, a mask, a parameter's transpose; draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(SIZE), nn.Linear(SIZE, 3 * SIZE), nn.Linear(SIZE, SIZE)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        weights = (q @ k.transpose(-1, -2) + mask).softmax(-1)
        return x + self.out(nn.functional.dropout((weights @ v).double().exp().float().log(), 0.1))


@pytest.fixture(autouse=True)
def however_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "SMALLEST", 1)


@pytest.fixture(scope="module")
def two(group_of: GroupOf) -> Group:
    return group_of(Path(__file__).with_name("offload_cases.py"), "two", 2)


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """References to the storages that have left for the host, in order."""
    storages: list[Any] = []
    out = offload._Lane.out

    def seen(lane: Any, storage: torch.UntypedStorage) -> Any:
        item = out(lane, storage)
        storages.append(weakref.ref(item))
        return item

    monkeypatch.setattr(offload._Lane, "out", seen)
    return storages


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer() for _ in range(BLOCKS)))


def loss_of(model: nn.Module, autocast: bool = False) -> torch.Tensor:
    torch.manual_seed(1)
    x, mask = torch.randn(2, 3, SIZE, requires_grad=True), torch.rand(3, 3)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        for layer in model:
            x = layer(x, mask)
    return x.float().square().mean()


def offloaded() -> nn.Sequential:
    model = layers()
    offload.apply_offload(Block(str(number), layer) for number, layer in enumerate(model))
    return model


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("autocast", [False, True])
def test_gradients_are_those_of_none(autocast: bool, moved: list[Any]) -> None:
    plain, model = layers(), offloaded()
    for _ in range(2):  # accumulates: passes after the first one find another before them
        loss_of(plain, autocast).backward()
        loss_of(model, autocast).backward()
    assert all(torch.equal(*pair) for pair in zip(gradients(plain), gradients(model), strict=True))
    assert moved


def test_what_is_on_the_host_is_what_gradients_are_computed_of(moved: list[Any]) -> None:
    plain, model = layers(), offloaded()
    loss_of(plain).backward()
    loss = loss_of(model)
    for item in moved:
        item().host.zero_()
    loss.backward()
    same = [all(map(torch.equal, gradients(one), gradients(other))) for one, other in zip(plain, model, strict=True)]
    assert same == [False, False, False, True]  # what the last block has saved has not left the device yet


def test_of_two_blocks_at_a_time_tensors_are_on_the_device(moved: list[Any]) -> None:
    model = offloaded()
    there: list[int] = []
    for layer in model:
        layer.norm.register_full_backward_hook(
            lambda *_: there.append(sum(item() is not None and item().device is not None for item in moved))
        )
    loss = loss_of(model)
    each = len(moved) // BLOCKS
    assert [item().device is not None for item in moved] == [False] * each * (BLOCKS - 1) + [True] * each
    loss.backward()
    assert len(there) == BLOCKS
    assert 0 < max(there) <= 2 * each
    assert [item() for item in moved] == [None] * len(moved)


def test_each_storage_moves_once_and_parameters_and_masks_never(moved: list[Any]) -> None:
    """Norm's input, output and two statistics; q, k and v, of one storage; the softmax; the exponential in fp64 and in
    fp32; dropout's factors and its result.
    """
    loss = loss_of(offloaded())
    sizes = sorted(len(item().host) for item in moved[: len(moved) // BLOCKS])
    rows, fp32 = 2 * 3, 2 * 3 * SIZE * 4
    assert sizes == sorted([fp32, fp32, rows * 4, rows * 4, 3 * fp32, rows * 3 * 4, 2 * fp32, fp32, fp32, fp32])
    del loss  # until here it keeps all of it


CASES = ["fsdp", "seq_parallel", "pipeline", "context", "compiled"]


@pytest.mark.full
@pytest.mark.parametrize("case", CASES)
def test_gradients_on_two_ranks_are_those_of_none(two: Group, case: str) -> None:
    for rank in range(2):
        assert two.read(case, rank)["different"] == []
        assert two.read(case, rank)["moved"] > 0
