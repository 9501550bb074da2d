"""What is no file of conf/: `mesh=<shape>`, `cluster=<profile>x<devices>`, `experiment=<file>.yaml`, and schemas.

Hydra asks every source of its search path for `mesh/4x2`, `cluster/h100x1024`, `experiment/outputs/.../plan.yaml` or
`trainer/_schema_`; the sources here answer, after conf/ and the directories of the user, so that a YAML file of that
name always wins.
"""

from __future__ import annotations

import builtins
import json
import os
import re
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.errors import ConfigCompositionException
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf

from autolaunch.config.against_schema import schemas_of
from autolaunch.config.cluster import LOCAL
from autolaunch.config.schema import GROUPS, MADE, Job, defaults_of, without_made
from autolaunch.machine.this_machine import this_machine
from autolaunch_strategies.config import ConfigError, looks_like_mesh, nearest, parse_mesh
from autolaunch_strategies.planner.stacks import MOST_DEVICES

SHAPES = ("2x2", "4x2", "2x2x2", "dp4xmp2", "dp-1xmp2")
"""Shapes that completion and `--help` show as examples. No bare integer: a `glob(*)` would read it as a number."""

CLUSTERS = ("h100x1024", "localx4")
"""Clusters of any size that completion and `--help` show as examples."""

GROUPS_OF_FILES = ("experiment", "cluster")
"""Groups whose options may be given by the path of a YAML file."""

THIS_MACHINE = "this_machine"
"""The option that the file of the machine at hand builds on."""

JOB_FILE = ".hydra/job.json"
"""Where the job of a run stands in its directory."""

TAKEN = ("model", "module", "adapter", "data", "seed", "precision")
"""Keys of a job that say what its weights belong to, and on which data they were trained."""

_SIZED = re.compile(r"([A-Za-z_][\w.-]*?)x(-?\d+)")

_MISSPELT_SIZED = re.compile(r"(.+?)[xX*:](-?\d+)")
"""A profile and a number of devices, as far as one can tell from a name that is none."""

_SOME_DEVICES = 8
"""Devices of the line to write where a number was typed that is none."""


def cluster_kinds(options: Iterable[str]) -> list[str]:
    """The profiles among the options of the group cluster: the others are examples of a number beside a profile."""
    return sorted(set(options) - set(CLUSTERS))


def cluster_meant(typed: str, options: Iterable[str]) -> str:
    """The cluster that a misspelt name was most likely meant to be, with the number that was typed; else empty."""
    by_small_letters = {kind.lower(): kind for kind in cluster_kinds(options)}
    sized = _MISSPELT_SIZED.fullmatch(typed)
    kind = nearest((sized[1] if sized else typed).lower(), by_small_letters)
    if not kind:
        return ""
    return by_small_letters[kind] + (f"x{_devices_meant(sized[2])}" if sized else "")


def _devices_meant(digits: str) -> int:
    return abs(int(digits)) or _SOME_DEVICES


class _MadeSource(ConfigSource):
    """Serves configs that are made when they are asked for."""

    def available(self) -> bool:
        return True

    def _result(self, values: Any, package: str | None = None) -> ConfigResult:
        config = OmegaConf.create(values)
        return ConfigResult(provider=self.provider, path=self.full_path(), config=config, header={"package": package})


class SchemaSource(_MadeSource):
    """Serves all keys of a group with their defaults, so that a file of conf/ lists only those that it sets.

    In a file of the group, `defaults: [_schema_]`; in one of a group whose options have schemas of their own,
    `defaults: [_llama_schema_]`; in a primary config, `_schema_` has the keys that are in no group. They are no options
    and so not listed as such.
    """

    @staticmethod
    def scheme() -> str:
        return "schema"

    def is_group(self, config_path: str) -> bool:
        return False

    def is_config(self, config_path: str) -> bool:
        return config_path in schema_defaults()

    def list(self, config_path: str, results_filter: ObjectType | None) -> builtins.list[str]:
        return []

    def load_config(self, config_path: str) -> ConfigResult:
        return self._result(schema_defaults()[config_path])


@cache
def schema_defaults() -> dict[str, dict[str, Any]]:
    """Path of a config that `SchemaSource` serves -> its keys with their defaults."""
    schemas = {
        f"{group}/_{name}_schema_" if name else f"{group}/_schema_": schema
        for group in GROUPS
        for name, schema in schemas_of(group).items()
    }
    in_no_group = {key: value for key, value in defaults_of(Job).items() if key not in GROUPS}
    return {"_schema_": in_no_group, **{path: defaults_of(schema) for path, schema in schemas.items()}}


