"""Datasets of the Hugging Face hub by name, through the library `datasets`, which downloads and caches. Torch-free."""

from __future__ import annotations

import importlib.util
import os
import re
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from autolaunch.data.documents import TEXT_SUFFIXES
from autolaunch.data.rows import ROW_SUFFIXES, without_empty
from autolaunch_strategies.config import ConfigError, nearest

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_INSTALL = "pip install 'autolaunch[data]'"


def is_hub_name(path: str) -> bool:
    """Whether `path`, at which there is nothing, may name a dataset: ``owner/name``, which is like no file here."""
    is_like_a_file = Path(path).suffix.lower() in (*ROW_SUFFIXES, *TEXT_SUFFIXES) or Path(path).parent.is_dir()
    return bool(_NAME.fullmatch(path)) and not is_like_a_file


@dataclass(frozen=True)
class HubRows:
    """The rows of a dataset that has been downloaded.

    Args:
        title: how messages call it.
        dataset: a `datasets.Dataset`.
    """

    title: str
    dataset: Any

    @property
    def name(self) -> str:
        return self.title

    def read(self, mark: Any = None) -> Iterator[tuple[int, Mapping[str, Any], int]]:
        for number, row in enumerate(self.dataset.skip(mark or 0), start=(mark or 0) + 1):
            yield number, without_empty(row), number

    def place(self, number: int) -> str:
        return f"{self.title}, row {number}"

    def content(self) -> str:
        # The library's own, of revision, files and split: what it has downloaded is not read once more.
        return f"{self.title}\0{self.dataset._fingerprint}"

    def size(self) -> int:
        return len(self.dataset)

    def head(self, count: int) -> bytes:
        return self.content().encode()


@dataclass(frozen=True)
class HubShard:
    """The rows of a part of a dataset, which are read over the network.

    Args:
        title: how messages call it.
        dataset: a `datasets.IterableDataset`.
        index: of the part.
        subset: the one of the datasets under the name that it is.
        revision: the commit of the hub at which it is read.
    """

    title: str
    dataset: Any
    index: int
    subset: str
    revision: str

    @property
    def name(self) -> str:
        return self.title

    def read(self, mark: Any = None) -> Iterator[tuple[int, Mapping[str, Any], list[Any]]]:
        shard = self.dataset.shard(num_shards=self.dataset.num_shards, index=self.index)
        before = 0
        if mark is not None:
            before, state = mark
            shard.load_state_dict(state)
        for number, row in enumerate(shard, start=before + 1):
            yield number, without_empty(row), [number, shard.state_dict()]

    def place(self, number: int) -> str:
        return f"{self.title}, row {number}"

    def content(self) -> str:
        return f"{self.title}\0{self.subset}\0{self.revision}"  # more is not known before it is read

    def size(self) -> int:
        return self.dataset.num_shards

    def head(self, count: int) -> bytes:
        return self.content().encode()


def hub_shards(name: str, subset: str | None, split: str | None, where: str) -> list[HubShard]:
    """The parts in which a split of a dataset is stored, to be read over the network.

    Args, Raises: see `hub_rows`.
    """
    split = chosen_split(split, _splits(name, subset, where), where)
    builder, dataset = _streamed(name, subset, split, where)
    count = dataset.num_shards
    parts = [""] if count == 1 else [f", part {index + 1} of {count}" for index in range(count)]
    return [
        HubShard(f"{name} ({split}{part})", dataset, index, builder.config.name, str(builder.hash))
        for index, part in enumerate(parts)
    ]


def hub_rows(name: str, subset: str | None, split: str | None, where: str) -> HubRows:
    """The rows of a split of a dataset, downloaded unless that was done before.

    Args:
        name: ``owner/name``.
        subset: which of several datasets under the name.
        split: as ``train`` or ``train[:5%]``; None for ``train``, or the only one that there is.
        where: how messages call the setting.

    Raises:
        ConfigError: there is no such dataset, subset or split, it may not be read, there is no network, or the
            library is not installed.
    """
    from_there = _loaded(name, subset, chosen_split(split, _splits(name, subset, where), where), where)
    return HubRows(f"{name} ({from_there.split})", from_there)


