"""Checkpoints that any mesh can load: a torch.distributed.checkpoint directory with one name per parameter.

`<directory>/` holds the sharded tensors (`model.*`, `optimizer_<i>.state.<parameter>.<key>`), `meta.pt` (everything
else that lightning keeps, plus what differs by dp rank) and, written last, the manifest. It is written beside and
renamed.
"""

from __future__ import annotations

import os
import pickle
import random
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lightning.pytorch import LightningModule
from torch import nn
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor, Replicate

from autolaunch_strategies._torch import local_index
from autolaunch_strategies.checkpoint_files import (
    METADATA,
    REPLACED,
    WRITING,
    complete_checkpoints,
    problem_with,
    write_manifest,
)
from autolaunch_strategies.config import ConfigError
from autolaunch_strategies.mesh import RankMesh

_OURS = "autolaunch"  # key of our part in meta.pt


class CheckpointWriter:
    """Writes checkpoints, one at a time; in the background if `asynchronous`."""

    def __init__(self, asynchronous: bool = False) -> None:
        self.asynchronous = asynchronous
        self._group: dist.ProcessGroup | None = None
        self._running: tuple[Any, Path, int, str] | None = None

    def save(
        self,
        path: Path,
        checkpoint: dict[str, Any],
        module: LightningModule,
        optimizers: list[torch.optim.Optimizer],
        mesh: RankMesh,
    ) -> None:
        """Write lightning's `checkpoint` to the directory `path`. Collective; `path` appears only when it is whole.

        Its `state_dict` goes into sharded files, the optimizers (may be none) too, the rest into `meta.pt`.
        """
        self.finish()
        checkpoint = dict(checkpoint)
        tensors: dict[str, Any] = {"model": checkpoint.pop("state_dict")}
        groups = []
        if optimizers:
            checkpoint.pop("optimizer_states")
            names = {parameter: name for name, parameter in module.named_parameters()}
            for index, optimizer in enumerate(optimizers):
                tensors[f"optimizer_{index}"] = _optimizer_tensors(optimizer, names)
                groups.append(_optimizer_groups(optimizer, names))
        checkpoint[_OURS] = {"optimizer_groups": groups, "by_dp_rank": _gather_by_dp_rank(checkpoint, mesh)}
        beside = path.with_name(path.name + WRITING)
        if dist.get_rank() == 0:
            shutil.rmtree(beside, ignore_errors=True)
            beside.mkdir(parents=True)
            torch.save(checkpoint, beside / METADATA)
        dist.barrier()
        step = int(checkpoint.get("global_step", 0))
        if not self.asynchronous:
            dcp.save(tensors, storage_writer=FileSystemWriter(beside))
            _put_in_place(beside, path, step, mesh.shape.name)
            dist.barrier()
            return
        if self._group is None:
            self._group = dist.new_group(backend="gloo")  # a group of its own: training goes on in the others
        future = dcp.async_save(tensors, storage_writer=FileSystemWriter(beside), process_group=self._group)
        self._running = (future, path, step, mesh.shape.name)

    def finish(self, together: bool = True) -> None:
        """Wait for the checkpoint that is being written, if any, and put it in place.

        Collective; with `together=False` the other ranks may be gone: nothing waits for them but their writing.
        """
        if self._running is None:
            return
        future, path, step, mesh = self._running
        self._running = None
        try:
            future.result()
            _put_in_place(path.with_name(path.name + WRITING), path, step, mesh)
        except Exception:
            if together:
                raise
            return  # it stays half-written; what went wrong before is what people need to see
        if together:
            dist.barrier()


