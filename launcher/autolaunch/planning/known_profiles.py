"""Profiles of models that a config describes wholly, kept so that a plan needs neither torch nor the model again."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autolaunch import __version__
from autolaunch.directories import user_cache
from autolaunch.job import write_beside
from autolaunch.models.hf_tasks import task_of

if TYPE_CHECKING:
    from autolaunch_strategies.planner.profile import ModelProfile


def is_known(config: Mapping[str, Any]) -> bool:
    """Whether the model of a resolved job is called with ids of `data.seq_len` positions, whatever the data is."""
    model = config["model"]
    ours = not config["module"] and "_target_" not in model and model.get("name") in ("llama", "hf")
    return ours and task_of(model) in (None, "causal_lm")


class KnownProfile:
    """The place of one profile in the user's cache."""

    def __init__(self, config: Mapping[str, Any], device_type: str) -> None:
        """
        Args:
            config: of a resolved job.
            device_type: cuda or cpu.
        """
        self.path: Path | None = None
        """None where nothing is kept."""
        if not is_known(config) or config["model"].get("path") or (config["adapter"] or {}).get("path"):
            return  # code, data or files of the user's, which may have changed
        identity = {
            **{key: config[key] for key in ("model", "adapter", "precision")},
            "seq_len": config["data"].get("seq_len"),
            "param_dtype": config["dp"]["param_dtype"],
            "plan": config["mp"] and config["mp"]["sequence_parallel"],  # which of the model's plans, or none
            "device": device_type,
            "versions": [__version__, *map(_version, ("torch", "transformers", "peft")), *_sources()],
        }
        name = hashlib.blake2b(json.dumps(identity, sort_keys=True, default=str).encode(), digest_size=16).hexdigest()
        self.path = user_cache() / "profiles" / f"config_{name}.json"

    def read(self) -> ModelProfile | None:
        """The profile, if it was kept."""
        from autolaunch_strategies.planner.profile import ModelProfile

        if self.path is None:
            return None
        try:
            return ModelProfile.from_json(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def keep(self, profile: ModelProfile) -> None:
        """Keep it; a directory that can't be written to is no error."""
        if self.path is None:
            return
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_beside(self.path, profile.to_json())


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _sources() -> list[tuple[str, int, int]]:
    """The files of this project that a profile is made by: one of an older version is not read."""
    from autolaunch_strategies.planner.sources import profile_sources

    files = sorted((Path(__file__).parents[1] / "models").glob("*.py"))
    return [*profile_sources(), *((path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files)]
