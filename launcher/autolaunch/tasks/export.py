"""export: a checkpoint of any mesh as safetensors under the model's own names, which `transformers` loads."""

from __future__ import annotations

import contextlib
import errno
import json
import tempfile
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from autolaunch.config.recorded import recorded_adapter
from autolaunch.config.trained import another_model, trained_config
from autolaunch.data.exported import write_tokenizer
from autolaunch.job import ResolvedJob
from autolaunch.launch.place import Place
from autolaunch.models import build_module
from autolaunch.models.adapter_config import unquantised
from autolaunch.models.conversion import as_in_files
from autolaunch.models.hf_export import write_transformers_files
from autolaunch.report.readable import readable_bytes, readable_count
from autolaunch.report.summary_file import write_summary
from autolaunch.report.terminal import Terminal
from autolaunch.tasks.export_adapter import MergedWeights, changed_ties, write_adapter
from autolaunch.tasks.trusted import check_targets
from autolaunch_strategies.checkpoint.files import WRITING, damage_in, files_with_hashes, problem_with, read_manifest
from autolaunch_strategies.checkpoint.record import in_words, record_of
from autolaunch_strategies.checkpoint.sharded import damaged, readable
from autolaunch_strategies.checkpoint.storage import Planner, Reader
from autolaunch_strategies.config import ConfigError
from autolaunch_strategies.model.construction import Construction

_ITS_JOB = (
    "the model of the run that wrote it, which its job says (.hydra/job.json), or what is typed where there is none"
)

SHARD_BYTES = 5 * 10**9
"""At most this much of a model is in memory and in one file, unless one tensor alone is larger."""


def run(job: ResolvedJob, place: Place) -> dict[str, Any]:
    """Export the checkpoint `ckpt_path` to `export_path` (default `<output_dir>/export`); returns the summary."""
    started = time.time()
    source = Path(job.config["ckpt_path"])
    target = Path(job.config["export_path"] or job.output_dir / "export").expanduser().absolute()
    console = Terminal()
    config, checkpoint = trained_config(source), job.config["checkpoint"]
    if config is not None and not checkpoint["trust"]:
        check_targets(source, config)
    exported = export_checkpoint(
        source,
        target,
        config or job.config,
        trust=checkpoint["trust"],
        verify=checkpoint["verify"],
        merged=job.config["export_merged"],
    )
    summary = {
        "task": "export",
        "status": "finished",
        "world_size": 1,
        "mesh": "1",
        "steps": int(read_manifest(source).get("step", 0)),
        "parameters": exported["parameters"],
        "checkpoint": str(source),
        "export": str(target),
        "seconds": time.time() - started,
    }
    write_summary(job.output_dir, summary)
    console.print(
        f"{readable_count(exported['parameters'])} parameters, {readable_bytes(exported['bytes'])} "
        f"in {exported['files']} file{'s' if exported['files'] > 1 else ''}: {target}",
        highlight=False,
    )
    return summary


def export_checkpoint(
    source: Path,
    target: Path,
    config: Mapping[str, Any],
    shard_bytes: int = SHARD_BYTES,
    *,
    trust: bool = False,
    verify: str = "hash",
    merged: bool = False,
) -> dict[str, int]:
    """Write the model of the checkpoint directory `source` to the directory `target`, beside and renamed.

    Of a run with an adapter that is the adapter, in PEFT's files.

    Args:
        config: the job that trained it: decides which model it is, and its config.json.
        shard_bytes: largest file, and the most that is held in memory (unless one tensor is larger).
        trust: run what its pickles name, if that is no plain data.
        verify: compare the content of its files with their hashes (hash), or their sizes only (size).
        merged: of a run with an adapter, the model with the adapter merged into it.

    Returns:
        parameters, bytes and files written.

    Raises:
        ConfigError: `target` exists; `source` is a single file, or damaged, or holds another model than `config` says;
            `merged` without an adapter, or the frozen weights are not those that it was trained with.
    """
    if target.exists():
        raise _exists(target)
    if source.is_file():
        raise ConfigError(
            f"ckpt_path={source}", "is a single file of plain lightning", "a checkpoint directory written by autolaunch"
        )
    if changed := another_model(config, source):
        raise ConfigError(f"ckpt_path={source}", f"was written by a run with another {in_words(changed)}", _ITS_JOB)
    construction = Construction(config["seed"])
    config = unquantised(config)
    with construction.recording():
        module = build_module(config)
    # Of attributes, torch's stubs say that they are tensors or modules.
    model: nn.Module = module if config.get("module") else module.model  # type: ignore[assignment]  # a Module: mypy says or Tensor
    adapted: Any = getattr(module, "adapted", None)
    if merged:
        _check_merged(source, config, adapted)
        changed_ties(model)
    prefix = "model." if config.get("module") else "model.model."
    problem = problem_with(source) or (damage_in(source, files_with_hashes(source)) if verify == "hash" else None)
    if problem:
        raise damaged(source, problem)
    stored = _Stored(source, prefix, trust)
    needed = () if config.get("module") else None  # a module of one's own may leave out what it can make again
    _check_weights(source, stored.metas, model, needed if adapted is None else adapted.trained)
    with _written_beside(target) as beside:
        if adapted is not None and not merged:
            values = stored.read(adapted.trained)
            total, files = write_adapter(beside, adapted, values), 1
            parameters = sum(value.numel() for value in values.values())
        else:
            tied, read, unties = _tied_names(model), stored.read, False
            metas = {name: meta for name, meta in stored.metas.items() if name not in tied}
            if adapted is not None:
                weights = MergedWeights(config, module, construction, stored.read(stored.metas))
                metas, read = weights.metas(), lambda names: {name: weights.read(name) for name in names}
                unties = weights.unties
            total, files, dtypes = _write_shards(
                beside, metas, lambda names: as_in_files(model, read(names)), shard_bytes
            )
            dtype = dtypes.pop() if len(dtypes) == 1 else "float32"
            write_transformers_files(beside, config["model"], model, dtype, unties)
            own = model.parameters() if adapted is None else [metas[name] for name in metas]
            parameters = sum(parameter.numel() for parameter in own)
        origin = None if config.get("module") else config["model"].get("path")
        write_tokenizer(beside, config.get("data") or {}, origin if isinstance(origin, str) else None)
    return {"parameters": parameters, "bytes": total, "files": files}


