"""data=tokens: tokens that lie ready in .bin and .npy files of any size."""

from __future__ import annotations

from typing import Any

from autolaunch.data.documents import TOKEN_SUFFIXES, find_files
from autolaunch.data.windows import Parts, TokenFile, Windows, split


def open_sequences(config: dict[str, Any], seed: int) -> Parts:
    """The sequences of a `TokenData` config; opens no file before its first token is asked for.

    Raises:
        ConfigError: files that are absent, empty or unreadable.
    """
    training = _windows(config, "path")
    test = None if config["test_path"] is None else _windows(config, "test_path")
    if config["validation_path"] is not None:
        return Parts(training, _windows(config, "validation_path"), test)
    return split(training, config, test)


def _windows(config: dict[str, Any], key: str) -> Windows:
    files = find_files(config[key], TOKEN_SUFFIXES, f"data.{key}")
    return Windows([TokenFile(file, config["dtype"]) for file in files], config["seq_len"])
