"""Tokenizers as files: which there are, what they are known by, and how one is loaded. Imports no torch by itself."""

from __future__ import annotations

import importlib.util
import json
from functools import cache
from pathlib import Path
from typing import Any

import xxhash

from autolaunch.data.documents import expanded
from autolaunch_strategies.config import ConfigError, as_typed

BYTES_END = 256
"""Ends a text where tokens are bytes."""
END_OF_TEXT_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]", "[SEP]")
TEMPLATE_FILE = "chat_template.jinja"
SETTINGS_FILE = "tokenizer_config.json"
GENERATION_FILE = "generation_config.json"
TOKENIZER_FILES = (
    "tokenizer.json", SETTINGS_FILE, "special_tokens_map.json", "added_tokens.json", "tokenizer.model",
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
            return PreTrainedTokenizerFast(tokenizer_file=str(place), name_or_path=str(place))
        tokenizer = AutoTokenizer.from_pretrained(str(place), local_files_only=True)
    except Exception as error:  # every kind of tokenizer fails in its own way
        raise ConfigError(where, f"transformers cannot read it: {' '.join(str(error).split())}") from error
    if not tokenizer.is_fast:
        raise ConfigError(where, "it has no tokenizer.json, nor can transformers make one of its files")
    return tokenizer


def pad_token_id(path: str) -> int | None:
    """The id that the tokenizer at `path` pads with, or that ends a text; None if its files don't say."""
    place = expanded(path)
    directory = place if place.is_dir() else place.parent
    try:
        tokenizer = json.loads((directory / "tokenizer.json" if place.is_dir() else place).read_text("utf-8"))
        vocabulary = tokenizer["model"]["vocab"]
        ids = dict(vocabulary) if isinstance(vocabulary, dict) else {}
        ids |= {token["content"]: token["id"] for token in tokenizer.get("added_tokens") or []}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    said: dict[str, Any] = {}
    for name in ("special_tokens_map.json", SETTINGS_FILE) if place.is_dir() else ():
        try:
            said |= json.loads((directory / name).read_text("utf-8"))
        except (OSError, ValueError, TypeError):
            continue
    tokens = [said.get("pad_token"), said.get("eos_token")]
    names = [token.get("content") if isinstance(token, dict) else token for token in tokens]
    return next((ids[name] for name in (*names, "[PAD]", "<pad>", *END_OF_TEXT_NAMES) if name in ids), None)


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
        return bool(json.loads((path / SETTINGS_FILE).read_text("utf-8")).get("chat_template"))
    except (OSError, ValueError, AttributeError):
        return False


def no_template(name: str) -> ConfigError:
    """The error for chats and a tokenizer without a chat template."""
    around = expanded(name).parent
    return ConfigError(
        "data=chat",
        f"the tokenizer {name} has no chat template",
        "a tokenizer with a chat template, or data.chat_template: a file with a jinja template, or the template itself",
        as_typed("data.tokenizer", around) if has_template(around) else "data.chat_template=chatml.jinja",
    )


def no_tokenizer() -> ConfigError:
    """The error for chats and no tokenizer at all."""
    return ConfigError(
        "data=chat",
        "there is no tokenizer, whose chat template would render conversations",
        "model.path or data.tokenizer: a directory with tokenizer.json",
        "data.tokenizer=DIRECTORY",
    )


def ends_of_generation(path: Path) -> frozenset[int]:
    """The tokens with which the model in a directory ends what it generates, as its generation_config.json says."""
    try:
        said = json.loads((path / GENERATION_FILE).read_text("utf-8")).get("eos_token_id")
    except (OSError, ValueError, AttributeError):
        return frozenset()
    numbers = said if isinstance(said, list) else [said]
    return frozenset(number for number in numbers if isinstance(number, int) and not isinstance(number, bool))


def whole_tokenizer(path: str) -> str:
    """The directory of a tokenizer.json that is named by itself, where the rest of its tokenizer stands beside it."""
    place = expanded(path)
    is_part = place.is_file() and (place.parent / SETTINGS_FILE).is_file()
    return str(place.parent) if is_part and place.name == "tokenizer.json" else path


def end_of_text(tokenizer: Any) -> int | None:
    """The id that ends a document; where a tokenizer does not say which, one of the usual names."""
    if tokenizer.eos_token_id is not None:
        return tokenizer.eos_token_id
    vocabulary = tokenizer.get_vocab()
    return next((vocabulary[name] for name in END_OF_TEXT_NAMES if name in vocabulary), None)
