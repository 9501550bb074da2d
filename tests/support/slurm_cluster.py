"""A Slurm of two nodes on this one machine, for tests: no accounting, no services, all in one directory."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

DAEMONS = ("munged", "slurmctld", "slurmd", "srun")
NODES = ("n1", "n2")


def missing() -> list[str]:
    """What this machine lacks for such a cluster."""
    lacks = [name for name in DAEMONS if shutil.which(name) is None]
    return lacks if os.geteuid() == 0 else [*lacks, "root"]


@contextlib.contextmanager
def cluster(directory: Path) -> Iterator[dict[str, str]]:
    """Start the daemons; gives the environment in which `srun` finds them, and ends them afterwards."""
    processes: list[subprocess.Popen[bytes]] = []
    directory.chmod(0o755)  # munged refuses a socket that others cannot reach
    log = (directory / "daemons.log").open("wb")

    def start(*command: str) -> None:
        process = subprocess.Popen(
            command, env=env, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True
        )
        processes.append(process)

    key = directory / "munge.key"
    key.write_bytes(secrets.token_bytes(1024))
    key.chmod(0o400)
    configuration = directory / "slurm.conf"
    configuration.write_text(_configuration(directory))
    env = os.environ | {"SLURM_CONF": str(configuration)}
    try:
        munge = {"socket": "munge.socket", "key-file": "munge.key", "pid-file": "munge.pid"}
        munge |= {"log-file": "munge.log", "seed-file": "munge.seed"}
        start("munged", "--foreground", "--force", *(f"--{name}={directory / file}" for name, file in munge.items()))
        _wait_for((directory / "munge.socket").exists, "munged", log.name)
        start("slurmctld", "-D", "-c")
        for node in NODES:
            start("slurmd", "-D", "-c", "-N", node)

        def idle() -> bool:
            info = subprocess.run(["sinfo", "-h", "-N", "-o", "%T"], env=env, capture_output=True, text=True)
            return info.stdout.split() == ["idle"] * len(NODES)

        _wait_for(idle, "two idle nodes", log.name)
        yield env
    finally:
        for process in reversed(processes):
            process.terminate()
        for process in reversed(processes):
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        log.close()


def _wait_for(condition: Callable[[], bool], what: str, log: str) -> None:
    end = time.monotonic() + 30
    while not condition():
        if time.monotonic() > end:
            raise RuntimeError(f"waited in vain for {what}:\n{Path(log).read_text(errors='replace')[-3000:]}")
        time.sleep(0.1)


def _configuration(directory: Path) -> str:
    host = socket.gethostname().split(".")[0]
    ports = _free_ports(1 + len(NODES))
    settings = {
        "ClusterName": "test",
        "SlurmctldHost": f"{host}(127.0.0.1)",
        "SlurmctldPort": ports[0],
        "SlurmUser": "root",
        "AuthType": "auth/munge",
        "CryptoType": "crypto/munge",
        # A job that is queued again waits for as long as a credential lives: two minutes if nothing is said.
        "AuthInfo": f"socket={directory / 'munge.socket'},cred_expire=5",
        "StateSaveLocation": directory / "state",
        "SlurmdSpoolDir": directory / "spool.%n",
        "SlurmctldPidFile": directory / "slurmctld.pid",
        "SlurmdPidFile": directory / "slurmd.%n.pid",
        "SlurmctldLogFile": directory / "slurmctld.log",
        "SlurmdLogFile": directory / "slurmd.%n.log",
        "ProctrackType": "proctrack/linuxproc",
        "TaskPlugin": "task/none",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_CPU",
        "AccountingStorageType": "accounting_storage/none",
        "JobAcctGatherType": "jobacct_gather/none",
        "MpiDefault": "none",
        # The nodes may claim more CPUs than the machine has.
        "SlurmdParameters": "config_overrides",
        "ReturnToService": 2,
        "KillWait": 5,
    }
    lines = [f"{name}={value}" for name, value in settings.items()]
    lines += [
        f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=4 RealMemory=100 State=UNKNOWN"
        for node, port in zip(NODES, ports[1:], strict=True)
    ]
    lines.append(f"PartitionName=all Nodes={','.join(NODES)} Default=YES MaxTime=INFINITE State=UP")
    (directory / "state").mkdir()
    for node in NODES:
        (directory / f"spool.{node}").mkdir()
    return "\n".join(lines) + "\n"


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in sockets]