def load_checkpoint(
    path: Path, module: LightningModule, optimizers: list[torch.optim.Optimizer], mesh: RankMesh, trust: bool
) -> dict[str, Any]:
    """Fill `module` and `optimizers` from a checkpoint written on any mesh, or by plain lightning on one device.

    Args:
        optimizers: those to fill; empty for validation, test and prediction.
        trust: unpickle metadata of any type.

    Returns:
        lightning's checkpoint without tensors (`state_dict` and `optimizer_states` are empty).

    Raises:
        ConfigError: the checkpoint is damaged, or belongs to another model. Every rank raises the same.
    """
    if problem := problem_with(path):
        earlier = [item for item in complete_checkpoints(path.parent) if item != path]
        raise ConfigError(
            f"ckpt_path={path}",
            problem,
            "a complete checkpoint" + ("" if earlier else f"; there is no other one in {path.parent}"),
            f"ckpt_path={earlier[-1]}" if earlier else "",
        )
    if path.is_file():
        return _load_single_file(path, module, optimizers, trust)
    checkpoint = torch.load(path / METADATA, map_location="cpu", weights_only=not trust)
    ours = checkpoint.pop(_OURS)
    reader = FileSystemReader(path)
    stored = reader.read_metadata().state_dict_metadata
    if len(optimizers) > len(ours["optimizer_groups"]):
        raise _other_optimizers(path, len(ours["optimizer_groups"]), len(optimizers))
    model = module.state_dict()
    _check_names({f"model.{name}": tensor for name, tensor in model.items()}, stored, path, module.strict_loading)
    model = {name: tensor for name, tensor in model.items() if f"model.{name}" in stored}
    tensors: dict[str, Any] = {"model": model}
    names = {parameter: name for name, parameter in module.named_parameters()}
    for index, optimizer in enumerate(optimizers):
        tensors[f"optimizer_{index}"] = _empty_optimizer_tensors(optimizer, names, f"optimizer_{index}.", stored)
    dcp.load(tensors, storage_reader=reader)
    _set_extra_state(module, model)
    for index, optimizer in enumerate(optimizers):
        _fill_optimizer(optimizer, names, tensors[f"optimizer_{index}"], ours["optimizer_groups"][index])
    checkpoint["state_dict"], checkpoint["optimizer_states"] = {}, []
    _restore_by_dp_rank(checkpoint, ours["by_dp_rank"], mesh, path)
    return checkpoint


def _put_in_place(beside: Path, path: Path, step: int, mesh: str) -> None:
    if dist.get_rank() != 0:
        return
    write_manifest(beside, step, mesh)
    replaced = path.with_name(path.name + REPLACED)
    if os.path.lexists(path):
        _remove(replaced)  # an earlier process may have died right here
        path.rename(replaced)
    beside.rename(path)
    _remove(replaced)


def remove_checkpoint(path: Path) -> None:
    """Delete a checkpoint directory; under its own name it is never seen in parts."""
    doomed = path.with_name(path.name + REPLACED)
    _remove(doomed)
    path.rename(doomed)
    _remove(doomed)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _other_optimizers(path: Path, saved: int, wanted: int) -> ConfigError:
    problem = f"holds the state of {saved} optimizers, {wanted} are to go on" if saved else "holds weights only"
    return ConfigError(
        f"ckpt_path={path}",
        problem,
        "a checkpoint with optimizer states to resume from; validate, test, predict and load_from_checkpoint need none",
    )


def _check_names(wanted: dict[str, Any], stored: dict[str, Any], path: Path, strict: bool) -> None:
    """Raise ConfigError if names (unless not `strict`) or shapes differ; both mappings have names as `model.<name>`."""
    missing = [name for name in wanted if strict and name not in stored and not name.endswith("_extra_state")]
    unknown = [name for name in stored if strict and name.startswith("model.") and name not in wanted]
    wrong = [
        f"{name.removeprefix('model.')} is {tuple(stored[name].size)} there, {tuple(tensor.shape)} here"
        for name, tensor in wanted.items()
        if isinstance(stored.get(name), TensorStorageMetadata) and stored[name].size != tensor.shape
    ]
    problems = [
        f"{len(names)} {what} ({', '.join(name.removeprefix('model.') for name in names[:3])}"
        + (", ..." if len(names) > 3 else "")
        + ")"
        for what, names in (("parameters are missing", missing), ("are unknown here", unknown))
        if names
    ]
    if problems + wrong:
        raise ConfigError(
            f"ckpt_path={path}",
            f"belongs to another model: {'; '.join(problems + wrong[:3])}",
            "the model that it was saved from",
        )


def _set_extra_state(module: nn.Module, state: dict[str, Any]) -> None:
    """Hand loaded non-tensor state (`get_extra_state`) to its modules; tensors were filled in place."""
    extra = {name: value for name, value in state.items() if name.endswith("_extra_state")}
    if extra:
        module.load_state_dict(extra, strict=False)


