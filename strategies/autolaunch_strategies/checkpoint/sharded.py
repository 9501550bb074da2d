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
import struct
import time
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lightning.pytorch import LightningModule
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten

from autolaunch_strategies.checkpoint.files import (
    METADATA,
    REMOVED,
    REPLACED,
    WRITING,
    complete_checkpoints,
    damage_in,
    files_with_hashes,
    problem_with,
    reach_disk,
    write_manifest,
)
from autolaunch_strategies.checkpoint.optimizers import (
    GroupNames,
    add_saved_groups,
    fill_optimizer,
    lost_in_checkpoints,
    moved_between,
    optimizer_tensors,
    options,
    room_for_optimizer,
    whole_groups,
)
from autolaunch_strategies.checkpoint.plain_data import NotPlainData, load_plain
from autolaunch_strategies.checkpoint.storage import Planner, Reader, Writer
from autolaunch_strategies.config import SAME_DATA_AXES, ConfigError, as_typed
from autolaunch_strategies.data_parallel.loader import equal_states
from autolaunch_strategies.mesh.rank_mesh import RankMesh
from autolaunch_strategies.torch_private.collectives import LONG_LIVED, OF_THE_MACHINE
from autolaunch_strategies.torch_private.meshes import local_index

OURS = "autolaunch"
"""Key of our part in meta.pt."""

_UNREADABLE = (
    AssertionError, AttributeError, EOFError, ImportError, LookupError, OverflowError, RuntimeError, TypeError,
    ValueError, pickle.UnpicklingError, struct.error, zipfile.BadZipFile,
)  # fmt: skip
"""What torch and pickle raise at bytes that neither of them wrote."""


