"""Config options that are no files of conf/: `mesh=<any shape>` and `experiment=<path of a YAML file>`.

Hydra asks every source of its search path for `mesh/4x2` or `experiment/outputs/.../plan.yaml`; the two sources here
answer for these two groups, after conf/ and the directories of the user, so that a YAML file of that name always wins.
"""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.errors import ConfigCompositionException
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf

from autolaunch_strategies.config import ConfigError, looks_like_mesh, parse_mesh

SHAPES = ("2x2", "4x2", "2x2x2", "dp4xmp2", "dp-1xmp2")
"""Shapes that completion and `--help` show as examples. No bare integer: a `glob(*)` would read it as a number."""


class _GroupSource(ConfigSource):
    """Serves the options of one config group that are made when they are asked for."""

    group: str

    def _option(self, config_path: str) -> str:
        """The option asked for, or an empty string if the path is not in this source's group."""
        prefix = f"{self.group}/"
        return config_path[len(prefix) :] if config_path.startswith(prefix) else ""

    def available(self) -> bool:
        return True

    def is_group(self, config_path: str) -> bool:
        return config_path.rstrip("/") in ("", self.group)

    def _result(self, values: Any, package: str | None) -> ConfigResult:
        config = OmegaConf.create(values)
        return ConfigResult(provider=self.provider, path=self.full_path(), config=config, header={"package": package})


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
        return self._result({**shape.sizes, "order": builtins.list(shape.order)}, package=None)


class ExperimentFileSource(_GroupSource):
    """Serves `experiment=<path>.yaml`: an experiment file that lies anywhere, such as the plan.yaml of an earlier run.

    A path is read from the working directory. Of a plan.yaml the key `reasons`, which is for its readers, is left out,
    and so are its values for groups that the command line chooses anew.
    """

    group = "experiment"
    chosen: frozenset[str] = frozenset()
    """Groups of the command line; the command sets it, as `MeshSearchPath.config_dir`."""

    @staticmethod
    def scheme() -> str:
        return "experiment"

    def is_config(self, config_path: str) -> bool:
        option = self._option(config_path)
        return option.endswith(".yaml") and Path(option).is_file()

    def list(self, config_path: str, results_filter: ObjectType | None) -> builtins.list[str]:
        return []

    def load_config(self, config_path: str) -> ConfigResult:
        path = Path(self._option(config_path))
        values = OmegaConf.load(path)
        if isinstance(values, DictConfig) and values.pop("reasons", None) is not None:
            for group in self.chosen:
                values.pop(group, None)
        header = self._get_header_dict(path.read_text(encoding="utf-8")[:512])
        return self._result(values, package=header["package"])


class MeshSearchPath(SearchPathPlugin):
    """Puts both sources on every search path, behind conf/ and the directory of the user."""

    config_dir: Path | None = None
    """The directory of `--config-dir`; the command sets it, so that every way to compose sees it."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        if self.config_dir is not None:
            search_path.append("command-line", f"file://{self.config_dir}")
        search_path.append("autolaunch", "mesh://")
        search_path.append("autolaunch", "experiment://")


def register() -> None:
    """Make the sources known to this process. Hydra 1.3 sees no entry points, so the command calls this itself."""
    for plugin in (MeshSource, ExperimentFileSource, MeshSearchPath):
        Plugins.instance().register(plugin)