def chosen_split(split: str | None, splits: list[str], where: str) -> str:
    """`split`, or the one to take where none is said.

    Raises:
        ConfigError: there are several, or no such one.
    """
    if split is None:
        if "train" in splits or len(splits) == 1:
            return "train" if "train" in splits else splits[0]
        raise ConfigError(where, "it has several splits, and none is called train", ", ".join(splits), _say(splits[0]))
    for part in split.split("+"):
        name = part.split("[")[0].strip()
        if name not in splits:
            close = nearest(name, splits)
            raise ConfigError(
                where,
                f"it has no split {name}" + (f"; did you mean {close}?" if close else ""),
                ", ".join(splits),
                _say(close or splits[0]),
            )
    return split


def _say(split: str) -> str:
    return f"data.split={split}"


@cache
def _splits(name: str, subset: str | None, where: str) -> list[str]:
    datasets = _library(where)
    with _Explained(name, where):
        if subset is None:
            subsets = datasets.get_dataset_config_names(name)
            if len(subsets) > 1 and "default" not in subsets:
                raise ConfigError(where, "it has several subsets", ", ".join(subsets), f"data.subset={subsets[0]}")
        return datasets.get_dataset_split_names(name, subset)


@cache
def _loaded(name: str, subset: str | None, split: str, where: str) -> Any:
    with _Explained(name, where):
        return _library(where).load_dataset(name, subset, split=split)


@cache
def _streamed(name: str, subset: str | None, split: str, where: str) -> tuple[Any, Any]:
    """(the builder of the library, which knows what it is that is read; the dataset)."""
    with _Explained(name, where):
        builder = _library(where).load_dataset_builder(name, subset)
        return builder, builder.as_streaming_dataset(split=split)


class _Explained:
    """Turns what the library raises into a message about the setting `where`."""

    def __init__(self, name: str, where: str) -> None:
        self.name, self.where = name, where

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if error is None or isinstance(error, ConfigError) or not isinstance(error, Exception):
            return
        import datasets

        text = " ".join(str(error).split())
        local = "there is no such file or directory, and "
        if isinstance(error, datasets.exceptions.DatasetNotFoundError):
            if "gated" in text:
                raise ConfigError(
                    self.where,
                    "this dataset of the hub is gated: its owner has to give you access, and you have to be logged in",
                    f"ask for access at https://huggingface.co/datasets/{self.name}",
                    "hf auth login",
                ) from error
            raise ConfigError(self.where, f"{local}the hub has no dataset of this name that you may read") from error
        if isinstance(error, ConnectionError):
            raise ConfigError(
                self.where,
                f"{local}the hub cannot be reached; no dataset of this name is in the cache of `datasets`",
                "a file or directory, or a network; a dataset that was downloaded before is found without one",
            ) from error
        raise ConfigError(self.where, f"`datasets` cannot load it: {text}") from error


def _library(where: str) -> Any:
    if importlib.util.find_spec("datasets") is None:
        raise ConfigError(
            where,
            "there is no such file or directory; datasets of the hub need the library `datasets`, which is not "
            "installed",
            write=_INSTALL,
        )
    without_network = _has_no_network()
    if without_network:
        os.environ["HF_HUB_OFFLINE"] = "1"  # for processes that are started
    import datasets
    import huggingface_hub

    if without_network:  # else every request is tried again and again
        datasets.config.HF_HUB_OFFLINE = True
        huggingface_hub.constants.HF_HUB_OFFLINE = True
    return datasets


@cache
def _has_no_network() -> bool:
    """Whether the hub's address is not even known here."""
    from urllib.request import getproxies  # with all of http, which nothing else here needs

    if getproxies():
        return False
    host = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co").hostname
    try:
        socket.getaddrinfo(host, 443)
    except OSError:
        return True
    return False
