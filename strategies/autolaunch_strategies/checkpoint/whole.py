"""A checkpoint directory read by one process that has no mesh: as the one dict that plain lightning keeps in a file."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from autolaunch_strategies.checkpoint.files import METADATA, damage_in, files_with_hashes, problem_with
from autolaunch_strategies.checkpoint.plain_data import load_plain
from autolaunch_strategies.checkpoint.sharded import OURS, damaged, readable
from autolaunch_strategies.checkpoint.storage import Planner, Reader

_MODEL = "model."


def whole_checkpoint(path: Path, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
    """What `torch.load` gives of a checkpoint file of lightning, from a checkpoint directory of any mesh.

    Args:
        map_location: a device for the weights, by name or as such; anything else leaves them on the CPU.
        weights_only: False runs what its pickles name; otherwise one that holds more than tensors and plain data is
            refused.

    Returns:
        Lightning's checkpoint: `state_dict` with whole tensors, hyperparameters, loops, callbacks; no optimizer states.

    Raises:
        ConfigError: the checkpoint is not complete, or damaged, or would run code.
    """
    if problem := problem_with(path) or damage_in(path, files_with_hashes(path)):
        raise damaged(path, problem)
    trust = weights_only is False
    reader = Reader(path, trust)
    with readable(path):
        checkpoint = load_plain(path / METADATA, trust)
        everything = reader.read_metadata().state_dict_metadata
    del checkpoint[OURS]
    stored = {name: metadata for name, metadata in everything.items() if name.startswith(_MODEL)}
    room: dict[str, Any] = {
        name: torch.empty(metadata.size, dtype=metadata.properties.dtype)
        if isinstance(metadata, TensorStorageMetadata)
        else None
        for name, metadata in stored.items()
    }
    with warnings.catch_warnings(), readable(path):
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as it should be: no_dist
        dcp.load(room, storage_reader=reader, planner=Planner(trust), no_dist=True)
    device = torch.device(map_location) if isinstance(map_location, str | torch.device) else None
    checkpoint["state_dict"] = {name.removeprefix(_MODEL): _value(value, device) for name, value in room.items()}
    return {**checkpoint, "optimizer_states": []}


def _value(value: Any, device: torch.device | None) -> Any:
    if isinstance(value, torch.Tensor):
        return value if device is None else value.to(device)
    return value[0] if isinstance(value, tuple) and len(value) == 1 else value  # see `sharded._opaque`
