"""data=tokens: tokens that lie ready in .bin and .npy files of any size."""

from __future__ import annotations

from typing import Any

from autolaunch.data.documents import TOKEN_SUFFIXES, find_files
from autolaunch.data.windows import Parts, TokenFile, Windows, split


def open_sequences(config: dict[str, Any], seed: int, vocab_size: int | None = None) -> Parts:
    """The sequences of a `TokenData` config; opens no file before its first token is asked for.

    Args:
        vocab_size: how many token ids the model knows (None: nobody knows); others are refused when they are read.

    Raises:
        ConfigError: files that are absent, empty or unreadable.
    """
    training = _windows(config, "path", vocab_size)
    test = None if config["test_path"] is None else _windows(config, "test_path", vocab_size)
    if config["validation_path"] is not None:
        return Parts(training, _windows(config, "validation_path", vocab_size), test)
    return split(training, config, test)


def _windows(config: dict[str, Any], name: str, vocab_size: int | None) -> Windows:
    key = f"data.{name}"
    files = [TokenFile(file, config["dtype"]) for file in find_files(config[name], TOKEN_SUFFIXES, key)]
    return Windows(files, config["seq_len"], vocab_size, key)