# --- optimizers --------------------------------------------------------------------------------------------------


def _named(optimizer: torch.optim.Optimizer, names: dict[nn.Parameter, str]) -> Iterable[tuple[str, nn.Parameter]]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield names[parameter], parameter


def _optimizer_tensors(optimizer: torch.optim.Optimizer, names: dict[nn.Parameter, str]) -> dict[str, Any]:
    """The optimizer's state by parameter name: `state.<parameter>.<key>`."""
    return {
        f"state.{name}.{key}": value
        for name, parameter in _named(optimizer, names)
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def _optimizer_groups(optimizer: torch.optim.Optimizer, names: dict[nn.Parameter, str]) -> list[dict[str, Any]]:
    return [
        {
            "names": [names[parameter] for parameter in group["params"]],
            "options": {key: value for key, value in group.items() if key != "params"},
        }
        for group in optimizer.param_groups
    ]


def _empty_optimizer_tensors(
    optimizer: torch.optim.Optimizer, names: dict[nn.Parameter, str], prefix: str, stored: dict[str, Any]
) -> dict[str, Any]:
    """Room for everything that the checkpoint holds for this optimizer's parameters, sharded as they are."""
    parameters = dict(_named(optimizer, names))
    room: dict[str, Any] = {}
    for full_name, metadata in stored.items():
        if not full_name.startswith(f"{prefix}state."):
            continue
        name, _, _ = full_name.removeprefix(f"{prefix}state.").rpartition(".")
        if name not in parameters:
            continue
        parameter = parameters[name]
        value: Any = None
        if isinstance(metadata, TensorStorageMetadata):
            if metadata.size == parameter.shape and parameter.dim() > 0:
                value = torch.zeros_like(parameter, dtype=metadata.properties.dtype, requires_grad=False)
            else:
                value = torch.zeros(metadata.size, dtype=metadata.properties.dtype)
        room[full_name.removeprefix(prefix)] = value
    return room


def _fill_optimizer(
    optimizer: torch.optim.Optimizer,
    names: dict[nn.Parameter, str],
    values: dict[str, Any],
    groups: list[dict[str, Any]],
) -> None:
    parameters = dict(_named(optimizer, names))
    optimizer.state.clear()
    for full_name, value in values.items():
        name, _, key = full_name.removeprefix("state.").rpartition(".")
        parameter = parameters[name]
        if isinstance(value, torch.Tensor) and value.dim() > 0 and not isinstance(value, DTensor):
            value = value.to(parameter.device)
            if isinstance(parameter, DTensor):  # smaller than its parameter, e.g. a factored moment
                mesh = parameter.device_mesh
                value = DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)
        optimizer.state[parameter][key] = value
    options_of = {name: group["options"] for group in groups for name in group["names"]}
    for group in optimizer.param_groups:
        saved = next((options_of[names[item]] for item in group["params"] if names[item] in options_of), None)
        if saved is not None:
            group.update(saved)
    for parameter, state in optimizer.state.items():  # type: ignore[assignment]
        step = state.get("step")
        group = next(group for group in optimizer.param_groups if any(item is parameter for item in group["params"]))
        if isinstance(step, torch.Tensor) and (group.get("capturable") or group.get("fused")):
            state["step"] = step.to(parameter.device)


# --- what differs by dp rank -------------------------------------------------------------------------------------


def _gather_by_dp_rank(checkpoint: dict[str, Any], mesh: RankMesh) -> list[dict[str, Any]]:
    """Random state and loader state of every dp rank, from the first rank of each replica."""
    position = mesh.coordinate
    mine = None
    if all(position[axis] == 0 for axis in ("mp", "pp", "cp")):
        mine = {"dp_rank": position["dp"], "random": random_state(), "loaders": _loader_state(checkpoint)}
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, mine)
    return sorted((item for item in gathered if item is not None), key=lambda item: item["dp_rank"])


def _loader_state(checkpoint: dict[str, Any]) -> Any:
    return checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {}).get("combined_loader")