class CheckpointWriter:
    """Writes checkpoints, one at a time, and removes them; both in the background if `asynchronous`.

    A checkpoint takes its place as soon as all ranks have written their parts: in the background, too, and whatever
    happens to the training meanwhile. What is removed stays until it has. After one that could not be written in the
    background the next one is written while training waits, so that a second failure is known at once.

    Args:
        timeout: seconds after which a rank is waited for no longer while a checkpoint is written in the background.
    """

    def __init__(self, asynchronous: bool = False, timeout: float = 1800.0) -> None:
        self.asynchronous, self.timeout = asynchronous, timeout
        self._group: dist.ProcessGroup | None = None
        self._running: Future[Any] | None = None
        self._path: Path | None = None
        self._doomed: list[Path] = []
        self._failure: RuntimeError | None = None
        """Why the last one could not be written."""
        self.newest = 0.0
        """When the newest checkpoint of the run was written, also before it went on here."""

    def save(
        self,
        path: Path,
        checkpoint: dict[str, Any],
        module: LightningModule,
        optimizers: list[torch.optim.Optimizer],
        mesh: RankMesh,
        optimizer_names: list[GroupNames] | None = None,
        run: Mapping[str, Any] | None = None,
        random: dict[str, Any] | None = None,
    ) -> None:
        """Write lightning's `checkpoint` to the directory `path`. Collective; `path` appears only when it is whole.

        Its `state_dict` goes into sharded files, the optimizers (may be none) too, the rest into `meta.pt`. Where the
        model is cut into stages, each rank gives what it holds; what several stages hold is written once.

        Args:
            optimizer_names: the groups of each whole optimizer, for the order of what the stages hold.
            run: plain data about the run (`checkpoint.record`).
            random: a random state to save instead of the present one.
        """
        if (failed := self._end_of_writing()) is not None:
            if isinstance(failed.__cause__, TimeoutError):
                raise failed  # it is still being written
            warnings.warn(f"{failed}; training waits for the next checkpoint", stacklevel=2)
        is_waited_for = self._failure is not None
        if path in self._doomed:
            self._doomed.remove(path)
        checkpoint = dict(checkpoint)
        model = {name: _opaque(name, value) for name, value in checkpoint.pop("state_dict").items()}
        tensors: dict[str, Any] = {"model": model if mesh.group("pp") is None else _without_strangers(model, module)}
        groups = []
        if optimizers:
            checkpoint.pop("optimizer_states")
            names = {parameter: name for name, parameter in module.named_parameters()}
            for index, optimizer in enumerate(optimizers):
                tensors[f"optimizer_{index}"] = optimizer_tensors(optimizer, names)
                if lost := lost_in_checkpoints(optimizer):
                    warnings.warn(f"optimizer {index} ({type(optimizer).__name__}) {lost}", stacklevel=2)
                order = None if optimizer_names is None else optimizer_names[index]
                groups.append(whole_groups(optimizer, names, order, mesh.group("pp")))
        checkpoint[OURS] = {"optimizer_groups": groups, "by_dp_rank": _gather_by_dp_rank(checkpoint, mesh, random)}
        beside = path.with_name(path.name + WRITING)
        if dist.get_rank() == 0:
            shutil.rmtree(beside, ignore_errors=True)
            beside.mkdir(parents=True)
            torch.save(checkpoint, beside / METADATA)
            _say_if_it_needs_trust(beside / METADATA)
        dist.barrier()
        step = int(checkpoint.get("global_step", 0))

        def publish(hashes: Mapping[str, str]) -> None:
            # The clock of another machine may be behind that of the one on which the run began.
            self.newest = max(time.time(), self.newest + 0.001)
            reach_disk(beside / METADATA)
            write_manifest(beside, step, mesh.shape.name, hashes, run, self.newest)
            _put_in_place(beside, path)
            while self._doomed:
                remove_checkpoint(self._doomed.pop())

        writer = Writer(beside, publish)
        if not self.asynchronous:
            try:
                dcp.save(tensors, storage_writer=writer)
            except CheckpointException as error:
                failure = not_written(path, error)
                raise failure from failure.__cause__
            return
        if self._group is None:  # a group of its own: training goes on in the others
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=self.timeout), group_desc=LONG_LIVED)
        self._path = path
        self._running = cast("Future[Any]", dcp.async_save(tensors, storage_writer=writer, process_group=self._group))
        if is_waited_for:
            self.finish()

    def remove(self, path: Path) -> None:
        """Delete a checkpoint directory, but not before the one that was saved last is whole. On the first rank."""
        running = self._running
        is_whole = self._failure is None if running is None else running.done() and running.exception() is None
        if is_whole:
            remove_checkpoint(path)
        else:
            self._doomed.append(path)

    def finish(self, together: bool = True) -> RuntimeError | None:
        """Wait for the checkpoint that is being written, if any.

        Collective; with `together=False` the other ranks may be gone: nothing waits for them but their writing.

        Returns:
            Why it could not be written, or is not after `timeout` seconds, also if that was told before;
            `together=False` only.

        Raises:
            RuntimeError: the same; `together` only.
        """
        if self._running is None:
            return None if together else self._failure
        if (failed := self._end_of_writing()) is not None:
            if together:
                raise failed
            return failed
        if together:
            dist.barrier()
        return None

    def _end_of_writing(self) -> RuntimeError | None:
        """Wait for the checkpoint that is being written, if any; why it could not be."""
        if self._running is None:
            return None
        running, self._running = self._running, None
        assert self._path is not None
        try:
            running.result(self.timeout)
        except (Exception, CheckpointException) as error:
            self._failure = not_written(self._path, error, self.timeout)
            return self._failure
        self._failure = None
        while dist.get_rank() == 0 and self._doomed:  # asked for just as the last one took its place
            remove_checkpoint(self._doomed.pop())
        return None


def not_written(path: Path, error: BaseException, seconds: float = 0.0) -> RuntimeError:
    """Which ranks could not write the checkpoint `path`, and why; the cause of it is what the first of them met."""
    reason, ranks = error, ""
    if isinstance(error, CheckpointException):  # the errors of all ranks; those that only wait for others are fine
        ranks = ", ".join(map(str, sorted(error.failures)))
        reason = next(iter(error.failures.values()))[0]
    late = reason is error and isinstance(error, TimeoutError)
    why = f"it is not done after {seconds:g} s" if late else f"{type(reason).__name__}: {reason}"
    if isinstance(reason, OSError) and reason.filename is None:  # of a write, which knows no path
        reason.filename = str(path)
    told = RuntimeError(f"rank {ranks or dist.get_rank()} could not write {path}: {why}")
    told.__cause__ = reason
    return told


