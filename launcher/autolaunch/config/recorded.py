"""What each checkpoint of a run says about it, so that one that goes on can be compared. Torch-free."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import xxhash

from autolaunch.config.optimizer_groups import OPTIONS
from autolaunch.data.counts import VALIDATION_FRACTION
from autolaunch.data.documents import TEXT_SUFFIXES, TOKEN_SUFFIXES, expanded, find_files, standard_library_documents
from autolaunch.data.sources import find_sources
from autolaunch.data.tokenizers import known_by, template_text
from autolaunch.models.adapter_config import adapter_settings
from autolaunch.models.hf_config import WEIGHT_FILES, read_hf_config
from autolaunch.models.llama_config import llama_config
from autolaunch_strategies.checkpoint.record import plain_record

_OPTIMIZERS = {"adamw": "torch.optim.AdamW", "adam": "torch.optim.Adam", "sgd": "torch.optim.SGD"}

_OF_THE_TRAINER = (
    "max_steps", "max_epochs", "max_time", "limit_train_batches", "overfit_batches", "accumulate_grad_batches",
    "gradient_clip_val", "gradient_clip_algorithm",
)  # fmt: skip

_NOT_THE_DATA = (
    "batch_size", "seq_len", "microbatches", "num_workers", "test_path", "validation_path", "num_validation_sequences",
    "num_test_sequences", "subset", "split",
)  # fmt: skip
"""Keys of the group `data` that training data do not depend on, or that are compared by themselves."""

_NOT_THE_MODEL = ("name", "mp_plans", "trainable")
_NOT_OF_HF_MODELS = ("_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype", "use_cache")
"""What libraries write into a config.json by themselves."""

_HEAD_BYTES, _MOST_HEADS = 4096, 16
_SAMPLES = 64
"""Places of a file of weights that are read, to tell two models of the same shapes apart without reading them."""


def recorded(config: Mapping[str, Any]) -> dict[str, Any]:
    """The record of a resolved job: see `autolaunch_strategies.checkpoint.record`.

    Data are known by the sizes and beginnings of their files, not by where these lie; a model by its config.

    Raises:
        ConfigError: files that the config names are gone.
    """
    data, optimizer = config["data"], config["optimizer"]
    record: dict[str, Any] = {"seed": config["seed"], "data": _data(data), "model": recorded_model(config)}
    if "_target_" not in data:
        record |= {"batch_size": data["batch_size"], "seq_len": data["seq_len"]}
    if config["module"] is None:
        options = OPTIONS.get(
            optimizer["name"], [key for key in optimizer if key not in ("name", "_target_", "groups")]
        )
        record |= {f"optimizer.{key}": optimizer[key] for key in (*options, "groups")}
        record |= {f"scheduler.{key}": value for key, value in config["scheduler"].items()}
        if kind := _OPTIMIZERS.get(optimizer["name"]) or _torchs_own(optimizer["_target_"]):
            record["optimizer"] = kind
    record |= {f"trainer.{key}": config["trainer"][key] for key in _OF_THE_TRAINER}
    record |= {key: config[key] for key in ("precision", "random_numbers")}
    if config["module"] is None and config["model"].get("trainable") is not None:
        record["trainable"] = config["model"]["trainable"]
    return plain_record({**record, **recorded_adapter(config)})


def recorded_adapter(config: Mapping[str, Any]) -> dict[str, Any]:
    """The part of the record about an adapter and the frozen weights around it; nothing if there is no adapter.

    Raises:
        ConfigError: files that the config names are gone.
    """
    if config["adapter"] is None:
        return {}
    settings, model = adapter_settings(config["adapter"]), config["model"]
    record: dict[str, Any] = {"adapter": settings.record(), "base": {"seed": config["seed"]}}
    if "_target_" not in model and model["name"] == "hf" and model["path"] is not None and model["pretrained"]:
        directory = expanded(model["path"])
        record |= {"base": _weights(directory), "base_path": str(directory.absolute())}
    return plain_record(record)


def _weights(directory: Path) -> dict[str, Any]:
    """What files of weights are known by: their sizes, and what stands at places all over them."""
    index, single = (directory / name for name in WEIGHT_FILES)
    files = sorted(directory.glob("*.safetensors")) if index.is_file() else [single]
    return _known_by((file.stat().st_size for file in files), map(_samples, files))


def _samples(file: Path) -> bytes:
    size = file.stat().st_size
    with file.open("rb") as opened:
        parts = []
        for number in range(_SAMPLES):
            opened.seek(max(0, size - _HEAD_BYTES) * number // (_SAMPLES - 1))
            parts.append(opened.read(_HEAD_BYTES))
    return b"".join(parts)


def _torchs_own(target: str | None) -> str | None:
    """A class of torch.optim. What a name of the user's gives is known once it has been called."""
    return target if target is not None and target.startswith("torch.optim.") and target.count(".") == 2 else None


