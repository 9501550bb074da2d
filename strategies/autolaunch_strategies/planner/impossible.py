"""What is said where nothing can be run of what was asked for: why, and what of it would have to be another."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autolaunch_strategies.config import AXES, ConfigError, MeshShape
from autolaunch_strategies.planner.enumerate import Rejections, divisors, shares_evenly
from autolaunch_strategies.planner.hardware import Hardware
from autolaunch_strategies.planner.plan import Looked
from autolaunch_strategies.planner.profile import ModelProfile

LookOn = Callable[[Hardware, Mapping[str, Sequence[int]]], Looked]
"""Everything that could be run of a training, with its predictions."""


@dataclass(frozen=True)
class Asked:
    """What was asked for, of which no candidate was made."""

    where: str
    profile: ModelProfile
    rejections: Rejections
    hardware: Hardware
    wanted: Mapping[str, Sequence[int]]
    look_on: LookOn


def impossible(asked: Asked) -> ConfigError:
    """Why nothing can be run, and what of what was asked for would have to be another."""
    hardware, wanted, look_on = asked.hardware, asked.wanted, asked.look_on
    if "mp" in wanted and not any(shares_evenly(asked.profile, mp) for mp in wanted["mp"]):
        return _uneven_mp(asked)
    if (error := _indivisible(asked)) is not None:
        return error
    problem = "there is no way to run this: " + nothing_runs(asked.rejections)
    if not wanted.keys() & set(AXES) or "devices" in wanted:
        return ConfigError(asked.where, problem)
    allowed, write = [], ""
    if wanted.keys() >= set(AXES) and (ranks := _ranks(wanted)) != hardware.devices:
        allowed.append(f"a mesh of {hardware.devices} ranks")
        if (larger := _with_devices(hardware, ranks)) is not None and _runs(look_on(larger, wanted)):
            write = f"cluster={hardware.name}x{ranks}"
            allowed.append(write)
    free = look_on(hardware, {name: values for name, values in wanted.items() if name not in AXES})
    if _runs(free):
        mesh = f"mesh={free.candidates[int(np.flatnonzero(free.fits)[0])].mesh.name}"
        allowed.append(f"{mesh}, the fastest if the mesh is left to the planner")
        write = write or mesh
    return ConfigError(asked.where, problem, "; ".join(allowed), write)


def _indivisible(asked: Asked) -> ConfigError | None:
    """Sizes of some axes, or replicas, that leave some devices over whatever the planner would choose for the rest."""
    (devices,) = asked.wanted.get("devices", (asked.hardware.devices,))
    axes = [axis for axis in AXES if axis in asked.wanted]
    groups = [{f"mesh.{axis}": asked.wanted[axis] for axis in axes}] if len(axes) < len(AXES) else []
    if "replicate" in asked.wanted:
        groups.append({"dp.replicate": asked.wanted["replicate"]})
    for group in groups:
        if any(devices % math.prod(sizes) == 0 for sizes in itertools.product(*group.values())):
            continue
        typed = " ".join(f"{key}={values[0]}" for key, values in group.items())
        if len(group) > 1:
            return ConfigError(typed, f"their product does not divide the {devices} devices")
        ((key, values),) = group.items()
        fitting = divisors(devices)
        close = max(size for size in fitting if size <= values[0])
        return ConfigError(
            typed, f"does not divide the {devices} devices", ", ".join(map(str, fitting)), f"{key}={close}"
        )
    return None


def _uneven_mp(asked: Asked) -> ConfigError:
    """Sizes of mp for which no candidate is made, though a run may have them: it gathers keys and values."""
    profile, hardware, wanted = asked.profile, asked.hardware, asked.wanted
    weighed = [mp for mp in divisors(hardware.devices) if shares_evenly(profile, mp) and "mp" not in profile.refused]
    meshes = (_with_mp(wanted, mp, hardware.devices) for mp in reversed(weighed or [1]))
    write = next((_line_of_mesh(mesh) for mesh in meshes if mesh and _runs(asked.look_on(hardware, mesh))), "")
    too_many = min(wanted["mp"]) > hardware.devices
    may_run = (profile.heads or 1) % max(wanted["mp"]) == 0 and not too_many
    uneven = next((item.reason for item in asked.rejections if item.rule.name == "mp_sizes"), None)
    return ConfigError(
        asked.where,
        f"{min(wanted['mp'])} ranks of mp are more than there are devices: {hardware.devices}"
        if too_many
        else uneven or nothing_runs(asked.rejections),
        f"mp of size {', '.join(map(str, weighed or [1]))}"
        + (
            "; a run and a dry run can have such a mesh: they gather keys and values, or cut unevenly"
            if may_run
            else ""
        ),
        write,
    )


def _with_mp(wanted: Mapping[str, Sequence[int]], mp: int, devices: int) -> dict[str, Sequence[int]] | None:
    """What was asked for with another size of mp, and dp to match if it was asked for; None if none matches."""
    other = {**wanted, "mp": (mp,)}
    if "dp" not in wanted or not other.keys() >= set(AXES):
        return other
    rest = _ranks({**other, "dp": (1,)})
    return {**other, "dp": (devices // rest,)} if devices % rest == 0 else None


def _line_of_mesh(wanted: Mapping[str, Sequence[int]]) -> str:
    """What to write for the size of mp that was asked for, and for those of the other axes if all were."""
    if not wanted.keys() >= {"mp", "pp", "cp"}:
        return f"mesh.mp={wanted['mp'][0]}"
    dp, mp, pp, cp = (wanted[axis][0] if axis in wanted else -1 for axis in AXES)
    return f"mesh={MeshShape(dp=dp, mp=mp, pp=pp, cp=cp).name}"


def _ranks(wanted: Mapping[str, Sequence[int]]) -> int:
    return math.prod(wanted[axis][0] for axis in AXES)


def _with_devices(hardware: Hardware, devices: int) -> Hardware | None:
    """The same machines, so many devices of them; None where they are not whole nodes, or no name has a number."""
    node = hardware.devices_per_node
    if hardware.device == "cpu" or hardware.origin != "built in" or (devices > node and devices % node):
        return None
    return dataclasses.replace(hardware, nodes=max(1, devices // node), devices_per_node=min(devices, node))


def _runs(looked: Looked) -> bool:
    return bool(len(looked) and looked.fits.any())


def nothing_runs(rejections: Rejections) -> str:
    """Why no candidate was made, in one line."""
    return "; ".join(item.reason for item in rejections) or "no value is left of what was asked for"
