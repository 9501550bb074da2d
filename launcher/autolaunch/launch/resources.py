"""What ranks need of the system before they meet: the network interface that leads to the others, and open files."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import math
import os
import resource
import socket
import struct
from collections.abc import Mapping
from pathlib import Path

from autolaunch.launch.place import Place
from autolaunch_strategies.config import ConfigError

SIOCGIFADDR = 0x8915
ELSEWHERE = "192.0.2.1"
"""An address that nobody has (RFC 5737): the way to it is the default route. Nothing is sent."""

WANTED_FILES = 65536
FILES_OF_A_RANK = 128
"""Open files of a rank beside its connections: libraries, data, logs, checkpoints."""

CONNECTIONS_PER_RANK = 2
"""Of gloo, to every other rank, at least: in the group of all ranks, and in one along an axis."""


def raise_file_limit(world_size: int) -> None:
    """Let this process and its children open as many files as it may.

    Raises:
        ConfigError: so many ranks need more connections than it may ever have.
    """
    soft, hard = (math.inf if limit == resource.RLIM_INFINITY else limit for limit in _file_limits())
    needed = FILES_OF_A_RANK + CONNECTIONS_PER_RANK * world_size
    most = min(hard, max(WANTED_FILES, needed))
    if soft < most:
        with contextlib.suppress(OSError, ValueError):  # the system may have limits of its own
            resource.setrlimit(resource.RLIMIT_NOFILE, (int(most), _file_limits()[1]))
    if most < needed:
        raise ConfigError(
            f"ulimit -n {most}",
            f"each of {world_size} ranks needs at least {needed} open files and connections, and this process may have "
            f"no more than {hard}",
            f"{needed} or more, set by the administrator (/etc/security/limits.conf; LimitNOFILE of slurmd or docker)",
            f"ulimit -Hn {needed}",
        )


def _file_limits() -> tuple[int, int]:
    return resource.getrlimit(resource.RLIMIT_NOFILE)


def choose_interface(place: Place, environ: Mapping[str, str] | None = None) -> str | None:
    """The network interface over which gloo should reach the other ranks; None if that was set, or can't be known.

    Gloo would take the one of the address of the host's own name, which on many machines is 127.0.1.1, or a bridge
    of containers. Here it is the one that the way to rank 0 takes; on the node of rank 0 itself that of the default
    route.
    """
    if (os.environ if environ is None else environ).get("GLOO_SOCKET_IFNAME"):
        return None
    several_nodes = place.world_size > place.local_world_size
    address = own_address_towards(place.master_addr, place.master_port)
    if several_nodes and (address is None or ipaddress.ip_address(address).is_loopback):
        address = own_address_towards(ELSEWHERE, 9)
    return None if address is None else interface_of(address)


def own_address_towards(host: str, port: int) -> str | None:
    """The address of this machine on the way to another one; nothing is sent there."""
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(where)
            return str(probe.getsockname()[0]).partition("%")[0]
    except OSError:
        return None


def interface_of(address: str) -> str | None:
    """The name of the interface that has an address; a loopback's for any address of that kind."""
    wanted = ipaddress.ip_address(address)
    found = interface_addresses()
    for name, own in found.items():
        if address in own:
            return name
    if wanted.is_loopback:
        return next(
            (name for name, own in found.items() if any(ipaddress.ip_address(a).is_loopback for a in own)), None
        )
    return None


def interface_addresses() -> dict[str, list[str]]:
    """The addresses of each interface, as Linux tells them; an interface has one of IPv4 here."""
    found: dict[str, list[str]] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found[name] = [socket.inet_ntoa(answer[20:24])]
            except OSError:  # it has none
                found[name] = []
    file = Path("/proc/net/if_inet6")
    for line in file.read_text(encoding="ascii").splitlines() if file.exists() else []:
        digits, *_, name = line.split()
        found.setdefault(name, []).append(str(ipaddress.IPv6Address(int(digits, 16))))
    return found
