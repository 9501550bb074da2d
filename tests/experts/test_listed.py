"""Experts of a list whose mixture runs twice: the numbers of the plain module, and what such a run refuses."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autolaunch_strategies.config import ConfigError
from autolaunch_strategies.experts.find import find_mixtures
from autolaunch_strategies.experts.listed import ListedExperts
from autolaunch_strategies.experts.whole import shard_each
from tests.support.one_rank import mesh_of_one_rank

WIDTH, EXPERTS = 4, 3


class Mixture(nn.Module):
    """The usual loop: a router, experts called with their tokens, those without tokens left out."""

    def __init__(self, call: Callable[[Any, int, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))
        self.register_buffer("seen", torch.zeros(()))
        self.calls = 0
        self.call = call or (lambda mixture, number, rows: mixture.experts[number](rows))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        flat = nn.functional.dropout(x.flatten(0, 1), 0.25, self.training)
        weights, index = self.router(flat).softmax(-1).topk(2, -1)
        out = torch.zeros_like(flat)
        for number in range(EXPERTS):
            rows, place = torch.where(index == number)
            if len(rows):
                out = out.index_add(0, rows, self.call(self, number, flat[rows]) * weights[rows, place, None])
        return out.view_as(x)


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    with mesh_of_one_rank() as made:
        yield made


def shared_out(model: Mixture, mesh: DeviceMesh) -> Mixture:
    (mixture,) = find_mixtures(model)
    assert mixture.caller is model
    list(shard_each(mixture.module, mesh))
    ListedExperts(mixture, mesh.get_group(), None)
    return model


def test_a_mixture_that_runs_twice_is_as_one_that_runs_once(mesh: DeviceMesh) -> None:
    torch.manual_seed(3)
    plain = Mixture()
    with torch.no_grad():
        plain.router.bias[2] = -100.0  # no token comes to the last expert
    twice = shared_out(copy.deepcopy(plain), mesh)
    x = torch.randn(2, 5, WIDTH)
    outputs = []
    for model in (plain, twice):
        torch.manual_seed(1)
        outputs.append(model(x))
        outputs[-1].square().sum().backward()
        outputs.append(torch.rand(3))  # random numbers go on alike
    for found, expected in zip(outputs[2:], outputs[:2], strict=True):
        torch.testing.assert_close(found, expected)
    assert (plain.calls, twice.calls) == (1, 1)
    for (name, parameter), other in zip(twice.named_parameters(), plain.parameters(), strict=True):
        found = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
        assert (found is None) == (other.grad is None) == name.startswith("experts.2"), name
        if found is not None:
            torch.testing.assert_close(found, other.grad)


def chained(mixture: Any, number: int, rows: Tensor) -> Tensor:
    return mixture.experts[number](mixture.experts[number](rows))


def with_two_tensors(mixture: Any, number: int, rows: Tensor) -> Tensor:
    return mixture.experts[number](rows, rows)


def counting(mixture: Any, number: int, rows: Tensor) -> Tensor:
    mixture.seen += len(rows)
    return mixture.experts[number](rows)


def by_turns(mixture: Any, number: int, rows: Tensor) -> Tensor:
    rows = rows[: len(rows) - mixture.experts[0].turns.pop()]
    return mixture.experts[number](rows)


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (chained, "called with what another one, or it itself, has returned"),
        (with_two_tensors, "more than one tensor of rows"),
        (counting, "it changes its buffer `seen`"),
        (by_turns, "differently when it runs again on the same tokens"),
    ],
)
def test_what_can_not_run_twice_is_refused(call: Any, why: str, mesh: DeviceMesh) -> None:
    model = shared_out(Mixture(call), mesh)
    model.experts[0].turns = [1, 1, 1, 0, 0, 0]  # kept by a module that belongs to an expert, so it stays changed
    with pytest.raises(ConfigError, match="its experts can't be shared out") as raised:
        model(torch.randn(2, 5, WIDTH))
    assert why in str(raised.value)


def test_an_expert_is_called_by_its_mixture_alone(mesh: DeviceMesh) -> None:
    model = shared_out(Mixture(), mesh)
    with pytest.raises(ConfigError, match="called by other code"):
        model.experts[1](torch.randn(3, WIDTH))