def load_checkpoint(
    path: Path,
    module: LightningModule,
    optimizers: list[torch.optim.Optimizer],
    mesh: RankMesh,
    trust: bool = False,
    optimizer_names: list[GroupNames] | None = None,
    verify: str = "hash",
    before_filling: Callable[[], None] | None = None,
) -> dict[str, Any]:
    """Fill `module` and `optimizers` from a checkpoint written on any mesh, or by plain lightning on one device.

    Collective over the whole mesh.

    Args:
        module, optimizers: those to fill, with what this rank holds of them; no optimizers for validation, test and
            prediction.
        trust: run what its pickles name, if that is no plain data.
        optimizer_names: the groups of each whole optimizer; needed where the model is cut into stages, since plain
            lightning tells the parameters of an optimizer by their place only.
        verify: `hash` reads each file once more, a share on every rank; `size` looks at sizes only.
        before_filling: called when it is known that the checkpoint is whole and of this model; may refuse it.

    Returns:
        lightning's checkpoint; `state_dict` is that of the module, filled, and `optimizer_states` is empty.

    Raises:
        ConfigError: the checkpoint is damaged, would run code, or belongs to another model. Every rank raises the same.
    """
    if problem := damage(path, verify):
        raise damaged(path, problem)
    if path.is_file():
        return _load_single_file(path, module, optimizers, mesh, trust, optimizer_names)
    with readable(path):
        checkpoint = load_plain(path / METADATA, trust)
        ours = checkpoint.pop(OURS)
        reader = Reader(path, trust)
        known = reader.read_metadata()
        stored = known.state_dict_metadata
    if len(optimizers) > len(ours["optimizer_groups"]):
        raise _other_optimizers(path, len(ours["optimizer_groups"]), len(optimizers))
    model = module.state_dict()
    _check_names(_whole_shapes(model, mesh.group("pp")), stored, path, module.strict_loading)
    if before_filling is not None:
        before_filling()
    model = {name: _opaque(name, value) for name, value in model.items() if f"model.{name}" in stored}
    tensors: dict[str, Any] = {"model": model}
    names = {parameter: name for name, parameter in module.named_parameters()}
    trained = [
        {name for group in whole_groups(optimizer, names, None, mesh.group("pp")) for name in group["names"]}
        for optimizer in optimizers
    ]
    if moved := moved_between(ours["optimizer_groups"], trained):
        raise ConfigError(
            f"ckpt_path={path}", f"holds the state of other optimizers: {moved}", "the optimizers in their order there"
        )
    for index, optimizer in enumerate(optimizers):
        add_saved_groups(optimizer, names, ours["optimizer_groups"][index], set().union(*trained))
        key = f"optimizer_{index}"
        tensors[key] = room_for_optimizer(optimizer, names, f"{key}.", stored, known.planner_data)
    with readable(path):
        dcp.load(tensors, storage_reader=reader, planner=Planner(trust))
    _set_extra_state(module, model)
    for index, optimizer in enumerate(optimizers):
        order = None if optimizer_names is None else optimizer_names[index]
        whole = [group["names"] for group in whole_groups(optimizer, names, order, mesh.group("pp"))]
        fill_optimizer(optimizer, names, tensors[f"optimizer_{index}"], ours["optimizer_groups"][index], whole)
    checkpoint["state_dict"], checkpoint["optimizer_states"] = dict(module.state_dict()), []
    _restore_by_dp_rank(checkpoint, ours["by_dp_rank"], mesh, path)
    return checkpoint


def damage(path: Path, verify: str = "hash") -> str | None:
    """Why a checkpoint can't be loaded, in a few words, the same on every rank; None if it is whole. Collective.

    Args:
        verify: `hash` reads each file, a share on every rank; `size` looks at sizes only.
    """
    problem = problem_with(path)
    if problem is None and verify == "hash":
        rank, ranks = dist.get_rank(), dist.get_world_size()
        if path.is_dir():
            problem = damage_in(path, files_with_hashes(path)[rank::ranks])
        elif rank == 0:
            problem = _damaged_member(path)
    problems: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    return next((item for item in problems if item is not None), None)