def _restore_by_dp_rank(checkpoint: dict[str, Any], saved: list[dict[str, Any]], mesh: RankMesh, path: Path) -> None:
    """Choose this dp rank's part of `saved`: the loader state goes back to lightning, random state to `random`."""
    dp_rank, dp_size = mesh.coordinate["dp"], mesh.shape.dp
    same_size = len(saved) == dp_size
    mine = saved[dp_rank] if same_size else saved[0]
    checkpoint["random_state"] = mine["random"] if same_size or dp_rank == 0 else None
    loaders = [item["loaders"] for item in saved]
    if _loader_state(checkpoint) is None:
        return
    if not same_size and any(item != loaders[0] for item in loaders):
        raise ConfigError(
            f"ckpt_path={path}",
            f"its data loaders stand at different places on {len(saved)} dp ranks; "
            f"that can't be divided among {dp_size}",
            f"a mesh with dp={len(saved)}, or a loader whose state does not depend on the rank",
            f"mesh=dp{len(saved)}",
        )
    checkpoint["loops"]["fit_loop"]["state_dict"]["combined_loader"] = mine["loaders"]


def random_state() -> dict[str, Any]:
    """The state of every random number generator of this process, as data that `set_random_state` takes back."""
    kind, keys, position, has_gauss, cached = cast(tuple[str, np.ndarray, int, int, float], np.random.get_state())
    state = {
        "torch": torch.get_rng_state(),
        "numpy": [kind, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, cached],
        "python": list(random.getstate()),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Put back what `random_state` returned."""
    torch.set_rng_state(state["torch"])
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


# --- plain lightning checkpoints ---------------------------------------------------------------------------------


@torch.no_grad()
def _load_single_file(
    path: Path, module: LightningModule, optimizers: list[torch.optim.Optimizer], trust: bool
) -> dict[str, Any]:
    """Load a checkpoint file that lightning wrote on one device: each rank copies its parts from the mapped file."""
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=not trust, mmap=True)
    except (RuntimeError, EOFError, KeyError, pickle.UnpicklingError) as error:
        if "weights_only" in str(error):  # torch says well what it does not trust
            raise
        raise ConfigError(f"ckpt_path={path}", "is damaged: torch can't read it", "a complete checkpoint") from error
    if len(optimizers) > len(checkpoint.get("optimizer_states", [])):
        raise _other_optimizers(path, len(checkpoint.get("optimizer_states", [])), len(optimizers))
    saved = checkpoint.pop("state_dict")
    mine = module.state_dict()
    stored = {
        f"model.{name}": TensorStorageMetadata(properties=None, size=value.shape, chunks=[])  # type: ignore[arg-type]
        for name, value in saved.items()
        if isinstance(value, torch.Tensor)
    }
    _check_names({f"model.{name}": tensor for name, tensor in mine.items()}, stored, path, module.strict_loading)
    for name, tensor in mine.items():
        if isinstance(tensor, torch.Tensor) and name in saved:
            _copy_part(saved[name], tensor)
    names = {parameter: name for name, parameter in module.named_parameters()}
    for optimizer, state in zip(optimizers, checkpoint.pop("optimizer_states", []), strict=False):
        order = [parameter for _, parameter in _named(optimizer, names)]
        values: dict[str, Any] = {}
        for index, entries in state["state"].items():
            parameter = order[index]
            for key, value in entries.items():
                if isinstance(value, torch.Tensor) and value.shape == parameter.shape and value.dim() > 0:
                    part = torch.zeros_like(parameter, dtype=value.dtype, requires_grad=False)
                    _copy_part(value, part)
                    value = part
                values[f"state.{names[parameter]}.{key}"] = value
        groups = [
            {
                "names": [names[order[index]] for index in group["params"]],
                "options": {key: value for key, value in group.items() if key != "params"},
            }
            for group in state["param_groups"]
        ]
        _fill_optimizer(optimizer, names, values, groups)
    checkpoint["state_dict"], checkpoint["optimizer_states"] = {}, []
    return checkpoint


def _copy_part(whole: torch.Tensor, part: torch.Tensor) -> None:
    if isinstance(part, DTensor):
        part.to_local().copy_(whole[local_index(part)])
    else:
        part.copy_(whole)
