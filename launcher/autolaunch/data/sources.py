"""What `data.path` means where data are rows: files, saved datasets, names of the hub, with weights. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autolaunch.data.documents import expanded
from autolaunch.data.hub import chosen_split, hub_rows, hub_shards, is_hub_name
from autolaunch.data.rows import FileRows, Rows, find_row_files
from autolaunch_strategies.config import ConfigError, nearest

KEYS = ("path", "subset", "split", "weight")
_SAVED_SPLITS = "dataset_dict.json"
"""What `datasets.DatasetDict.save_to_disk` writes beside the directories of its splits."""


@dataclass(frozen=True)
class Source:
    """Rows of which a share of the sequences is made."""

    rows: list[Rows]
    weight: float | None = None


def find_sources(config: Mapping[str, Any], key: str) -> list[Source]:
    """The rows that `data.<key>` means; one source where no weights are said.

    Args:
        config: of documents, chats or labelled texts.
        key: path, validation_path or test_path; `data.subset` and `data.split` are about the first.

    Raises:
        ConfigError: something is not there or cannot be read, or an entry is wrong.
    """
    where, value = f"data.{key}", config[key]
    entries = value if isinstance(value, list | tuple) and value else [value]
    common = {name: config[name] for name in ("subset", "split") if key == "path" and config[name] is not None}
    sources, used = [], set()
    for entry in entries:
        named = dict(entry) if isinstance(entry, Mapping) else {"path": entry}
        _check(named, where, key == "path" and config["name"] != "classification")
        options = {**common, **{name: value for name, value in named.items() if value is not None}}
        streaming = key == "path" and bool(config.get("streaming"))
        rows, usable = _rows(options, where, config["name"] == "documents", streaming)
        for name in ("subset", "split"):
            if name in usable:
                used.add(name)
            elif named.get(name) is not None:
                raise _no_effect(f"{where}: {name}={named[name]}", name)
        sources.append(Source(rows, named.get("weight")))
    for name in common:
        if name not in used:
            raise _no_effect(f"data.{name}={common[name]}", name)
    return _together(sources, where)


def _no_effect(where: str, name: str) -> ConfigError:
    usable = "a dataset of the hub" + (", or a directory of save_to_disk with splits" if name == "split" else "")
    return ConfigError(where, f"it has no effect: only {usable} has {name}s", f"data.path: {usable}")


def _check(entry: Mapping[str, Any], where: str, is_weighed: bool) -> None:
    for name in entry:
        if name not in KEYS:
            close = nearest(str(name), KEYS)
            raise ConfigError(
                f"{where}: {name}",
                "a source has no such key" + (f"; did you mean {close}?" if close else ""),
                ", ".join(KEYS),
            )
    if "path" not in entry:
        raise ConfigError(f"{where}={dict(entry)}", "a source without a path", ", ".join(KEYS))
    weight = entry.get("weight")
    if weight is None:
        return
    if not is_weighed:
        reason = "it has no effect: only data.path of documents and chats is drawn from by weights"
        raise ConfigError(f"{where}: weight={weight}", reason)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < float("inf"):
        raise ConfigError(f"{where}: weight={weight}", "not a share of the sequences", "a number above 0")


def _together(sources: list[Source], where: str) -> list[Source]:
    weighted = [source for source in sources if source.weight is not None]
    if weighted and len(weighted) < len(sources):
        missing = next(source for source in sources if source.weight is None)
        raise ConfigError(
            f"{where}: {missing.rows[0].name}",
            "no weight is said, but others have one",
            "a weight for every source, or for none",
            f"'{where}=[{{path: ..., weight: 1}}, ...]'",
        )
    return sources if weighted else [Source([rows for source in sources for rows in source.rows])]


def _rows(options: Mapping[str, Any], where: str, with_text: bool, streaming: bool) -> tuple[list[Rows], set[str]]:
    """(rows of an entry, which of `subset` and `split` say something about it)."""
    path = options["path"]
    if isinstance(path, str) and path:
        place = expanded(path)
        if (place / _SAVED_SPLITS).is_file():
            directory = _saved_split(place, options.get("split"), f"{where}={path}")
            return [FileRows(file) for file in find_row_files(str(directory), where, with_text)], {"split"}
        if not place.exists() and is_hub_name(path):
            named = path, options.get("subset"), options.get("split"), f"{where}={path}"
            return [*(hub_shards(*named) if streaming else [hub_rows(*named)])], {"subset", "split"}
    return [FileRows(file) for file in find_row_files(path, where, with_text)], set()


def _saved_split(directory: Path, split: str | None, where: str) -> Path:
    try:
        splits = json.loads((directory / _SAVED_SPLITS).read_text("utf-8"))["splits"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(where, f"{_SAVED_SPLITS} in it cannot be read: {error}") from None
    if split is not None and split not in splits and "[" in split:
        raise ConfigError(where, "of a saved dataset only whole splits are read", ", ".join(splits))
    return directory / chosen_split(split, splits, where)
