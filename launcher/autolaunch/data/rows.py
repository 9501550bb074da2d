"""Rows of jsonl, json, parquet, arrow and text files, each with the place that a message can name. Imports no torch."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import xxhash

from autolaunch.data.documents import TEXT_SUFFIXES, expanded, find_files
from autolaunch.data.progress import moved
from autolaunch_strategies.config import ConfigError

LINES, LISTS, TABLES = (".jsonl", ".ndjson"), (".json",), (".parquet", ".arrow")
ROW_SUFFIXES = (*LINES, *LISTS, *TABLES)
"""Files of rows: JSON objects or the columns of a table."""

MOST_TOLD = 5
"""Bad rows that are named before the rest is not looked at."""

_PIECE = 2**24

_SAVED_DATASET = "dataset_info.json"
"""Stands beside the .arrow files of `datasets.Dataset.save_to_disk`, with .json files that hold no rows."""


class BadRow(ValueError):
    """A row that cannot be trained on; `str()` says why, `allowed` and `write` what would do instead."""

    def __init__(self, problem: str, allowed: str = "", write: str = "") -> None:
        super().__init__(problem)
        self.allowed, self.write = allowed, write


def bad_row_errors(bad: Sequence[tuple[str, BadRow]], may_skip: bool = True) -> list[ConfigError]:
    """The errors for bad rows that are not to be skipped: one for rows of which the same is wrong.

    Args:
        bad: the place of each, and what is wrong with it; the first `MOST_TOLD` are named, the others counted.
        may_skip: whether leaving them out would leave anything.
    """
    places: dict[tuple[str, str, str], list[str]] = {}
    for place, problem in bad[:MOST_TOLD]:
        places.setdefault((str(problem), problem.allowed, problem.write), []).append(place)
    more = len(bad) - MOST_TOLD
    errors = []
    for number, ((reason, allowed, write), (place, *others)) in enumerate(places.items(), start=1):
        reason += f"; also {', '.join(others)}" if others else ""
        if number == len(places) and more > 0:
            reason += f"; and {more:,} more bad row{' was' if more == 1 else 's were'} seen"
        if may_skip:
            skip = "data.on_bad=skip, to leave such rows out"
            write = f"{write}; or {skip}" if write else skip
        errors.append(ConfigError(place, reason, allowed, write))
    return errors


def text_of(row: Mapping[str, Any], text_key: str) -> str:
    """The text of a document.

    Raises:
        BadRow: there is no such column, or no text in it.
    """
    if text_key not in row:
        columns = ", ".join(map(str, row)) or "(none)"
        texts = [key for key, value in row.items() if isinstance(value, str)]
        raise BadRow(
            f"no column {text_key}; there are {columns}",
            "the column with the text",
            f"data.text_key={texts[0]}" if len(texts) == 1 else "",
        )
    text = row[text_key]
    if not isinstance(text, str):
        raise BadRow(f"{text_key} is a {type(text).__name__}, not text")
    if not text.strip():
        raise BadRow(f"{text_key} is empty")
    return text


def find_row_files(path: Any, key: str, with_text: bool) -> list[Path]:
    """The files that `path` means: a file, a directory (also a saved dataset), a glob or a list of them.

    Args:
        key: how messages call the setting, as ``data.path``.
        with_text: text files count as well, each as one row.

    Raises:
        ConfigError: nothing is there, a file is empty, of no known kind, or needs a library that is not installed.
    """
    if isinstance(path, list | tuple) and path:
        return [file for entry in path for file in find_row_files(entry, key, with_text)]
    suffixes = (*ROW_SUFFIXES, *(TEXT_SUFFIXES if with_text else ()))
    is_saved = isinstance(path, str) and path and (expanded(path) / _SAVED_DATASET).is_file()
    files = find_files(path, (".arrow",) if is_saved else suffixes, key)
    for file in files:
        if file.suffix.lower() not in suffixes:
            raise ConfigError(
                f"{key}={file}",
                f"a file that ends in {file.suffix or 'nothing'}",
                f"files that end in {', '.join(suffixes)}",
            )
        if file.suffix.lower() in TABLES and importlib.util.find_spec("pyarrow") is None:
            raise ConfigError(
                f"{key}={file}",
                "parquet and arrow files need the library `pyarrow`, which is not installed",
                f"{', '.join((*LINES, *LISTS))}; or parquet and arrow with `pyarrow` installed",
                "pip install 'autolaunch[data]'",
            )
    return files


class Rows(Protocol):
    """Rows that are read one after the other: of a file, or of a dataset of the hub."""

    @property
    def name(self) -> str:
        """What messages and the progress bar call them."""
        ...

    def read(self, mark: Any = None) -> Iterator[tuple[int, Mapping[str, Any] | BadRow, Any]]:
        """(number, row, mark) of every row; in place of one that cannot be read, what is wrong with it.

        Args:
            mark: that of a row, plain data: what follows it is read, without reading again what stands before.

        Raises:
            ConfigError: a table or a list that cannot be read.
        """
        ...

    def place(self, number: int) -> str:
        """How a message names a row."""
        ...

    def content(self) -> str:
        """Equal for equal rows, wherever they lie; reads all of them."""
        ...

    def size(self) -> int:
        """How much there is: bytes of a file, rows of others."""
        ...

    def head(self, count: int) -> bytes:
        """`count` bytes, or all, that tell most others from these; quickly made."""
        ...


@dataclass(frozen=True)
class FileRows:
    """The rows of a file.

    Numbers are lines of files of lines, and rows or items from 1 of all others. A text file is one row ``{text: ...}``.
    """

    file: Path

    @property
    def name(self) -> str:
        return str(self.file)

    def read(self, mark: Any = None) -> Iterator[tuple[int, Mapping[str, Any] | BadRow, Any]]:
        suffix = self.file.suffix.lower()
        if suffix in ROW_SUFFIXES and suffix not in TABLES and not _is_list(self.file):
            yield from _lines(self.file, *(mark or (0, 0)))
            return
        if suffix in TABLES:
            rows: Iterator[tuple[int, Mapping[str, Any] | BadRow]] = _table(self.file, suffix, mark or 0)
        elif suffix in ROW_SUFFIXES:
            rows = _list(self.file)
        else:
            rows = iter([(1, _text(self.file))])
        yield from ((number, row, number) for number, row in rows if number > (mark or 0))

    def place(self, number: int) -> str:
        """``chats.jsonl:12``, ``chats.parquet, row 12``."""
        suffix = self.file.suffix.lower()
        if suffix not in ROW_SUFFIXES:
            return str(self.file)
        if suffix in TABLES:
            return f"{self.file}, row {number}"
        return f"{self.file}, item {number}" if _is_list(self.file) else f"{self.file}:{number}"

    def content(self) -> str:
        content = xxhash.xxh3_128()
        with self.file.open("rb") as opened:
            while piece := opened.read(_PIECE):
                content.update(piece)
                moved()
        return f"{self.file.suffix.lower()}\0{content.hexdigest()}"  # the suffix says how it is read

    def size(self) -> int:
        return self.file.stat().st_size

    def head(self, count: int) -> bytes:
        with self.file.open("rb") as opened:
            return opened.read(count)


def _is_list(file: Path) -> bool:
    """Whether a .json file is one list: many are lines of objects in truth."""
    if file.suffix.lower() not in LISTS:
        return False
    with file.open("rb") as opened:
        return opened.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"["


def _lines(file: Path, number: int, offset: int) -> Iterator[tuple[int, Mapping[str, Any] | BadRow, list[int]]]:
    """Those behind the first `number` lines, which are `offset` bytes."""
    with file.open("rb") as opened:
        opened.seek(offset)
        for line in opened:
            number, offset = number + 1, offset + len(line)
            content = line.removeprefix(b"\xef\xbb\xbf").strip() if number == 1 else line.strip()
            if content:
                yield number, _object(content), [number, offset]


def _object(content: bytes) -> Mapping[str, Any] | BadRow:
    try:
        row = json.loads(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        return BadRow(f"not UTF-8 (byte {error.start + 1})")
    except json.JSONDecodeError as error:
        return BadRow(f"not JSON: {error.msg} at column {error.colno}", "one JSON object per line")
    except RecursionError:
        return BadRow("JSON that is nested too deeply")
    return _checked(row)


def _list(file: Path) -> Iterator[tuple[int, Mapping[str, Any] | BadRow]]:
    try:
        rows = json.loads(file.read_bytes().decode("utf-8-sig"))
    # All of its rows would be left out with one that is bad: no data.on_bad=skip passes over that.
    except (UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(str(file), f"the file cannot be read: {error}") from error
    except json.JSONDecodeError as error:
        raise ConfigError(
            str(file),
            f"the file is not JSON: {error.msg} in line {error.lineno}, column {error.colno}",
            "a list of objects, or one object per line",
        ) from error
    yield from ((number, _checked(row)) for number, row in enumerate(rows, start=1))


def _checked(row: Any) -> Mapping[str, Any] | BadRow:
    return row if isinstance(row, dict) else BadRow(f"a {type(row).__name__} instead of an object", "a JSON object")


def _table(file: Path, suffix: str, skip: int) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Those behind the first `skip` rows."""
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.memory_map(str(file)) as opened:
            if suffix == ".parquet":
                number, batches = _parquet_batches(pyarrow.parquet.ParquetFile(opened), skip)
            else:
                number, batches = 0, _arrow_batches(pyarrow, opened)
            for batch in batches:
                if number + len(batch) <= skip:
                    number += len(batch)
                    continue
                for row in batch.to_pylist():
                    number += 1
                    yield number, without_empty(row)
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(str(file), f"not a {suffix.removeprefix('.')} file that can be read: {error}") from error