def _exists(target: Path) -> ConfigError:
    return ConfigError(f"export_path={target}", "exists already", "a directory that does not exist yet")


@contextlib.contextmanager
def _written_beside(target: Path) -> Iterator[Path]:
    """A directory of nobody else's, which is renamed to `target` at the end; whatever fails, it is gone.

    Raises:
        ConfigError: `target` has been written meanwhile, or nothing can be written beside it.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        private = tempfile.TemporaryDirectory(prefix=".export_", suffix=WRITING, dir=target.parent)
    except OSError as error:
        problem = f"cannot be created: {error.strerror}"
        raise ConfigError(f"export_path={target}", problem, "a directory that can be written") from None
    with private as directory:
        beside = Path(directory) / "export"
        beside.mkdir()  # whose mode is the usual one, which that of a private directory is not
        yield beside
        try:
            beside.rename(target)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
            raise _exists(target) from None


class _Stored:
    """The tensors of a checkpoint whose names begin with `prefix`, by the rest of their names."""

    def __init__(self, source: Path, prefix: str, trust: bool) -> None:
        self._source, self._prefix, self._trust = source, prefix, trust
        self._reader = Reader(source, trust)
        with readable(source):
            metadata_of = self._reader.read_metadata().state_dict_metadata
        self.metas = {
            name.removeprefix(prefix): torch.empty(metadata.size, dtype=metadata.properties.dtype, device="meta")
            for name, metadata in metadata_of.items()
            if isinstance(metadata, TensorStorageMetadata) and name.startswith(prefix)
        }

    def read(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Some of them, in memory."""
        room = {self._prefix + name: torch.empty_like(self.metas[name], device="cpu") for name in names}
        with warnings.catch_warnings(), readable(self._source):
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as it should be: no_dist
            dcp.load(room, storage_reader=self._reader, planner=Planner(self._trust), no_dist=True)
        return {name.removeprefix(self._prefix): tensor for name, tensor in room.items()}


def _check_weights(
    source: Path, metas: Mapping[str, torch.Tensor], model: nn.Module, needed: Collection[str] | None
) -> None:
    """Raise ConfigError if a checkpoint holds other weights than those of the model.

    Args:
        metas: what it holds, by name.
        needed: the names that it has to hold; None for all of the model.
    """
    state = {name: item for name, item in model.state_dict(keep_vars=True).items() if isinstance(item, torch.Tensor)}
    needed = state.keys() - _tied_names(model) if needed is None else needed
    for names, problem in (
        ([name for name in metas if name not in state], "its model does not have"),
        ([name for name in state if name in needed and name not in metas], "its model has, and the checkpoint not"),
        ([name for name in metas if name in state and metas[name].shape != state[name].shape], "have another shape"),
    ):
        if names:
            said = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            raise ConfigError(f"ckpt_path={source}", f"weights that {problem}: {said}", _ITS_JOB)


def _check_merged(source: Path, config: Mapping[str, Any], adapted: Any) -> None:
    """Raise ConfigError if there is no adapter to merge, or it was trained beside other weights than are there now."""
    if adapted is None:
        raise ConfigError("export_merged=true", f"{source} is of a run without an adapter", write="export_merged=false")
    there, here = record_of(source).get("base"), recorded_adapter(config)["base"]
    if there is not None and there != here:
        raise ConfigError(
            f"ckpt_path={source}",
            f"its adapter was trained beside other weights than those that are in {config['model'].get('path')} now",
            "the model that the run began from; or the adapter alone",
            "export_merged=false",
        )


def _write_shards(
    directory: Path,
    metas: Mapping[str, torch.Tensor],
    read: Callable[[list[str]], dict[str, torch.Tensor]],
    shard_bytes: int,
) -> tuple[int, int, set[str]]:
    """Write weights to model.safetensors, or to several files and an index; returns (bytes, files, types).

    Args:
        metas: the weights by name.
        read: some of them, under the names that they have in the files.
    """
    shards = list(_shards(metas, shard_bytes))
    weight_map, total, dtypes = {}, 0, set()
    for number, names in enumerate(shards, start=1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = {name: tensor.contiguous() for name, tensor in read(names).items()}
        save_file(tensors, directory / file, {"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, file))
        total += sum(tensor.nbytes for tensor in tensors.values())
        dtypes |= {str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()}
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return total, len(shards), dtypes


def _tied_names(model: nn.Module) -> set[str]:
    """Names that stand for a tensor which has an earlier name: `transformers` ties them again after loading."""
    first = {id(tensor): name for name, tensor in reversed(list(model.state_dict(keep_vars=True).items()))}
    return {name for name, tensor in model.state_dict(keep_vars=True).items() if first[id(tensor)] != name}


def _shards(metas: Mapping[str, torch.Tensor], shard_bytes: int) -> Iterator[list[str]]:
    names: list[str] = []
    filled = 0
    for name, meta in metas.items():
        size = meta.numel() * meta.dtype.itemsize
        if names and filled + size > shard_bytes:
            yield names
            names, filled = [], 0
        names.append(name)
        filled += size
    if names:
        yield names
