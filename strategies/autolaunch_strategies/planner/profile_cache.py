"""Profiles that were made before, in the user's cache directory: one file each, named by what it depends on."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autolaunch_strategies.planner.profile import ModelProfile
from autolaunch_strategies.planner.sources import profile_sources


def cache_directory() -> Path:
    """``$XDG_CACHE_HOME/autolaunch/profiles`` or ``~/.cache/autolaunch/profiles``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "autolaunch" / "profiles"


def cached_profile(
    module: nn.Module, positions: int | None = None, *, directory: Path | None = None, **arguments: Any
) -> ModelProfile:
    """As `profile_module`, but what was found out before is read from `directory` (by default the user's cache).

    What can't be told by structure, shapes and plain values is not cached: an `example`, a `loss`, a `step`. A file
    that can't be read is ignored, and so is a directory that can't be written to.
    """
    from autolaunch_strategies.planner.module_profile import profile_module

    if any(arguments.get(name) is not None for name in ("loss", "example", "step")):
        return profile_module(module, positions, **arguments)
    directory = directory or cache_directory()
    path = directory / f"{fingerprint(module, {'positions': positions, **arguments})}.json"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return ModelProfile.from_json(path.read_text())
    profile = profile_module(module, positions, **arguments)
    with contextlib.suppress(OSError):
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=directory, suffix=".part", delete=False) as file:
            file.write(profile.to_json())
        Path(file.name).replace(path)
    return profile


def fingerprint(module: nn.Module, arguments: Mapping[str, Any]) -> str:
    """A name for everything that a profile depends on: classes and their sources, shapes, plain attributes, versions.

    Attributes that are no plain values count by their text if that tells no address.
    """
    digest = hashlib.blake2b(digest_size=16)

    def add(*values: Any) -> None:
        digest.update(repr(values).encode())

    add(torch.__version__, sorted((key, _plain(value)) for key, value in arguments.items()), profile_sources())
    files: set[str] = set()
    for name, part in module.named_modules():
        kind = type(part)
        add(name, kind.__module__, kind.__qualname__, part.training)
        add(sorted((key, _plain(value)) for key, value in part.__dict__.items() if not key.startswith("_")))
        for held in (part._parameters, part._buffers):
            for key, tensor in held.items():
                if tensor is not None:
                    add(key, tuple(tensor.shape), str(tensor.dtype), tensor.requires_grad)
        for origin in kind.__mro__:
            if not origin.__module__.startswith(("torch.", "builtins")):
                files.add(origin.__module__)
    owners: dict[int, str] = {}
    add([(name, owners.setdefault(id(item), name)) for name, item in module.named_parameters(remove_duplicate=False)])
    example = getattr(module, "example_input_array", None)
    add(None if example is None else _plain(example))
    add(sorted(_source(name) for name in files))
    return digest.hexdigest()


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), str(value.dtype)
    if isinstance(value, Mapping):
        return sorted((str(key), _plain(item)) for key, item in value.items())
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str | torch.dtype):
        return repr(value)
    if hasattr(value, "to_dict"):  # a config of `transformers`
        with contextlib.suppress(Exception):
            return json.dumps(value.to_dict(), sort_keys=True, default=str) + str(
                getattr(value, "_attn_implementation", "")
            )
    text = repr(value)
    return text if " at 0x" not in text else type(value).__qualname__


def _source(module: str) -> tuple[str, str]:
    """A module's file, by size and time of change."""
    path = getattr(sys.modules.get(module), "__file__", None)
    try:
        assert path is not None
        status = Path(path).stat()
    except (OSError, AssertionError):
        return module, ""
    return module, f"{status.st_size}:{status.st_mtime_ns}"