def _damaged_member(file: Path) -> str | None:
    """What is wrong with the content of a file of `torch.save`, which is a zip archive with checksums."""
    try:
        if not zipfile.is_zipfile(file):
            with file.open("rb") as opened:
                archive_begins = opened.read(4) == b"PK\x03\x04"
            # The table of contents stands at the end; an older format has neither that nor checksums.
            return "is damaged: its end is missing" if archive_begins else None
        with zipfile.ZipFile(file) as archive:
            member = archive.testzip()
    except OSError as error:
        return f"can't be read: {error.strerror}"
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError):
        return "is damaged: it is no readable archive"
    return None if member is None else f"is damaged: the content of {member} has changed since it was written"


def damaged(path: Path, problem: str) -> ConfigError:
    """The error that a checkpoint can't be loaded, with the furthest trained whole one beside it."""
    earlier = [item for item in complete_checkpoints(path.parent) if item != path]
    return ConfigError(
        f"ckpt_path={path}",
        problem,
        "a complete checkpoint" + ("" if earlier else f"; there is no other one in {path.parent}"),
        as_typed("ckpt_path", earlier[-1]) if earlier else "",
    )


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Within it what can't be read is a ConfigError about the checkpoint `path`."""
    try:
        yield
    except (Exception, CheckpointException) as error:
        reason: BaseException = error
        if isinstance(error, CheckpointException):  # of torch: the errors of all ranks
            reason = next(iter(error.failures.values()))[0]
        if isinstance(reason, NotPlainData):
            raise ConfigError(
                f"ckpt_path={path}",
                f"holds {reason.name}, and loading that would run code that the file names",
                "tensors and plain data; names that torch.serialization.add_safe_globals adds; or files that you trust",
                "checkpoint.trust=true, in a script MeshStrategy(trust_checkpoints=True)",
            ) from error
        if isinstance(reason, OSError):
            raise damaged(path, f"can't be read: {reason}") from error
        if isinstance(reason, _UNREADABLE) and not isinstance(reason, OF_THE_MACHINE):
            raise damaged(path, f"is damaged: torch can't read it ({type(reason).__name__})") from error
        raise


def _say_if_it_needs_trust(file: Path) -> None:
    """Warn when a checkpoint is written that can't be loaded without running code."""
    try:
        load_plain(file)
    except NotPlainData as error:
        warnings.warn(
            f"checkpoints of this run hold {error.name}, which is no plain data: resuming from them needs "
            "checkpoint.trust=true, in a script MeshStrategy(trust_checkpoints=True); plain hyperparameters and "
            "callbacks' states don't",
            stacklevel=2,
        )


def _put_in_place(beside: Path, path: Path) -> None:
    replaced = path.with_name(path.name + REPLACED)
    if os.path.lexists(path):
        _remove(replaced)  # an earlier process may have died right here
        path.rename(replaced)
    beside.rename(path)
    reach_disk(path.parent)
    _remove(replaced)


def remove_checkpoint(path: Path) -> None:
    """Delete a checkpoint directory; under its own name it is never seen in parts."""
    doomed = path.with_name(path.name + REMOVED)
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


def _whole_shapes(state: dict[str, Any], pipeline: dist.ProcessGroup | None) -> dict[str, torch.Size | None]:
    """Name as `model.<name>` -> shape (None of what is no tensor) of what all stages of the model hold."""
    mine = {f"model.{name}": getattr(value, "shape", None) for name, value in state.items()}
    if pipeline is None:
        return mine
    stages: list[Any] = [None] * pipeline.size()
    dist.all_gather_object(stages, mine, group=pipeline)
    return {name: shape for stage in reversed(stages) for name, shape in stage.items()}


