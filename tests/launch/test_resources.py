"""The interface that leads to the other ranks, and the limit of open files."""

from __future__ import annotations

import resource
import socket

import pytest

from autolaunch.launch import resources
from autolaunch.launch.place import Place
from autolaunch_strategies.config import ConfigError
from tests.support.messages import assert_told

ADDRESSES = {"lo": ["127.0.0.1", "::1"], "docker0": ["172.17.0.1"], "ib0": ["10.1.0.7"], "eth0": ["192.168.1.7"]}
MAIN = {"node1": "10.1.0.7", "here": "127.0.1.1", resources.ELSEWHERE: "192.168.1.7", "127.0.0.1": "127.0.0.1"}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "interface_addresses", lambda: ADDRESSES)
    monkeypatch.setattr(resources, "own_address_towards", lambda host, port: MAIN.get(host))


@pytest.mark.parametrize(
    ("master", "nodes", "set_by_hand", "interface"),
    [
        pytest.param("node1", 2, None, "ib0", id="the way to rank 0"),
        pytest.param("here", 2, None, "eth0", id="a name that is 127.0.1.1 on its own node"),
        pytest.param("here", 1, None, "lo", id="one node"),
        pytest.param("127.0.0.1", 1, None, "lo", id="torchrun on one node"),
        pytest.param("unknown", 2, None, "eth0", id="no way known"),
        pytest.param("unknown", 1, None, None, id="nothing known"),
        pytest.param("node1", 2, "bond0", None, id="set by hand"),
    ],
)
@pytest.mark.usefixtures("machine")
def test_gloo_takes_the_way_to_rank_0(master: str, nodes: int, set_by_hand: str | None, interface: str | None) -> None:
    place = Place("slurm", 1, 2 * nodes, 0, 2, master_addr=master, master_port=29500)
    environ = {"GLOO_SOCKET_IFNAME": set_by_hand} if set_by_hand else {}
    assert resources.choose_interface(place, environ) == interface


def test_interfaces_of_this_machine() -> None:
    loopback = resources.interface_of("127.0.0.1")
    assert loopback in {name for _, name in socket.if_nameindex()}
    assert resources.own_address_towards("127.0.0.1", 9) == "127.0.0.1"


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[int, int]]:
    now = {"files": (1024, 4096)}
    monkeypatch.setattr(resource, "getrlimit", lambda which: now["files"])
    monkeypatch.setattr(resource, "setrlimit", lambda which, both: now.update(files=both))
    return now


def test_the_limit_of_open_files_is_raised(limits: dict[str, tuple[int, int]]) -> None:
    resources.raise_file_limit(8)
    assert limits["files"] == (4096, 4096)


def test_a_limit_that_is_too_low_is_told(limits: dict[str, tuple[int, int]]) -> None:
    with pytest.raises(ConfigError) as error:
        resources.raise_file_limit(2048)
    facts = ("2048 ranks", "4224 open files")
    assert_told(str(error.value), "ulimit -n 4096", *facts, write="ulimit -Hn 4224", allowed=("4224",))
