"""Sharded and plain tensors in one call; the numbers on several ranks are compared in the zoo and the style tests."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn import functional as F

from autolaunch_strategies.tensor import views
from autolaunch_strategies.tensor.views import MixedTensors, plain
from tests.support.one_rank import mesh_of_one_rank


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    with mesh_of_one_rank() as mesh:
        yield mesh


def sharded(mesh: DeviceMesh, *shape: int) -> DTensor:
    torch.manual_seed(0)
    return distribute_tensor(torch.rand(*shape) + 0.1, mesh, [Shard(1)]).requires_grad_()


def test_one_number_is_that_of_all_ranks(mesh: DeviceMesh) -> None:
    tensor = sharded(mesh, 3, 4)
    with MixedTensors(mesh):
        penalty = 0.5 * tensor.square().sum()
        loss = torch.ones(()) + penalty
        rows = tensor.sum(1)
        loss.backward()
    assert penalty.placements == loss.placements == (Replicate(),)
    assert rows.placements == (Partial(),)  # as long as nobody reads them
    torch.testing.assert_close(loss.item(), 1 + 0.5 * plain(tensor).square().sum().item())
    assert tensor.grad is not None
    torch.testing.assert_close(plain(tensor.grad), plain(tensor).detach())


def test_a_function_without_a_rule_runs_whole_and_says_so_once(
    mesh: DeviceMesh, caplog: pytest.LogCaptureFixture
) -> None:
    tensor = sharded(mesh, 3, 4)
    with pytest.raises(NotImplementedError):
        torch.renorm(tensor, 2, 0, 0.5)  # if torch learns this, another function has to stand here
    views._warn_once.cache_clear()
    with caplog.at_level(logging.WARNING), MixedTensors(mesh):
        _, found = (torch.renorm(tensor, 2, 0, 0.5) for _ in range(2))
        found.sum().backward()
    expected = tensor.full_tensor().detach().requires_grad_()
    torch.renorm(expected, 2, 0, 0.5).sum().backward()
    assert torch.equal(plain(found), torch.renorm(expected, 2, 0, 0.5))
    assert tensor.grad is not None
    assert torch.equal(tensor.grad.full_tensor(), expected.grad)
    assert [record.message.split("(")[0] for record in caplog.records] == [
        "renorm does not run on sharded tensors and runs whole on every rank "
    ]


def test_what_is_wrong_anyway_raises_torchs_own_error(mesh: DeviceMesh) -> None:
    with MixedTensors(mesh), pytest.raises((RuntimeError, IndexError), match="Dimension out of range"):
        torch.cumsum(sharded(mesh, 3, 4), 7)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, dist.DistBackendError])
def test_an_error_that_whole_tensors_would_meet_as_well_is_raised_at_once(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    calls = []

    def fails(*args: object) -> None:
        calls.append(args)
        raise error("no more")

    with MixedTensors(mesh) as mode, pytest.raises(error, match="no more"):
        mode._run(fails, (sharded(mesh, 3, 4),), {})
    assert len(calls) == 1


def test_anomalies_are_detected_in_gradients_that_are_sharded(mesh: DeviceMesh) -> None:
    with torch.autograd.set_detect_anomaly(True), MixedTensors(mesh):
        (sharded(mesh, 3, 4) * 2).sum().backward()
        with pytest.raises(RuntimeError, match=r"SqrtBackward.*returned nan"):
            (sharded(mesh, 3, 4) * 0).sqrt().mul(0).sum().backward()


def test_plain_tensors_get_whole_gradients(mesh: DeviceMesh) -> None:
    weight = torch.full((4,), 2.0, requires_grad=True)
    with MixedTensors(mesh):
        out = sharded(mesh, 3, 4) * weight
        assert isinstance(out, DTensor)
        out.sum().backward()
    assert type(weight.grad) is torch.Tensor
    assert torch.allclose(weight.grad, plain(sharded(mesh, 3, 4)).sum(0))


def test_a_plain_tensor_that_is_changed_in_place_stays_plain(mesh: DeviceMesh) -> None:
    table = torch.zeros(3, 8)
    with MixedTensors(mesh), torch.no_grad():
        table[:, 4:] = sharded(mesh, 3, 4)
        table.add_(1)
    assert type(table) is torch.Tensor
    assert torch.equal(table[:, 4:], plain(sharded(mesh, 3, 4)) + 1)


def test_a_plain_tensor_that_is_changed_in_place_between_two_uses_has_another_gradient(mesh: DeviceMesh) -> None:
    def loss(factor: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        x = factor * torch.ones(4)
        first = weight + x
        x.mul_(factor)
        return (first + weight * x).sum()

    factor, expected = (torch.tensor(3.0, requires_grad=True) for _ in range(2))
    with MixedTensors(mesh):
        loss(factor, sharded(mesh, 3, 4)).backward()
    loss(expected, plain(sharded(mesh, 3, 4)).detach()).backward()
    assert factor.grad is not None and expected.grad is not None
    assert torch.allclose(factor.grad, expected.grad)


@pytest.mark.parametrize("drops", [lambda x: F.dropout(x, 0.0), lambda x: F.dropout(x, 0.5, training=False)])
def test_dropout_of_nothing_draws_nothing(mesh: DeviceMesh, drops: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """What comes next draws what it draws on one process."""
    tensor = sharded(mesh, 3, 4)
    torch.manual_seed(3)
    with MixedTensors(mesh):
        kept = drops(tensor)
    drawn = torch.rand(2)
    torch.manual_seed(3)
    assert torch.equal(drawn, torch.rand(2))
    assert torch.equal(plain(kept), plain(tensor))
