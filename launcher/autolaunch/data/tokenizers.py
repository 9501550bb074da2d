"""Tokenizers as files: which there are, what they are known by, and how one is loaded. Imports no torch by itself."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import xxhash

from autolaunch.data.documents import expanded
from autolaunch_strategies.config import ConfigError

TEMPLATE_FILE = "chat_template.jinja"
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model",
    "sentencepiece.bpe.model", "spiece.model", "vocab.json", "vocab.txt", "merges.txt", "chat_template.json",
    TEMPLATE_FILE,
)  # fmt: skip
_VOCABULARIES = (
    "tokenizer.json",
    "tokenizer.model",
    "sentencepiece.bpe.model",
    "spiece.model",
    "vocab.json",
    "vocab.txt",
)


def tokenizer_files(path: Path) -> list[Path]:
    """The files of the tokenizer at `path`, a directory or a tokenizer.json; empty if there is none."""
    if path.is_file():
        return [path]
    if not any((path / name).is_file() for name in _VOCABULARIES):
        return []
    return [path / name for name in TOKENIZER_FILES if (path / name).is_file()]


def known_by(path: str) -> str:
    """A hash of a tokenizer's content, wherever it lies; of `bytes`, its name."""
    if path == "bytes":
        return path
    content = xxhash.xxh3_128()
    for file in tokenizer_files(expanded(path)):
        # One that is named by itself is the same tokenizer as the one in its directory only if nothing is beside it.
        content.update(f"{file.name if expanded(path).is_dir() else ''}\0".encode())
        content.update(file.read_bytes())
    return content.hexdigest()


@cache
def load_tokenizer(path: str) -> Any:
    """The tokenizer of `transformers` in a directory, or of a tokenizer.json alone.

    Raises:
        ConfigError: `transformers` is not installed, or cannot read it.
    """
    where = f"data.tokenizer={path}"
    if importlib.util.find_spec("transformers") is None:
        raise ConfigError(where, "transformers is not installed", write="pip install 'autolaunch[hf]'")
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    place = expanded(path)
    try:
        if place.is_file():
            return PreTrainedTokenizerFast(tokenizer_file=str(place))
        tokenizer = AutoTokenizer.from_pretrained(str(place), local_files_only=True)
    except Exception as error:  # every kind of tokenizer fails in its own way
        raise ConfigError(where, f"transformers cannot read it: {' '.join(str(error).split())}") from error
    if not tokenizer.is_fast:
        raise ConfigError(where, "it has no tokenizer.json, nor can transformers make one of its files")
    return tokenizer


def template_text(value: str) -> str:
    """`data.chat_template` as jinja: the content of the file that it names, or itself.

    Raises:
        ConfigError: it looks like a file that is not there, or that is not text.
    """
    where = f"data.chat_template={value}"
    if "{" in value or "\n" in value:
        return value
    try:
        return expanded(value).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = "no such file" if isinstance(error, FileNotFoundError) else f"cannot be read: {error}"
        raise ConfigError(where, reason, "a file with a jinja template, or the template itself") from None


def has_template(path: Path) -> bool:
    """Whether the tokenizer in the directory `path` brings a chat template."""
    if (path / TEMPLATE_FILE).is_file() or (path / "chat_template.json").is_file():
        return True
    try:
        return bool(json.loads((path / "tokenizer_config.json").read_text("utf-8")).get("chat_template"))
    except (OSError, ValueError, AttributeError):
        return False


def no_template(name: str) -> ConfigError:
    """The error for chats and a tokenizer without a chat template."""
    return ConfigError(
        "data=chat",
        f"the tokenizer {name} has no chat template",
        "a tokenizer with a chat template, or data.chat_template: a file with a jinja template, or the template itself",
        "data.chat_template=chatml.jinja",
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
    if source is not None and source.is_file():  # by itself it does not say which class reads it
        config = {"tokenizer_class": "PreTrainedTokenizerFast"}
        (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    if files and data_cfg.get("chat_template"):
        (directory / TEMPLATE_FILE).write_text(template_text(data_cfg["chat_template"]), encoding="utf-8")
    if origin is not None and (origin / "generation_config.json").is_file():
        shutil.copy(origin / "generation_config.json", directory / "generation_config.json")
