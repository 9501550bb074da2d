"""The `transformers` config that ``model=hf`` means, as a dict: from a directory, from YAML, or both. Torch-free."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autolaunch.directories import nearest_path
from autolaunch_strategies.config import ConfigError, as_typed

INDEX_FILE, SINGLE_FILE = WEIGHT_FILES = ("model.safetensors.index.json", "model.safetensors")
"""What a pretrained directory holds: the index of several files, or one file."""

_LABELS = ("num_labels", "id2label", "label2id")

_SNAPSHOT = re.compile(r"/models--(?P<name>[^/]+)/snapshots/(?P<commit>[0-9a-f]{40})/?$")


def name_and_commit(directory: Path) -> tuple[str, str] | None:
    """Which model of the hub at which commit a directory of the hub's cache holds; None for any other directory."""
    match = _SNAPSHOT.search(directory.as_posix())
    return None if match is None else (match["name"].replace("--", "/"), match["commit"])


def read_hf_config(model_cfg: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of config.json in `model.path`, replaced by those of `model.config`.

    Args:
        model_cfg: the fields of `autolaunch.config.schema.HFModel`.

    Raises:
        ConfigError: `transformers` is not installed, neither a directory nor a model_type is given, or the directory
            lacks config.json or (with `pretrained`) the weights. Those of the hub are fetched later.
    """
    if importlib.util.find_spec("transformers") is None:
        raise ConfigError("model=hf", "transformers is not installed", write="pip install 'autolaunch[hf]'")
    overrides = dict(model_cfg.get("config") or {})
    if model_cfg.get("num_labels") is not None and "id2label" not in overrides:
        overrides["num_labels"] = model_cfg["num_labels"]
    if model_cfg.get("path") is None:
        if not overrides.get("model_type"):
            raise ConfigError(
                "model=hf",
                "neither model.path nor model.config.model_type says which model",
                "a local directory with config.json, or a model_type of transformers and its fields",
                "model.path=DIRECTORY, or model.config.model_type=llama model.config.hidden_size=256 ...",
            )
        return with_labels(overrides)
    fields = _read_json(Path(model_cfg["path"]).expanduser(), f"model.path={model_cfg['path']}")
    if model_cfg.get("pretrained", True):
        _check_weights(Path(model_cfg["path"]).expanduser(), f"model.path={model_cfg['path']}")
    if overrides.keys() & {"num_labels", "id2label"}:
        fields = {key: value for key, value in fields.items() if key not in _LABELS}
    return with_labels(merged(fields, overrides))


def with_labels(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields with the names of classes that `num_labels` stands for, as config.json has them."""
    if "num_labels" not in fields:
        return dict(fields)
    names = {str(number): f"LABEL_{number}" for number in range(fields["num_labels"])}
    kept = {key: value for key, value in fields.items() if key not in _LABELS}
    return {**kept, "id2label": names, "label2id": {name: int(number) for number, name in names.items()}}


def merged(fields: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """`fields` with `overrides` on top, key by key at every depth."""
    result = dict(fields)
    for key, value in overrides.items():
        below = result.get(key)
        result[key] = merged(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return result


def directory_meant(path: Path) -> str:
    """The line with the model directory that `model.path` was most likely meant to be; or an empty string."""
    close = nearest_path(path)
    return as_typed("model.path", close) if close is not None and (close / "config.json").is_file() else ""


def code_of(model_type: str) -> str:
    """The files of the installed `transformers` for a model, as text; empty if they are not in a directory of its name.

    Not imported: that takes seconds.
    """
    spec = importlib.util.find_spec("transformers")
    if spec is None or spec.origin is None or not model_type.replace("-", "_").isidentifier():
        return ""
    directory = Path(spec.origin).parent / "models" / model_type.replace("-", "_")
    files = [*directory.glob("configuration_*.py"), *directory.glob("modeling_*.py")]
    return "\n".join(file.read_text(encoding="utf-8") for file in files)


def _read_json(directory: Path, where: str) -> dict[str, Any]:
    allowed = "a directory with config.json and safetensors, or OWNER/NAME of a model of the hub"
    if not directory.is_dir():
        raise ConfigError(where, "there is no such directory", allowed, directory_meant(directory))
    if not (directory / "config.json").is_file():
        raise ConfigError(where, "there is no config.json in it", allowed)
    try:
        fields = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(where, f"its config.json cannot be read: {error}") from error
    if not isinstance(fields, dict) or not fields.get("model_type"):
        raise ConfigError(where, "its config.json names no model_type", "the config.json of a transformers model")
    return fields


def _check_weights(directory: Path, where: str) -> None:
    if name_and_commit(directory) is None and not any((directory / name).is_file() for name in WEIGHT_FILES):
        raise ConfigError(
            where,
            "there are no weights in it",
            " or ".join(reversed(WEIGHT_FILES)),
            "model.pretrained=false for random weights",
        )
