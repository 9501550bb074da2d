"""Who am I: alone, or one rank among several that torchrun, srun or our own parent started."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from autolaunch_strategies.config import ConfigError

PORTS = range(15000, 30000)
"""Where ranks of one Slurm step meet: above the reserved ports, below those that Linux hands out by itself."""

_OF_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR")
"""What torchrun, or something like it, sets for every rank."""


@dataclass(frozen=True)
class Place:
    """Where this process stands among the ranks of a run."""

    kind: str = "alone"
    """`alone`, `local` (started by `autolaunch` itself), `torchrun` (or what sets the same variables), `slurm`."""
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    master_addr: str = "127.0.0.1"
    """Host of rank 0, where all ranks meet."""
    master_port: int = 0
    listen_fd: int | None = None
    """On rank 0 of kind `local`: the descriptor that listens on `master_port` already."""

    def environment(self, run_id: str) -> dict[str, str]:
        """The variables that torchrun would set for this rank, so that what recognises torchrun recognises us."""
        nodes = -(-self.world_size // self.local_world_size)
        return {
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.local_rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "GROUP_RANK": str(self.node_rank),
            "GROUP_WORLD_SIZE": str(nodes),
            "ROLE_NAME": "default",
            "ROLE_RANK": str(self.rank),
            "ROLE_WORLD_SIZE": str(self.world_size),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
            "TORCHELASTIC_RUN_ID": run_id,
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            # The store on MASTER_PORT is up before anybody could want to host one there.
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }


def place(environ: Mapping[str, str] | None = None) -> Place:
    """Read this process's place from its environment.

    `RANK`, `WORLD_SIZE` and `MASTER_ADDR` together mean torchrun or something like it; a numeric `SLURM_STEP_ID` of
    more than one task means srun. An sbatch script and an salloc shell have no step id, so they are alone.

    Raises:
        ConfigError: one of the launchers is recognised, but what it says makes no sense, or is not all.
    """
    env = _Environment(os.environ if environ is None else environ)
    if all(env.get(name) for name in _OF_TORCHRUN):
        return _torchrun(env)
    if env.get("SLURM_STEP_ID").isdecimal() and env.number("SLURM_STEP_NUM_TASKS", "1", at_least=1) > 1:
        return _slurm(env)
    found = [name for name in _OF_TORCHRUN if env.get(name)]
    # Of one rank, or of the first with nothing said of others, they are strays.
    if env.get("WORLD_SIZE") not in ("", "1") or env.get("RANK") not in ("", "0"):
        absent = [name for name in _OF_TORCHRUN if name not in found]
        raise ConfigError(
            " ".join(f"{name}={env.get(name)}" for name in found),
            f"of the variables of torchrun only these are set, and not {', '.join(absent)}: each rank would be a run "
            "of its own",
            "all of them, for one of several ranks; none, for a run of its own",
            f"unset {' '.join(found)}",
        )
    return Place()


class _Environment:
    def __init__(self, variables: Mapping[str, str]) -> None:
        self._variables = variables

    def get(self, name: str, default: str = "") -> str:
        return self._variables.get(name, default).strip()

    def number(self, name: str, default: str = "", *, at_least: int = 0, below: int | None = None) -> int:
        text = self.get(name) or default
        limit = f"{at_least} or more" if below is None else f"{at_least} to {below - 1}"
        if not text:
            raise ConfigError(name, "this variable is missing, though others of the same launcher are set", limit)
        if not text.isdecimal() or int(text) < at_least or (below is not None and int(text) >= below):
            raise ConfigError(f"{name}={text}", "this is not a number that a launcher sets", limit)
        return int(text)


def _torchrun(env: _Environment) -> Place:
    world_size = env.number("WORLD_SIZE", at_least=1)
    rank = env.number("RANK", below=world_size)
    # Some cluster operators start one process per machine and name neither of the local variables.
    local_world_size = env.number("LOCAL_WORLD_SIZE", "1", at_least=1, below=world_size + 1)
    return Place(
        kind="torchrun",
        rank=rank,
        world_size=world_size,
        local_rank=env.number("LOCAL_RANK", "0", below=local_world_size),
        local_world_size=local_world_size,
        node_rank=env.number("GROUP_RANK", str(rank // local_world_size)),
        master_addr=env.get("MASTER_ADDR"),
        master_port=env.number("MASTER_PORT", at_least=1, below=65536),
    )


def _slurm(env: _Environment) -> Place:
    world_size = env.number("SLURM_STEP_NUM_TASKS", at_least=1)
    node_rank = env.number("SLURM_NODEID")
    local_world_size = _tasks_of_node(env, node_rank)
    # After a start that found its port taken the next one has another; jobs of one time keep off each other's.
    start = env.number("SLURM_JOB_ID") * 31 + env.number("SLURM_STEP_ID") + env.number("SLURM_RESTART_COUNT", "0") * 997
    return Place(
        kind="slurm",
        rank=env.number("SLURM_PROCID", below=world_size),
        world_size=world_size,
        local_rank=env.number("SLURM_LOCALID", below=local_world_size),
        local_world_size=local_world_size,
        node_rank=node_rank,
        master_addr=env.get("MASTER_ADDR") or _first_host(env),
        master_port=env.number("MASTER_PORT", str(PORTS[start % len(PORTS)]), at_least=1, below=65536),
    )


def _tasks_of_node(env: _Environment, node_rank: int) -> int:
    text = env.get("SLURM_STEP_TASKS_PER_NODE")
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if not match:
            raise ConfigError(
                f"SLURM_STEP_TASKS_PER_NODE={text}", "this is not a list of task counts", "such as 4(x2),3"
            )
        counts += [int(match[1])] * int(match[2] or 1)
    if node_rank >= len(counts):
        raise ConfigError(f"SLURM_NODEID={node_rank}", f"the step has {len(counts)} nodes", f"0 to {len(counts) - 1}")
    return counts[node_rank]


def _first_host(env: _Environment) -> str:
    nodes = env.get("SLURM_STEP_NODELIST")
    first = re.match(r"(?:[^\[\],]|\[[\d,-]+\])+", nodes)
    if not first:
        raise ConfigError(f"SLURM_STEP_NODELIST={nodes}", "this is not a list of hosts", "such as n[1-4,7],m2")
    return re.sub(r"\[(\d+)[\d,-]*\]", r"\1", first[0])


def check_master_resolves(where: Place) -> None:
    """Look up the host of rank 0 now: without it every rank would wait in silence until its timeout.

    Raises:
        ConfigError: the name does not resolve on this machine.
    """
    try:
        socket.getaddrinfo(where.master_addr, where.master_port)
    except OSError as error:
        raise ConfigError(
            f"MASTER_ADDR={where.master_addr}",
            f"the host of rank 0 has no address on {socket.gethostname()}",
            "a name or an address that every node can reach",
            "export MASTER_ADDR=<address of the node of rank 0>",
        ) from error
