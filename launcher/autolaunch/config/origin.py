"""Where a value of the composed config was written: on the command line, or in which YAML file.

Only error messages ask, so that it may read files.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from autolaunch.config.command_line import unquoted
from autolaunch.config.sources import GROUPS_OF_FILES, schema_defaults
from autolaunch.directories import shown
from autolaunch_strategies.config.values import written


class Origin:
    """Says where a value came from: called with a dotted key and its value, it gives the text for a message."""

    def __init__(self, hydra: DictConfig, loader: ConfigLoader | None = None) -> None:
        """
        Args:
            hydra: the `hydra` node that the config was composed with.
            loader: what composed it; by default that of the job that Hydra is running.
        """
        typed: Any = OmegaConf.to_container(hydra.overrides, resolve=False)
        self._overrides: list[str] = [unquoted(item) for item in (*typed["hydra"], *typed["task"])]
        self._config_name, self._loader = hydra.job.config_name, loader
        self._directories = [Path(source.path) for source in hydra.runtime.config_sources if source.schema == "file"]
        self._files: list[tuple[str, Any]] | None = None

    def __call__(self, key: str, value: Any) -> str:
        for override in reversed(self._overrides):
            name = override.split("=", 1)[0].lstrip("+~")
            if name == key:
                return override
            # `model={...}` is rare, but then the whole of it is what was typed.
            if key.startswith(f"{name}.") and override.split("=", 1)[-1].lstrip().startswith("{"):
                return override
        file = self.file(key)
        return f"{key}={written(value)}" + (f" ({file})" if file else "")

    def file(self, key: str) -> str:
        """The YAML file that set `key` last, as one would type its path; empty if no file is found that did."""
        if self._files is None:
            self._files = self._defaults()
        for path, values in reversed(self._files):
            if _has(values, key.split(".")):
                return path
        return ""

    def _defaults(self) -> list[tuple[str, Any]]:
        """(file, what it sets placed under its package) of every file of the defaults list, in order."""
        if self._loader is None and not GlobalHydra.instance().is_initialized():
            return []
        try:
            singles = [item for item in self._overrides if not _is_sweep(item)]
            loader = self._loader or GlobalHydra.instance().config_loader()
            defaults = loader.compute_defaults_list(self._config_name, singles, RunMode.RUN)
        except Exception:
            return []  # a file name in a message is a convenience; the message itself must come
        files = []
        for default in defaults.defaults:
            # What is in a schema is the default of the file that builds on it.
            values: Any = schema_defaults().get(default.config_path or "")
            path = default.config_path if values is None else default.parent
            if path is None or path.startswith("hydra/"):
                continue
            file = self._file_of(path)
            if file is not None:
                values = OmegaConf.to_container(OmegaConf.load(file), resolve=False) if values is None else values
                for part in reversed(default.package.split(".") if default.package else []):
                    values = {part: values}
                files.append((shown(file), values))
        return files

    def _file_of(self, config_path: str) -> Path | None:
        """The file of a config: in a directory of the search path, or anywhere if it was given by its own path."""
        named = [directory / (config_path.removesuffix(".yaml") + ".yaml") for directory in self._directories]
        group, _, option = config_path.partition("/")
        if group in GROUPS_OF_FILES and option.endswith(".yaml"):
            named.append(Path(option))
        return next((file for file in named if file.is_file()), None)


def _has(values: Any, parts: list[str]) -> bool:
    for part in parts:
        if not isinstance(values, Mapping) or part not in values:
            return False
        values = values[part]
    return True


def _is_sweep(override: str) -> bool:
    return OverridesParser.create().parse_override(override).is_sweep_override()
