"""cluster=local: the machine at hand as values of `config.cluster.Cluster`, measured before or guessed. Torch-free.

`autolaunch calibrate` stores what it measures in the user's cache directory, one file for each number of ranks.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import platform
import re
import subprocess
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

from autolaunch.directories import CONF, user_cache
from autolaunch.machine.devices import visible_devices
from autolaunch_strategies.config import ConfigError
from autolaunch_strategies.planner.constants import Constants

SHARE_OF_MEMORY = 0.9
"""What the ranks of a CPU may take of the memory of their machine."""

_PROFILES = {
    r"GB300": "gb300",
    r"GB200": "gb200",
    r"B300": "b300",
    r"B200": "b200",
    r"H200": "h200",
    r"H100": "h100",
    r"A100.*40 ?GB": "a100_40",
    r"A100": "a100_80",
}
"""Names of GPUs as the driver has them, and the profile that is the first guess for them."""


def this_machine(
    ranks: int | None = None, accelerator: str = "auto", where: str = "cluster=local", measured: bool = True
) -> dict[str, Any]:
    """This machine with so many devices, or on a CPU ranks.

    Args:
        ranks: null for all visible GPUs; on a CPU for one rank per core.
        accelerator: as `trainer.accelerator`.
        where: what was asked for, for messages.
        measured: whether to use what is stored; else everything is guessed.

    Returns:
        the keys of a file of conf/cluster. `origin` says whether `autolaunch calibrate` has measured them here, with
        how many ranks, or what they are guessed from.

    Raises:
        ConfigError: fewer GPUs than that are visible.
    """
    kind, visible = visible_devices(accelerator)
    if kind == "gpu" and visible is not None and (visible == 0 or (ranks or 1) > visible):
        raise ConfigError(
            where,
            f"this machine shows {visible} GPU{'' if visible == 1 else 's'}",
            f"up to {visible}" if visible else "",
            f"cluster=localx{visible}" if visible else "trainer.accelerator=cpu",
        )
    device = "cuda" if kind == "gpu" else "cpu"
    count = ranks or visible or _cores()
    stored, measured_with = _stored(device, count) if measured else ({}, 0)
    values = stored or _guessed(device)
    if not stored:
        origin = f"guessed from the profile {values['name']}; `autolaunch calibrate cluster=localx{count}` measures"
    elif measured_with != count:
        origin = f"{values['origin']}, and not with {count}"
    else:
        origin = values["origin"]
    here: dict[str, Any] = {"name": "local", "nodes": 1, "devices_per_node": count, "domain": 0, "origin": origin}
    if device == "cpu":
        here |= {"memory_gib": round(memory_gib() * SHARE_OF_MEMORY / count, 2), "processors": _cores()}
    return {**values, **here}


def machine_file(device: str, ranks: int) -> Path:
    """Where `autolaunch calibrate` stores what it measures on this machine with so many ranks."""
    return _directory() / f"{fingerprint(device)}x{ranks}.yaml"


def fingerprint(device: str) -> str:
    """Names this machine and what runs on it: equal where measured speeds are worth using again."""
    facts = (platform.machine(), _processor(), _cores(), round(memory_gib()), metadata.version("torch"))
    described = repr((*facts, gpu_names() if device == "cuda" else (), platform.python_version_tuple()[:2]))
    return f"{device}_{hashlib.sha256(described.encode()).hexdigest()[:12]}"


def memory_gib() -> float:
    """Memory of this machine, or what its control group may use of it."""
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            whole = min(whole, int(Path(file).read_text()))
        except (OSError, ValueError):  # not there, or `max`
            continue
    return whole / 2**30


def gpu_names() -> tuple[str, ...]:
    """What the driver calls the GPUs of this machine; empty if nobody can say."""
    return _of_gpus("name")


def multiplies_bf16() -> bool:
    """Whether the GPUs of this machine have instructions for it; true if nobody can say."""
    capabilities = (answer.partition(".")[0] for answer in _of_gpus("compute_cap"))
    return all(int(major) >= 8 for major in capabilities if major.isdecimal())


@cache
def _of_gpus(fact: str) -> tuple[str, ...]:
    try:
        answer = subprocess.run(
            ["nvidia-smi", f"--query-gpu={fact}", "--format=csv,noheader"], capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return tuple(line.strip() for line in answer.stdout.splitlines()) if answer.returncode == 0 else ()


def _guessed(device: str) -> dict[str, Any]:
    names = gpu_names() if device == "cuda" else ()
    name = next((profile for pattern, profile in _PROFILES.items() if names and re.search(pattern, names[0])), None)
    if device == "cuda":
        name = name or "a100_40"  # an unknown GPU: something to begin with
    return dict(yaml.safe_load((CONF / "cluster" / f"{name or 'cpu'}.yaml").read_text(encoding="utf-8")))


def _stored(device: str, ranks: int) -> tuple[dict[str, Any], int]:
    """What was measured here, and with how many ranks: with so many, else with the number that is nearest."""
    begin = f"{fingerprint(device)}x"
    counts = [file.stem.removeprefix(begin) for file in _directory().glob(f"{begin}*.yaml")]
    for count in sorted((int(text) for text in counts if text.isdecimal()), key=lambda n: (abs(n - ranks), n)):
        try:
            values = yaml.safe_load(machine_file(device, count).read_text(encoding="utf-8"))
        except (OSError, yaml.YAMLError):
            continue
        if isinstance(values, dict):
            return values, count
    return {}, 0


def _directory() -> Path:
    """One for each set of constants: what another version has fitted means something else."""
    names = " ".join(item.name for item in dataclasses.fields(Constants))
    return user_cache() / "cluster" / hashlib.sha256(names.encode()).hexdigest()[:8]


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
