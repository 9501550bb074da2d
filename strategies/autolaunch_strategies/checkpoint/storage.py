"""How torch.distributed.checkpoint writes and reads our directories: with hashes, in place once whole, plain data only.

Its own reader and planner run any code that a file names, and none of its files has a checksum.
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from autolaunch_strategies.checkpoint.files import hash_of
from autolaunch_strategies.checkpoint.plain_data import load_plain, unpickle
from autolaunch_strategies.torch_private.checkpoints import set_element


@dataclasses.dataclass(frozen=True)
class _Written(WriteResult):
    """What a rank tells the first one about an item that it has written."""

    file: str = ""
    file_hash: str = ""


class Writer(FileSystemWriter):
    """Writes this rank's part of a checkpoint; when all ranks have, the first calls `publish`.

    Args:
        directory: to write to.
        publish: called on the first rank with the hashes of the files that the ranks wrote, by name.
    """

    def __init__(self, directory: Path, publish: Callable[[Mapping[str, str]], None]) -> None:
        super().__init__(directory)
        self._directory, self._publish = directory, publish

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the items of `plan`; their hashes go to the first rank with the rest that it is told of them."""
        results = super().write_data(plan, planner).wait()
        files = {result.storage_data.relative_path for result in results}
        hashes = {name: hash_of(self._directory / name) for name in files}
        written: Future[list[WriteResult]] = Future()
        written.set_result(
            [
                _Written(
                    item.index,
                    item.size_in_bytes,
                    item.storage_data,
                    item.storage_data.relative_path,
                    hashes[item.storage_data.relative_path],
                )
                for item in results
            ]
        )
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the first rank, when all have written: write the metadata and publish."""
        super().finish(metadata, results)
        self._publish({item.file: item.file_hash for part in results for item in part if isinstance(item, _Written)})


class Reader(FileSystemReader):
    """Reads a checkpoint directory.

    Args:
        directory: to read from.
        trust: run what its metadata name, if that is no plain data.

    Raises:
        NotPlainData: from `read_metadata`, if they are not to be trusted.
    """

    def __init__(self, directory: Path, trust: bool = False) -> None:
        super().__init__(directory)
        self._directory, self._trust = directory, trust

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What the directory holds, and where."""
        with (self._directory / ".metadata").open("rb") as file:
            metadata: Metadata = unpickle(file, self._trust)
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class Planner(DefaultLoadPlanner):
    """Plans what is read into the places at hand; what is no tensor has to be plain data.

    Args:
        trust: run what values name, if they are no plain data.

    Raises:
        NotPlainData: from `load_bytes`, if they are not to be trusted.
    """

    def __init__(self, trust: bool = False) -> None:
        super().__init__()
        self._trust = trust

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put a value that is no tensor into its place."""
        plain = load_plain(value, self._trust)
        set_element(self.original_state_dict, self.mappings[read_item.dest_index.fqn], plain)