class _GroupSource(_MadeSource):
    """Serves the options of one config group."""

    group: str

    def _option(self, config_path: str) -> str:
        """The option asked for, or an empty string if the path is not in this source's group."""
        prefix = f"{self.group}/"
        return config_path[len(prefix) :] if config_path.startswith(prefix) else ""

    def is_group(self, config_path: str) -> bool:
        return config_path.rstrip("/") in ("", self.group)


class MeshSource(_GroupSource):
    """Serves the group `mesh` for any shape that `parse_mesh` reads; loading a wrong one is a ConfigError."""

    group = "mesh"

    @staticmethod
    def scheme() -> str:
        return "mesh"

    def is_config(self, config_path: str) -> bool:
        return looks_like_mesh(self._option(config_path))

    def list(self, config_path: str, results_filter: ObjectType | None) -> builtins.list[str]:
        if config_path.rstrip("/") == "" and results_filter in (None, ObjectType.GROUP):
            return [self.group]
        if config_path.rstrip("/") == self.group and results_filter in (None, ObjectType.CONFIG):
            return builtins.list(SHAPES)
        return []

    def load_config(self, config_path: str) -> ConfigResult:
        try:
            shape = parse_mesh(self._option(config_path))
        except ConfigError as error:
            raise ConfigCompositionException(str(error)) from error
        return self._result({**shape.sizes, "order": builtins.list(shape.order)})


class ExperimentFileSource(_GroupSource):
    """Serves `experiment=<path>.yaml`: an experiment file that lies anywhere, such as the plan.yaml of an earlier run.

    A path is read from the working directory. Of a plan.yaml the key `reasons`, which is for its readers, is left out,
    and so are its values for groups that the command line chooses anew. Of the job of a run (`JOB_FILE`) it is what its
    weights belong to (`TAKEN`).
    """

    group = "experiment"
    chosen: Mapping[str, str] = {}
    """Groups of the command line, and what it chooses; the command sets it, as `MeshSearchPath.config_dir`."""

    @staticmethod
    def scheme() -> str:
        return "experiment"

    def is_config(self, config_path: str) -> bool:
        option = self._option(config_path)
        return option.endswith((".yaml", JOB_FILE)) and Path(option).is_file()

    def list(self, config_path: str, results_filter: ObjectType | None) -> builtins.list[str]:
        return []

    def load_config(self, config_path: str) -> ConfigResult:
        path = Path(self._option(config_path))
        if config_path.endswith(JOB_FILE):
            return self._result(self._trained(path), package="_global_")
        values = OmegaConf.load(path)
        if isinstance(values, DictConfig) and values.pop("reasons", None) is not None:
            for group in self.chosen:
                values.pop(group, None)
            _drop_made(values)
        header = self._get_header_dict(path.read_text(encoding="utf-8")[:512])
        return self._result(values, package=header["package"])

    def _trained(self, path: Path) -> dict[str, Any]:
        """The keys `TAKEN` of a job, with the groups that they are of; without those that are chosen to be others."""
        config = without_made(json.loads(path.read_text(encoding="utf-8"))["config"])
        values: dict[str, Any] = {"defaults": []}
        for key in TAKEN:
            if key in GROUPS:
                # Not what was typed then, which may be a file that is not on today's search path.
                node = config.get(key) or {"name": "none"}
                option = "custom" if "_target_" in node else str(node.get("name"))
                if self.chosen.get(key, option) != option:
                    continue
                values["defaults"].append({f"override /{key}": option})
            if config.get(key) is not None:
                values[key] = config[key]
        values["defaults"].append("_self_")
        return values


def _drop_made(plan: DictConfig) -> None:
    """Take the keys `MADE` out of a plan.yaml: earlier versions wrote them there."""
    for group, keys in MADE.items():
        node = plan.get(group)
        for key in keys if isinstance(node, DictConfig) else ():
            node.pop(key, None)


