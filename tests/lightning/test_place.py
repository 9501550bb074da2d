"""Which devices, ranks and processes a process takes for its own; no trainer, no process group, no GPU."""

from __future__ import annotations

import pytest
import torch
from lightning.fabric.plugins.environments import LightningEnvironment, TorchElasticEnvironment

from autolaunch_strategies.config import ConfigError, parallel_config, parse_mesh
from autolaunch_strategies.lightning.place import Place
from tests.support.one_rank import without_process_group

CPU = [torch.device("cpu")]
GPUS = [torch.device("cuda", index) for index in range(4)]


def place_of(mesh: str, devices: list[torch.device], nodes: int = 1, started: bool = False) -> Place:
    without_process_group()
    place = Place(parallel_config(mesh, mp="auto"))
    place.environment = TorchElasticEnvironment() if started else LightningEnvironment()
    place.devices = devices
    place.spread(nodes)
    return place


@pytest.mark.parametrize(
    ("mesh", "devices", "nodes", "shape", "mine"),
    [
        pytest.param("2", CPU, 1, "2", CPU * 2, id="cpu"),
        pytest.param("4", CPU, 2, "4", CPU * 2, id="cpu-on-two-machines"),
        pytest.param("-1", CPU * 3, 1, "3", CPU * 3, id="open-cpu"),
        pytest.param("2", GPUS, 1, "2", GPUS[:2], id="no-more-than-the-mesh-has"),
        pytest.param("4x2", GPUS, 2, "4x2", GPUS, id="gpus-on-two-machines"),
        pytest.param("dp-1xmp2", GPUS, 2, "4x2", GPUS, id="open-gpus"),
    ],
)
def test_every_rank_of_a_machine_has_a_device(
    mesh: str, devices: list[torch.device], nodes: int, shape: str, mine: list[torch.device]
) -> None:
    place = place_of(mesh, devices, nodes)
    assert (place.shape, place.devices, place.num_nodes) == (parse_mesh(shape), mine, nodes)
    assert place.device == mine[0]
    assert place.starts_processes


@pytest.mark.parametrize("mesh", ["4", "-1"])
@pytest.mark.parametrize(("visible", "device"), [(GPUS, GPUS[1]), (GPUS[:1], GPUS[0])], ids=["all", "its-own"])
def test_a_started_process_takes_the_device_of_its_local_rank(
    mesh: str, visible: list[torch.device], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "GROUP_RANK": "0"}.items():
        monkeypatch.setenv(key, value)
    place = place_of(mesh, visible, started=True)
    assert (place.shape, place.device) == (parse_mesh("4"), device)
    assert (place.global_rank, place.world_size, place.starts_processes) == (1, 4, False)


@pytest.mark.parametrize(
    ("mesh", "devices", "nodes", "message"),
    [
        pytest.param("8", GPUS, 1, "mesh=8: the mesh has 8 ranks (dp=8), but 4 processes are asked for (devices=4, "
                     "num_nodes=1)", id="gpus"),
        pytest.param("2", CPU * 3, 1, "mesh=2: the mesh has 2 ranks (dp=2), but 3 processes are asked for (devices=3, "
                     "num_nodes=1)", id="cpu"),
    ],
)  # fmt: skip
def test_other_numbers_of_devices_are_refused(mesh: str, devices: list[torch.device], nodes: int, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        place_of(mesh, devices, nodes)
    assert str(caught.value).startswith(message)