def without_empty(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row of a table: a column, or a field within one, that some rows lack is there in all of them, empty."""
    return {key: _filled(value) for key, value in row.items() if value is not None}


def _filled(value: Any) -> Any:
    if isinstance(value, Mapping):
        return without_empty(value)
    return [_filled(item) for item in value] if isinstance(value, list) else value


def _parquet_batches(parquet: Any, skip: int) -> tuple[int, Any]:
    """(rows that were left out, batches of the others): row groups of which nothing is wanted are not read."""
    number, first = 0, 0
    while first < parquet.num_row_groups and number + parquet.metadata.row_group(first).num_rows <= skip:
        number, first = number + parquet.metadata.row_group(first).num_rows, first + 1
    return number, parquet.iter_batches(batch_size=1024, row_groups=range(first, parquet.num_row_groups))


def _arrow_batches(pyarrow: Any, opened: Any) -> Iterator[Any]:
    try:  # what `datasets` writes
        yield from pyarrow.ipc.open_stream(opened)
    except pyarrow.ArrowInvalid:
        opened.seek(0)
        reader = pyarrow.ipc.open_file(opened)
        yield from (reader.get_batch(number) for number in range(reader.num_record_batches))


def _text(file: Path) -> Mapping[str, Any] | BadRow:
    try:
        return {"text": file.read_text(encoding="utf-8-sig")}
    except UnicodeDecodeError as error:
        return BadRow(f"not UTF-8 (byte {error.start + 1})")