class ClusterSource(_GroupSource):
    """Serves `cluster=<profile>x<devices>` for profiles of the search path, `cluster=<path>.yaml`, and this machine.

    Its path holds the directories of the search path, in their order.
    """

    group = "cluster"

    @staticmethod
    def scheme() -> str:
        return "cluster"

    def is_config(self, config_path: str) -> bool:
        option = self._option(config_path)
        if option == THIS_MACHINE or _is_cluster_file(option):
            return True
        sized = _SIZED.fullmatch(option)
        return sized is not None and self._profile_file(sized[1]) is not None

    def list(self, config_path: str, results_filter: ObjectType | None) -> builtins.list[str]:
        if config_path.rstrip("/") == "" and results_filter in (None, ObjectType.GROUP):
            return [self.group]
        if config_path.rstrip("/") == self.group and results_filter in (None, ObjectType.CONFIG):
            return builtins.list(CLUSTERS)
        return []

    def load_config(self, config_path: str) -> ConfigResult:
        option = self._option(config_path)
        try:
            if option == THIS_MACHINE:
                return self._result(this_machine())
            if _is_cluster_file(option):
                return self._result(_cluster_file(option))
            sized = _SIZED.fullmatch(option)
            assert sized is not None
            return self._result(self._sized(sized[1], sized[2]))
        except ConfigError as error:
            raise ConfigCompositionException(str(error)) from error

    def _sized(self, profile: str, digits: str) -> dict[str, Any]:
        where = f"cluster={profile}x{digits}"
        devices = int(digits)
        meant = f"cluster={profile}x{_devices_meant(digits)}"
        if devices < 1:
            raise ConfigError(where, "the number of devices must be at least 1", f"{profile}xN with N devices", meant)
        if digits[0] == "0":
            raise ConfigError(where, "a number of devices has no zero in front", f"{profile}xN with N devices", meant)
        if devices > MOST_DEVICES:
            raise ConfigError(
                where,
                f"{devices:,} devices are more than can be planned for",
                f"up to {MOST_DEVICES:,} devices",
                f"cluster={profile}x{MOST_DEVICES}",
            )
        values = self._profile(profile)
        if values.get("name") == LOCAL:
            return this_machine(devices, where=where)
        per_node = values.get("devices_per_node") or 1
        sizes: dict[str, Any] = {"defaults": [profile, "_self_"]}
        if values.get("device") == "cpu":  # any number of ranks can share a CPU
            memory = round(values.get("memory_gib", 1.0) * per_node / devices, 2)
            return {**sizes, "devices_per_node": devices, "memory_gib": memory}
        if devices > per_node and devices % per_node:
            near = max(round(devices / per_node), 1) * per_node
            raise ConfigError(
                where,
                f"{devices} devices are no whole number of nodes of {per_node}",
                f"up to {per_node}, or a multiple of it",
                f"cluster={profile}x{near}",
            )
        return {**sizes, "nodes": max(1, devices // per_node), "devices_per_node": min(devices, per_node)}

    def _profile_file(self, name: str) -> Path | None:
        files = (
            Path(directory) / self.group / f"{name}.yaml" for directory in self.path.split(os.pathsep) if directory
        )
        return next((file for file in files if file.is_file()), None)

    def _profile(self, name: str) -> dict[str, Any]:
        """The values of a profile, with those of the profiles that its defaults list names."""
        if name == THIS_MACHINE:
            return {"name": LOCAL}
        file = self._profile_file(name)
        content = _read_once(file, file.stat().st_mtime_ns) if file is not None else {}
        own = {str(key): value for key, value in content.items() if key != "defaults"}
        values: dict[str, Any] = {}
        defaults = content.get("defaults") or []
        for item in [*defaults, *([] if "_self_" in defaults else ["_self_"])]:
            if item == "_self_":
                values |= own
            elif isinstance(item, str) and item != name:
                values |= self._profile(item)
        return values


@cache
def _read_once(file: Path, _changed: int) -> dict[str, Any]:
    """What a file says, unless it has changed; a config that the planner chooses for is composed twice."""
    content = OmegaConf.to_container(OmegaConf.load(file))
    assert isinstance(content, dict)
    return {str(key): value for key, value in content.items()}


def _is_cluster_file(option: str) -> bool:
    return option.endswith(".yaml") and Path(option).is_file()


def _cluster_file(path: str) -> dict[str, Any]:
    content = OmegaConf.to_container(OmegaConf.load(path))
    if not isinstance(content, Mapping):
        raise ConfigError(f"cluster={path}", "holds no keys", "a file as `autolaunch calibrate` writes it")
    return {str(key): value for key, value in content.items()}


class MeshSearchPath(SearchPathPlugin):
    """Puts the sources on every search path, behind conf/ and the directory of the user."""

    config_dir: Path | None = None
    """The directory of `--config-dir`; the command sets it, so that every way to compose sees it."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        if self.config_dir is not None:
            search_path.append("command-line", f"file://{self.config_dir}")
        directories = [item.path.removeprefix("file://") for item in search_path.get_path() if item.path]
        profiles = os.pathsep.join(path for path in directories if Path(path).is_dir())
        search_path.append("autolaunch", "schema://")
        search_path.append("autolaunch", "mesh://")
        search_path.append("autolaunch", f"cluster://{profiles}")
        search_path.append("autolaunch", "experiment://")


def register() -> None:
    """Make the sources known to this process. Hydra 1.3 sees no entry points, so the command calls this itself."""
    for plugin in (SchemaSource, MeshSource, ClusterSource, ExperimentFileSource, MeshSearchPath):
        Plugins.instance().register(plugin)
