"""Where the values of a model are while it gets its place on a device, which fake tensors stand for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from autolaunch_strategies.data_parallel.gradients import gradient_norm
from autolaunch_strategies.model.construction import Construction
from autolaunch_strategies.model.materialise import materialise, place_on, share_values
from tests.support.one_rank import mesh_of_one_rank

GPU = torch.device("cuda", 0)


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    with mesh_of_one_rank() as made:
        yield made


@contextmanager
def fake() -> Iterator[None]:
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield


def model() -> nn.Module:
    made = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 4))
    made[2].register_parameter("scale", nn.Parameter(torch.ones(())))
    return made


def test_recurrent_layers_get_their_values() -> None:
    """torch swaps no tensor to which there are weak references, and these layers hold some."""
    construction = Construction(seed=3)
    with construction.recording():
        layer = nn.LSTM(4, 5, num_layers=2, batch_first=True)
    construction.remember(layer)
    materialise(layer, torch.device("cpu"), construction)
    inputs = torch.randn(2, 7, 4)
    again = nn.LSTM(4, 5, num_layers=2, batch_first=True)
    again.load_state_dict(layer.state_dict())
    assert torch.equal(layer(inputs)[0], again(inputs)[0])
    assert len({parameter.std().item() for parameter in layer.parameters()}) == 8
    layer(inputs)[0].sum().backward()
    assert all(parameter.grad is not None for parameter in layer.parameters())


def shard(module: nn.Module, mesh: DeviceMesh) -> None:
    """As `fully_shard` leaves the last layer of `model`, with its scalar left out."""
    for name in ("weight", "bias"):
        local = module[2]._parameters[name]
        sharded = DTensor.from_local(local.detach(), mesh, [Shard(0)], run_check=False)
        module[2]._parameters[name] = nn.Parameter(sharded)


def test_a_model_in_host_memory_travels_tensor_by_tensor_and_stays_there(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    travelled = []
    monkeypatch.setattr(dist, "broadcast", lambda tensor, *_, **__: travelled.append((tensor.device, tensor.shape)))
    monkeypatch.setattr(torch.Tensor, "data_ptr", lambda tensor: id(tensor))  # fake tensors have none
    with fake():
        module = model()
        share_values(module, mesh.get_group(), GPU)
        tensors = [*module.parameters(), *module.buffers()]
        assert travelled == [(GPU, tensor.shape) for tensor in tensors]
        assert {tensor.device.type for tensor in tensors} == {"cpu"}


def test_what_is_not_sharded_goes_to_the_device_at_the_end(mesh: DeviceMesh) -> None:
    module, elsewhere = model(), torch.device("meta")
    shard(module, mesh)
    module[2].register_buffer("seen", torch.zeros(3))
    del module[2].scale  # a real device takes `parameter.data = ...`, which meta does not
    place_on(module, elsewhere)
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        assert tensor.device == (torch.device("cpu") if isinstance(tensor, DTensor) else elsewhere), name


def test_norms_of_gradients_in_host_memory_travel_on_the_device(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    parameter = nn.Parameter(DTensor.from_local(torch.ones(3), mesh, [Shard(0)], run_check=False))
    parameter.grad = torch.ones_like(parameter)
    travelled = []
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, **_: travelled.append(tensor.device))
    monkeypatch.setattr(mesh, "_device_type", "cuda")
    with fake():
        gradient_norm([parameter])
    assert [device.type for device in travelled] == ["cuda"]
