"""Examples that were tokenised once, in files of a cache that is known by the content of what they were made of."""

from __future__ import annotations

import hashlib
import importlib.metadata
import itertools
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from rich.console import Console
from rich.progress import Progress

from autolaunch.data.encoders import Encoder
from autolaunch.data.rows import BadRow, place_of, read_rows
from autolaunch.data.windows import TokenFile
from autolaunch.directories import writable_cache
from autolaunch_strategies.config import ConfigError, raise_all

_FORMAT = 1
_ROWS = 512
"""Rows that are tokenised at once: the library works on them in parallel."""

_TOLD = 5
"""Bad rows that are named before the rest is not looked at."""

_PIECE = 2**24
_LIBRARIES = ("transformers", "tokenizers")


class Prepared:
    """Tokenised examples of several files, one after the other; only their ends are in memory.

    Args:
        directory: of the cache.
        files: what they were made of, for messages.
    """

    def __init__(self, directory: Path, files: Sequence[Path]) -> None:
        self.files = list(files)
        meta = json.loads((directory / "meta.json").read_text(encoding="utf-8"))
        self.bad: int = meta["bad"]
        """Rows that were left out (`data.on_bad=skip`)."""
        self.first_bad: list[str] = meta["first_bad"]
        self.pad: int = meta["pad"]
        """Token id behind the last one of a sequence."""
        self.ends = np.fromfile(directory / "ends.bin", "<i8")
        """int64 [examples]: where the tokens of each end."""
        self.places = np.fromfile(directory / "places.bin", "<i8").reshape(-1, 2)
        """int64 [examples, 2]: number of the file, and of the row in it."""
        self.tokens = TokenFile(directory / "tokens.bin", "uint32")
        self.trained = TokenFile(directory / "trained.bin", "uint8")
        sizes = {len(self.tokens), len(self.trained), int(self.ends[-1]) if len(self.ends) else 0, meta["tokens"]}
        if len(sizes) != 1 or not len(self.ends) == len(self.places) == meta["examples"]:
            raise ValueError("files of the cache are cut short")

    def place(self, example: int) -> str:
        """How a message names the row of an example."""
        file, number = self.places[example]
        return place_of(self.files[file], int(number))


def prepare(
    files: Sequence[Path],
    key: str,
    identity: Mapping[str, Any],
    encoder: Callable[[], Encoder],
    on_bad: str,
    skip_after: int = _TOLD,
) -> Prepared:
    """The examples of `files`, tokenised unless that was done before, by any run on this machine.

    Several processes may come here at once: each writes its own files, and the first rename wins with equal content.

    Args:
        key: how messages call the setting, as ``data.path``.
        identity: all that the examples depend on beside the content of the files.
        encoder: makes the encoder; not called if there is nothing to do.
        on_bad: `refuse` rows that cannot be trained on, or `skip` and count them.

    Raises:
        ConfigError, ConfigErrors: bad rows, by file and line; or no row is left.
    """
    directory = writable_cache() / f"rows-{_name(files, identity, on_bad)}"
    if directory.is_dir():
        try:
            return Prepared(directory, files)
        except (OSError, ValueError, KeyError):  # cut short, say by a full disk: it is made anew
            shutil.rmtree(directory, ignore_errors=True)
    beside = Path(tempfile.mkdtemp(suffix=".part", dir=directory.parent))
    try:
        _write(beside, files, key, encoder(), on_bad, skip_after)
        try:
            beside.rename(directory)
        except OSError:
            if not (directory / "meta.json").is_file():
                raise
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return Prepared(directory, files)


def _name(files: Sequence[Path], identity: Mapping[str, Any], on_bad: str) -> str:
    content = hashlib.sha256(json.dumps(identity, sort_keys=True, default=str).encode())
    content.update(repr((_FORMAT, on_bad, [(name, _version(name)) for name in _LIBRARIES])).encode())
    for file in files:
        # The suffix says how it is read.
        content.update(f"{file.suffix.lower()}\0{_hash(file)}\0".encode())
    return content.hexdigest()[:32]


def _version(library: str) -> str:
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _hash(file: Path) -> str:
    content = xxhash.xxh3_128()
    with file.open("rb") as opened:
        while piece := opened.read(_PIECE):
            content.update(piece)
    return content.hexdigest()


def _write(directory: Path, files: Sequence[Path], key: str, encoder: Encoder, on_bad: str, most_told: int) -> None:
    started, tokens, examples = time.monotonic(), 0, 0
    errors: list[ConfigError] = []
    bad = 0
    first_bad: list[str] = []
    names = ("tokens.bin", "trained.bin", "ends.bin", "places.bin")
    tokens_file, trained_file, ends_file, places_file = opened = [(directory / name).open("wb") for name in names]
    try:
        for file_number, number, outcome in _examples(files, encoder):
            if isinstance(outcome, BadRow):
                bad += 1
                place = place_of(files[file_number], number)
                if on_bad == "refuse":
                    skip = "data.on_bad=skip, to leave such rows out"
                    write = f"{outcome.write}; or {skip}" if outcome.write else skip
                    errors.append(ConfigError(place, str(outcome), outcome.allowed, write))
                    if len(errors) == most_told:
                        break
                elif len(first_bad) < most_told:
                    first_bad.append(f"{place}: {outcome}")
                continue
            ids, trained = outcome
            tokens, examples = tokens + len(ids), examples + 1
            tokens_file.write(ids.astype("<u4").tobytes())
            trained_file.write(trained.astype(np.uint8).tobytes())
            ends_file.write(np.asarray([tokens], "<i8").tobytes())
            places_file.write(np.asarray([file_number, number], "<i8").tobytes())
    finally:
        for file in opened:
            file.close()
    raise_all(errors)
    if not examples:
        reason = f"all {bad} rows are bad; the first: {first_bad[0]}" if bad else "there are no rows in it"
        raise ConfigError(f"{key}={', '.join(map(str, files))}", reason)
    meta = {"examples": examples, "tokens": tokens, "bad": bad, "first_bad": first_bad, "pad": encoder.pad}
    (directory / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
    print(
        f"{key}: tokenised {examples:,} examples, {tokens:,} tokens, in {time.monotonic() - started:.1f} s; "
        "kept for the next run",
        file=sys.stderr,
    )


def _examples(files: Sequence[Path], encoder: Encoder) -> Iterator[tuple[int, int, Any]]:
    """(number of the file, number of the row, its example or what is wrong with it), in order, with a progress bar."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("tokenising", total=None)
        for file_number, file in enumerate(files):
            for rows in _chunks(read_rows(file)):
                good = [row for _, row in rows if not isinstance(row, BadRow)]
                encoded = iter(encoder.encode(good))
                for number, row in rows:
                    yield file_number, number, row if isinstance(row, BadRow) else next(encoded)
                bar.update(task, advance=len(rows), description=f"tokenising {file.name}")


def _chunks(rows: Iterator[tuple[int, Any]]) -> Iterator[list[tuple[int, Any]]]:
    while chunk := list(itertools.islice(rows, _ROWS)):
        yield chunk
