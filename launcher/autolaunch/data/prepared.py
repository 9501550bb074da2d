"""Examples that were tokenised once, in files of a cache that is known by the content of what they were made of."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import itertools
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from rich.console import Console
from rich.progress import Progress

from autolaunch.data.encoders import Encoder, Example
from autolaunch.data.progress import moved
from autolaunch.data.rows import MOST_TOLD, BadRow, Rows, bad_row_errors
from autolaunch.data.windows import TokenFile
from autolaunch.directories import cache_entry, cache_errors, part_of
from autolaunch_strategies.config import ConfigError, raise_all

_FORMAT = 2
_ROWS = 512
"""Rows that are tokenised at once: the library works on them in parallel."""

_LIBRARIES = ("transformers", "tokenizers")


class Tokens(Protocol):
    """What stands at each token; only slices within one example are asked for."""

    def __getitem__(self, span: slice) -> np.ndarray: ...


@dataclass
class Prepared:
    """Tokenised examples of several sources of rows, one after the other."""

    rows: list[Rows]
    """What they were made of, for messages."""
    bad: int
    """Rows that were left out (`data.on_bad=skip`)."""
    first_bad: list[str]
    pad: int
    """Token id behind the last one of a sequence."""
    ends: np.ndarray
    """int64 [examples]: where the tokens of each end."""
    places: np.ndarray
    """int64 [examples, 2]: number of the source of rows, and of the row in it."""
    tokens: Tokens
    trained: Tokens
    """Which of them are trained on, 0 or 1."""

    @classmethod
    def read(cls, directory: Path, rows: Sequence[Rows]) -> Prepared:
        """Those of a directory of the cache; only their ends are in memory.

        Raises:
            OSError, ValueError, KeyError: it is damaged.
        """
        meta = json.loads((directory / "meta.json").read_text(encoding="utf-8"))
        ends = np.fromfile(directory / "ends.bin", "<i8")
        places = np.fromfile(directory / "places.bin", "<i8").reshape(-1, 2)
        tokens = TokenFile(directory / "tokens.bin", "uint32")
        trained = TokenFile(directory / "trained.bin", "uint8")
        sizes = {len(tokens), len(trained), int(ends[-1]) if len(ends) else 0, meta["tokens"]}
        if len(sizes) != 1 or not len(ends) == len(places) == meta["examples"]:
            raise ValueError("files of the cache are cut short")
        return cls(list(rows), meta["bad"], meta["first_bad"], meta["pad"], ends, places, tokens, trained)

    @classmethod
    def joined(cls, parts: Sequence[Prepared]) -> Prepared:
        """The examples of all parts, one behind the other."""
        if len(parts) == 1:
            return parts[0]
        token_counts = [int(part.ends[-1]) for part in parts]
        first_tokens = np.cumsum([0, *token_counts[:-1]])
        first_rows = np.cumsum([0, *(len(part.rows) for part in parts[:-1])])
        return cls(
            [rows for part in parts for rows in part.rows],
            sum(part.bad for part in parts),
            [text for part in parts for text in part.first_bad],
            parts[0].pad,
            np.concatenate([part.ends + first for part, first in zip(parts, first_tokens, strict=True)]),
            np.concatenate([part.places + np.array([first, 0]) for part, first in zip(parts, first_rows, strict=True)]),
            _Joined([part.tokens for part in parts], first_tokens),
            _Joined([part.trained for part in parts], first_tokens),
        )

    def place(self, example: int) -> str:
        """How a message names the row of an example."""
        rows, number = self.places[example]
        return self.rows[rows].place(int(number))


class _Joined:
    """Tokens of several parts, numbered through."""

    def __init__(self, parts: Sequence[Tokens], firsts: np.ndarray) -> None:
        self.parts, self.firsts = parts, firsts

    def __getitem__(self, span: slice) -> np.ndarray:
        part = int(np.searchsorted(self.firsts, span.start, side="right")) - 1
        first = int(self.firsts[part])
        return self.parts[part][span.start - first : span.stop - first]


def prepare(
    rows: Sequence[Rows],
    key: str,
    identity: Mapping[str, Any],
    encoder: Callable[[], Encoder],
    on_bad: str,
    skip_after: int = MOST_TOLD,
) -> Prepared:
    """The examples of `rows`, tokenised unless that was done before, by any run on this machine.

    Several processes may come here at once: each writes its own files, and the first rename wins with equal content.

    Args:
        key: how messages call the setting, as ``data.path``.
        identity: all that the examples depend on beside the content of the rows.
        encoder: makes the encoder; not called if there is nothing to do.
        on_bad: `refuse` rows that cannot be trained on, or `skip` and count them.

    Raises:
        ConfigError, ConfigErrors: bad rows, by file and line; or no row is left; or the cache is full.
    """
    with cache_errors():
        directory = cache_entry(f"rows-{_name(rows, identity, on_bad)}")
        if directory.is_dir():
            try:
                return Prepared.read(directory, rows)
            except (OSError, ValueError, KeyError):  # cut short, say by a full disk: it is made anew
                shutil.rmtree(directory, ignore_errors=True)
        beside = part_of(directory)
        beside.mkdir()
        try:
            _write(beside, rows, key, encoder(), on_bad, skip_after)
            try:
                beside.rename(directory)
            except OSError:
                if not (directory / "meta.json").is_file():
                    raise
        finally:
            shutil.rmtree(beside, ignore_errors=True)
        return Prepared.read(directory, rows)


def _name(rows: Sequence[Rows], identity: Mapping[str, Any], on_bad: str) -> str:
    content = hashlib.sha256(json.dumps(identity, sort_keys=True, default=str).encode())
    content.update(repr((_FORMAT, on_bad, [(name, _version(name)) for name in _LIBRARIES])).encode())
    for part in rows:
        content.update(f"{part.content()}\0".encode())
    return content.hexdigest()[:32]


def _version(library: str) -> str:
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _write(directory: Path, rows: Sequence[Rows], key: str, encoder: Encoder, on_bad: str, most_told: int) -> None:
    started, tokens, examples = time.monotonic(), 0, 0
    refused: list[tuple[str, BadRow]] = []
    bad = 0
    first_bad: list[str] = []
    names = ("tokens.bin", "trained.bin", "ends.bin", "places.bin")
    with contextlib.ExitStack() as opened:
        files = [opened.enter_context((directory / name).open("wb")) for name in names]
        tokens_file, trained_file, ends_file, places_file = files
        for part, number, outcome in _examples(rows, encoder):
            if isinstance(outcome, BadRow):
                bad += 1
                place = rows[part].place(number)
                if on_bad == "refuse":
                    refused.append((place, outcome))
                    if len(refused) == most_told:
                        break
                elif len(first_bad) < most_told:
                    first_bad.append(f"{place}: {outcome}")
                continue
            ids, trained = outcome
            tokens, examples = tokens + len(ids), examples + 1
            tokens_file.write(ids.astype("<u4").tobytes())
            trained_file.write(trained.astype(np.uint8).tobytes())
            ends_file.write(np.asarray([tokens], "<i8").tobytes())
            places_file.write(np.asarray([part, number], "<i8").tobytes())
    raise_all(bad_row_errors(refused))
    if not examples:
        reason = f"all {bad} rows are bad; the first: {first_bad[0]}" if bad else "there are no rows in it"
        raise ConfigError(f"{key}={', '.join(part.name for part in rows)}", reason)
    meta = {"examples": examples, "tokens": tokens, "bad": bad, "first_bad": first_bad, "pad": encoder.pad}
    (directory / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
    print(
        f"{key}: tokenised {examples:,} examples, {tokens:,} tokens, in {time.monotonic() - started:.1f} s; "
        "kept for the next run",
        file=sys.stderr,
    )


def in_memory(rows: Sequence[Rows], examples: Sequence[tuple[int, int, Example]], pad: int) -> Prepared:
    """Examples that are not kept.

    Args:
        examples: (number of the source of rows, number of the row, example) of each.
    """
    ids = [ids for _, _, (ids, _) in examples]
    return Prepared(
        list(rows),
        0,
        [],
        pad,
        np.cumsum([len(part) for part in ids], dtype=np.int64),
        np.asarray([(part, number) for part, number, _ in examples], np.int64).reshape(-1, 2),
        np.concatenate([*ids, np.zeros(0, np.int64)]),
        np.concatenate([*(trained for _, _, (_, trained) in examples), np.zeros(0, bool)]),
    )


def _examples(rows: Sequence[Rows], encoder: Encoder) -> Iterator[tuple[int, int, Any]]:
    """(number of the source, of the row, its example or what is wrong with it), in order, with a progress bar."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("tokenising", total=None)
        for part, source in enumerate(rows):
            for chunk in _chunks((number, row) for number, row, _ in source.read()):
                good = [row for _, row in chunk if not isinstance(row, BadRow)]
                encoded = iter(encoder.encode(good))
                for number, row in chunk:
                    yield part, number, row if isinstance(row, BadRow) else next(encoded)
                moved()
                bar.update(task, advance=len(chunk), description=f"tokenising {source.name}")


def _chunks(rows: Iterator[tuple[int, Any]]) -> Iterator[list[tuple[int, Any]]]:
    while chunk := list(itertools.islice(rows, _ROWS)):
        yield chunk