def _data(data: Mapping[str, Any]) -> dict[str, Any]:
    if "_target_" in data:  # which of its arguments are batch sizes, only the loaders know
        return {key: value for key, value in data.items() if key not in ("name", "num_workers", "microbatches")}
    kept = {key: value for key, value in data.items() if key not in _NOT_THE_DATA}
    if data.get("validation_path") is not None:
        del kept["validation_fraction"]
    elif kept.get("validation_fraction", 0) is None:
        kept["validation_fraction"] = VALIDATION_FRACTION
    if data["name"] == "text":
        if data["path"] is None:
            documents = standard_library_documents()
            kept["path"] = _known_by(map(len, documents), documents[:_MOST_HEADS])
        else:
            kept["path"] = _files(find_files(data["path"], TEXT_SUFFIXES))
        kept["tokenizer"] = "bytes"
        if data["tokenizer"] not in (None, "bytes"):
            kept["tokenizer"] = xxhash.xxh3_128_hexdigest(expanded(data["tokenizer"]).read_bytes())
    elif data["name"] in ("documents", "chat", "classification"):
        if not data.get("streaming"):
            kept = {key: value for key, value in kept.items() if key not in ("streaming", "shuffle_buffer")}
        sources = find_sources(data, "path")
        rows = [rows for source in sources for rows in source.rows]
        heads = (part.head(_HEAD_BYTES) for part in rows[:_MOST_HEADS])
        kept["path"] = _known_by((part.size() for part in rows), heads)
        if weights := [source.weight for source in sources if source.weight is not None]:
            kept["weights"] = weights
        kept["tokenizer"] = known_by(data["tokenizer"] or "bytes")
        if data.get("chat_template") is not None:
            kept["chat_template"] = template_text(data["chat_template"])
    elif data["name"] == "tokens":
        kept["path"] = _files(find_files(data["path"], TOKEN_SUFFIXES))
    return kept


def _files(files: list[Path]) -> dict[str, Any]:
    return _known_by((file.stat().st_size for file in files), map(_head, files[:_MOST_HEADS]))


def _head(file: Path) -> bytes:
    with file.open("rb") as opened:
        return opened.read(_HEAD_BYTES)


def _known_by(sizes: Iterable[int], heads: Iterable[bytes]) -> dict[str, Any]:
    sizes = list(sizes)
    content = xxhash.xxh3_64(repr(sizes).encode())
    for head in heads:
        content.update(head)
    return {"files": len(sizes), "bytes": sum(sizes), "xxh3": content.hexdigest()}


def recorded_model(config: Mapping[str, Any]) -> dict[str, Any]:
    """The part of the record about the model."""
    if config["module"] is not None:
        return dict(config["module"])
    model = config["model"]
    if "_target_" in model:
        return {key: value for key, value in model.items() if key not in _NOT_THE_MODEL}
    if model["name"] == "llama":
        fields = dataclasses.asdict(llama_config(model))
        del fields["init_std"]
        return fields
    return {key: value for key, value in read_hf_config(model).items() if key not in _NOT_OF_HF_MODELS}
