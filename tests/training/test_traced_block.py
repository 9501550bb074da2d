"""A block runs as a graph, or as it is where a graph would not do what it does; numbers on several ranks: the zoo."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from autolaunch_strategies.model.blocks import Block
from autolaunch_strategies.tensor.views import MixedTensors, plain
from autolaunch_strategies.training import traced_block
from autolaunch_strategies.training.compile import compile_traced
from tests.support.one_rank import mesh_of_one_rank


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    with mesh_of_one_rank() as mesh:
        yield mesh


class Body(nn.Module):
    """One layer, and what a test wants to happen in the forward; counts how often Python runs it."""

    def __init__(self, change: Callable[[Body, torch.Tensor], Any] = lambda body, x: x) -> None:
        super().__init__()
        self.layer, self.change = nn.Linear(4, 4), change
        self.counted: list[int] = []
        self.register_buffer("seen", torch.zeros(()))
        self.scale = 1.0

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        CALLS.append(1)
        y = self.change(self, self.layer(x)) * self.scale
        return plain(y if mask is None else y * mask)


CALLS: list[int] = []


def made(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch, change: Any = lambda body, x: x) -> Body:
    monkeypatch.setattr(torch, "compile", lambda graph, **_: graph.forward)
    torch.manual_seed(0)
    body = Body(change)
    body.layer.weight = nn.Parameter(distribute_tensor(body.layer.weight.detach(), mesh, [Shard(0)]))
    compile_traced({Block("body", body): body.forward}, True, mesh.get_group(), {})
    CALLS.clear()
    traced_block._REASONS.clear()
    return body


def gradients(body: Body, mesh: DeviceMesh, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    body.zero_grad()
    with MixedTensors(mesh):
        output = body(*args)
        output.square().sum().backward()
    assert body.layer.weight.grad is not None
    return output.detach(), plain(body.layer.weight.grad)


def test_python_runs_once_and_again_where_something_is_different(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    body, whole = made(mesh, monkeypatch), Body()
    whole.load_state_dict({key: plain(value) for key, value in body.state_dict().items()})
    x = torch.rand(3, 4)

    def runs(*args: Any) -> int:
        """How often Python ran; the numbers are those of a plain module."""
        before = len(CALLS)
        found = gradients(body, mesh, *args)
        count = len(CALLS) - before
        whole.scale = body.scale
        whole.zero_grad()
        expected = whole(*args)
        expected.square().sum().backward()
        torch.testing.assert_close(found, (expected.detach(), whole.layer.weight.grad))
        return count

    assert runs(x)
    assert not runs(x + 1)
    assert runs(x, torch.ones(4))
    assert runs(torch.rand(5, 4))
    assert not runs(x)
    body.scale = 2.0
    assert runs(x)
    body.scale = 1.0
    assert not runs(x)
    body.counted.append(1)  # the same list, with more in it
    assert runs(x)
    body.layer.register_module("more", None)
    assert runs(x)
    monkeypatch.setattr(traced_block, "_attributes", None)  # nothing has changed, so nothing is compared one by one
    assert not runs(x)
    with torch.no_grad(), MixedTensors(mesh):
        torch.testing.assert_close(body(x), whole(x))


def counts(body: Body, x: torch.Tensor) -> torch.Tensor:
    body.counted.append(1)
    return x


def draws(body: Body, x: torch.Tensor) -> torch.Tensor:
    return x * (random.random() > -1)


def replaces(body: Body, x: torch.Tensor) -> torch.Tensor:
    body.seen = body.seen + 1
    return x


def looks(body: Body, x: torch.Tensor) -> torch.Tensor:
    return x if x.sum() > -1e9 else -x


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (counts, "Body in it changes its attributes when it runs"),
        (draws, "it draws random numbers of Python's"),
        (replaces, "it puts another tensor in the place of seen when it runs"),
        (looks, "`return x if x.sum() > -1e9 else -x` (test_traced_block.py:"),
    ],
)
def test_what_a_graph_would_not_do_again_runs_as_it_is(
    mesh: DeviceMesh,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    change: Any,
    reason: str,
) -> None:
    body = made(mesh, monkeypatch, change)
    with caplog.at_level(logging.WARNING):
        first, second = (gradients(body, mesh, torch.ones(2, 4)) for _ in range(2))
    torch.testing.assert_close(first, second)
    assert [reason in record.message for record in caplog.records] == [True]
    if change is counts:
        assert body.counted == [1, 1]  # what the attempt did is undone
    if change is replaces:
        assert body.seen == 2


def test_hooks_of_others_run(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also one that is added when there is a graph already; those around the block need nothing."""
    body, seen = made(mesh, monkeypatch), []
    body.register_forward_hook(lambda *_: seen.append("around"))
    for _ in range(2):
        gradients(body, mesh, torch.ones(2, 4))
    assert seen == ["around"] * 2 and "runs as it is" not in caplog.text
    body.layer.register_forward_hook(lambda *_: seen.append("within"))
    for _ in range(2):
        gradients(body, mesh, torch.ones(2, 4))
    assert seen[2:] == ["within", "around"] * 2
    assert "Linear in it has a hook" in caplog.text


def test_a_block_of_too_many_sizes_is_not_traced_for_each(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    body = made(mesh, monkeypatch)
    monkeypatch.setattr(traced_block, "_MOST_GRAPHS", 2)
    for size in (1, 2, 3, 4):
        gradients(body, mesh, torch.ones(size, 4))
    assert "it is called in more than 2 ways" in caplog.text