def _check_names(wanted: dict[str, torch.Size | None], stored: dict[str, Any], path: Path, strict: bool) -> None:
    """Raise ConfigError if names (unless not `strict`) or shapes differ; both mappings have names as `model.<name>`."""
    missing = [name for name in wanted if strict and name not in stored and not name.endswith("_extra_state")]
    unknown = [
        name
        for name in stored
        if strict and name.startswith("model.") and name not in wanted and not name.endswith("_extra_state")
    ]
    wrong = [
        f"{name.removeprefix('model.')} is {tuple(stored[name].size)} there, {tuple(shape)} here"
        for name, shape in wanted.items()
        if shape is not None and isinstance(stored.get(name), TensorStorageMetadata) and stored[name].size != shape
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


def _opaque(name: str, value: Any) -> Any:
    """`value` as it is written: a collection that `get_extra_state` gave stays whole, with keys of any type."""
    return (value,) if name.endswith("_extra_state") and isinstance(value, Mapping | list | tuple) else value


def _without_strangers(state: dict[str, Any], module: nn.Module) -> dict[str, Any]:
    """`state` without what `get_extra_state` says of modules that only other stages run: it is out of date here."""
    return {
        name: value
        for name, value in state.items()
        if not name.endswith("_extra_state") or not _is_elsewhere(module.get_submodule(name.rpartition(".")[0]))
    }


def _is_elsewhere(module: nn.Module) -> bool:
    """Whether `module` belongs to another stage: it has no parameters, but meta tensors stand in their places."""
    return next(module.parameters(), None) is None and any(
        isinstance(value, torch.Tensor) and value.is_meta for part in module.modules() for value in vars(part).values()
    )


def _set_extra_state(module: nn.Module, state: dict[str, Any]) -> None:
    """Hand loaded non-tensor state (`get_extra_state`) to its modules; tensors were filled in place."""
    for name, value in state.items():
        if name.endswith("_extra_state"):
            owner = module.get_submodule(name.rpartition(".")[0])
            owner.set_extra_state(value[0] if isinstance(value, tuple) and len(value) == 1 else value)


# --- what differs by dp rank -------------------------------------------------------------------------------------


def _gather_by_dp_rank(
    checkpoint: dict[str, Any], mesh: RankMesh, random: dict[str, Any] | None
) -> list[dict[str, Any]]:
    """Random state and loader state of every dp rank, from the first rank of each replica."""
    position = mesh.coordinate
    mine = None
    if all(position[axis] == 0 for axis in SAME_DATA_AXES):
        mine = {"dp_rank": position["dp"], "random": random or random_state(), "loaders": _loader_state(checkpoint)}
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
    if not same_size and not all(_same_position(item, loaders[0]) for item in loaders):
        if _is_between_epochs(checkpoint) and all(_has_order(state) for state in mine["loaders"]):
            del checkpoint["loops"]["fit_loop"]["state_dict"][
                "combined_loader"
            ]  # the next epoch has an order of its own
            return
        raise ConfigError(
            f"ckpt_path={path}",
            f"its data loaders stand at different places on {len(saved)} dp ranks; "
            f"that can't be divided among {dp_size}",
            f"a mesh with dp={len(saved)}, or a loader whose state does not depend on the rank",
            f"mesh=dp{len(saved)}",
        )
    checkpoint["loops"]["fit_loop"]["state_dict"]["combined_loader"] = mine["loaders"]


def _is_between_epochs(checkpoint: dict[str, Any]) -> bool:
    progress = checkpoint.get("loops", {}).get("fit_loop", {}).get("epoch_loop.batch_progress", {})
    return bool(progress.get("is_last_batch", False))


def _has_order(state: Any) -> bool:
    """Whether a loader's state is that of an order, which each rank draws for itself."""
    return isinstance(state, dict) and isinstance(state.get("position"), dict) and "order" in state["position"]


def _same_position(one: list[Any], other: list[Any]) -> bool:
    """Whether loaders stand at the same place, whatever random numbers their ranks have drawn."""
    positions = [[state.get("position", state) for state in states] for states in (one, other)]
    (mine, shape), (theirs, other_shape) = map(tree_flatten, positions)
    return shape == other_shape and all(map(equal_states, mine, theirs))


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


def share_random_state(group: dist.ProcessGroup, source: int = 0) -> None:
    """Let every rank of `group` go on with the random state of its rank `source`. Collective."""
    first = group.rank() == source
    state = [random_state() if first else None]
    dist.broadcast_object_list(state, dist.get_global_rank(group, source), group=group)
    if not first:
        assert state[0] is not None
        set_random_state(state[0])


# --- plain lightning checkpoints ---------------------------------------------------------------------------------


@torch.no_grad()
def _load_single_file(
    path: Path,
    module: LightningModule,
    optimizers: list[torch.optim.Optimizer],
    mesh: RankMesh,
    trust: bool,
    optimizer_names: list[GroupNames] | None,
) -> dict[str, Any]:
    """Load a checkpoint file that lightning wrote on one device: each rank copies its parts from the mapped file."""
    with readable(path):
        checkpoint = load_plain(path, trust, mmap=not _is_old(path))
    if len(optimizers) > len(checkpoint.get("optimizer_states", [])):
        raise _other_optimizers(path, len(checkpoint.get("optimizer_states", [])), len(optimizers))
    saved = checkpoint.pop("state_dict")
    mine = module.state_dict()
    stored = {
        # Only sizes are compared, so there are no properties.
        f"model.{name}": TensorStorageMetadata(properties=None, size=value.shape, chunks=[])  # type: ignore[arg-type]
        for name, value in saved.items()
        if isinstance(value, torch.Tensor)
    }
    _check_names(_whole_shapes(mine, mesh.group("pp")), stored, path, module.strict_loading)
    for name, tensor in mine.items():
        if isinstance(tensor, torch.Tensor) and name in saved:
            copy_part(saved[name], tensor)
    _set_extra_state(module, {name: _opaque(name, saved[name]) for name in mine if name in saved})
    names = {parameter: name for name, parameter in module.named_parameters()}
    parameters = {name: parameter for parameter, name in names.items()}
    for number, (optimizer, state) in enumerate(zip(optimizers, checkpoint.pop("optimizer_states", []), strict=False)):
        group_order = None if optimizer_names is None else optimizer_names[number]
        assert group_order is not None or mesh.group("pp") is None, "the order of all stages' parameters is not known"
        whole = [group["names"] for group in whole_groups(optimizer, names, group_order, mesh.group("pp"))]
        order = [name for group in whole for name in group]
        if len(order) < sum(len(group["params"]) for group in state["param_groups"]):
            raise ConfigError(
                f"ckpt_path={path}",
                f"holds more parameters of optimizer {number} than the {len(order)} here, and a file of plain "
                "Lightning does not say which: a callback added groups while it trained, or others are frozen",
                "a checkpoint that MeshStrategy wrote; an optimizer that has all of its groups from the start",
            )
        values: dict[str, Any] = {}
        for index, entries in state["state"].items():
            parameter = parameters.get(order[index])
            if parameter is None:
                continue  # another stage's
            for key, value in entries.items():
                if isinstance(value, torch.Tensor) and value.shape == parameter.shape and value.dim() > 0:
                    part = torch.zeros_like(parameter, dtype=value.dtype, requires_grad=False)
                    copy_part(value, part)
                    value = part
                values[f"state.{order[index]}.{key}"] = value
        groups = [
            {
                "names": [order[index] for index in group["params"]],
                "options": options(group),
            }
            for group in state["param_groups"]
        ]
        fill_optimizer(optimizer, names, values, groups, whole)
    checkpoint["state_dict"], checkpoint["optimizer_states"] = dict(mine), []
    return checkpoint


def _is_old(file: Path) -> bool:
    """Whether `torch.save` wrote it before it wrote archives; such a file can't be mapped."""
    return not zipfile.is_zipfile(file)


@torch.no_grad()
def copy_part(whole: torch.Tensor, part: torch.Tensor) -> None:
    """Fill `part`, which may be sharded, from the whole tensor."""
    if isinstance(part, DTensor):
        part.to_local().copy_(whole[local_index(part)])
    else:
        part.copy_(whole)
