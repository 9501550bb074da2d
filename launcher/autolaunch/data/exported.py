"""The tokenizer that a model was trained with, beside its weights: `transformers` generates from the directory."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autolaunch.data.documents import expanded
from autolaunch.data.encoders import ChatEncoder
from autolaunch.data.tokenizers import (
    GENERATION_FILE,
    SETTINGS_FILE,
    TEMPLATE_FILE,
    load_tokenizer,
    template_text,
    tokenizer_files,
)


def write_tokenizer(directory: Path, data_cfg: Mapping[str, Any], model_path: str | None) -> None:
    """Write the tokenizer that a model was trained with into the directory of its weights, and what generation needs.

    Args:
        data_cfg: of the run; a tokenizer of its own counts more than the one that came with the model.
        model_path: where the model came from, if from files.
    """
    origin = None if model_path is None else expanded(model_path)
    own = data_cfg.get("tokenizer") if "_target_" not in data_cfg else None
    source = expanded(own) if isinstance(own, str) and own != "bytes" else origin
    if source is not None and origin is not None and source == origin / "tokenizer.json":
        source = origin
    files = [] if source is None else tokenizer_files(source)
    for file in files:
        shutil.copy(file, directory / ("tokenizer.json" if source == file else file.name))
    if files and source is not None and source.is_file():  # by itself it does not say which class reads it
        _write(directory / SETTINGS_FILE, {"tokenizer_class": "PreTrainedTokenizerFast"})
    if files and data_cfg.get("chat_template"):
        (directory / TEMPLATE_FILE).write_text(template_text(data_cfg["chat_template"]), encoding="utf-8")
    if origin is not None and (origin / GENERATION_FILE).is_file():
        shutil.copy(origin / GENERATION_FILE, directory / GENERATION_FILE)
    if files and data_cfg.get("name") == "chat":
        _end_with_answers(directory, data_cfg)


def _end_with_answers(directory: Path, data_cfg: Mapping[str, Any]) -> None:
    """Let generation stop at what the model has learned to end its answers with: a base model ends with another one."""
    tokenizer = load_tokenizer(str(directory))
    encoder = ChatEncoder(tokenizer, None, "last", data_cfg["train_on_eos"], {})
    end = encoder.end_of_answers() if data_cfg["train_on_eos"] else None
    file = directory / GENERATION_FILE
    config = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    known = config.get("eos_token_id", tokenizer.eos_token_id)
    known = known if isinstance(known, list) else [] if known is None else [known]
    ends = known if end is None or end in known else [*known, end]
    if ends:
        _write(file, {**config, "eos_token_id": ends if len(ends) > 1 else ends[0]})


def _write(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
