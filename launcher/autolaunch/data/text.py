"""data=text: text files as tokens; one token per byte, or those of a tokenizer.json."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from autolaunch.data.counts import bytes_token_count
from autolaunch.data.documents import TEXT_SUFFIXES, expanded, find_files, standard_library_documents
from autolaunch.data.present import missing_tokenizers
from autolaunch.data.progress import moved
from autolaunch.data.tokenizers import END_OF_TEXT_NAMES
from autolaunch.data.windows import Parts, TokenFile, Windows, split
from autolaunch.directories import cache_entry, cache_errors, part_of
from autolaunch_strategies.config import ConfigError

BYTES_END_OF_DOCUMENT = 256
IN_MEMORY_TOKENS = 64 * 2**20
"""Byte-tokenised text smaller than this is tokenised at every start instead of being cached."""

_PIECE = 8 * 2**20


def open_sequences(config: dict[str, Any], seed: int) -> Parts:
    """The sequences of a `TextData` config; the text is tokenised unless that was done before.

    Raises:
        ConfigError: files or a tokenizer that are absent, empty or unreadable; `tokenizers` is not installed; the cache
            is full.
    """
    encoder = BytesEncoder() if config["tokenizer"] in (None, "bytes") else FileEncoder(expanded(config["tokenizer"]))
    test = None
    if config["test_path"] is not None:
        files = find_files(config["test_path"], TEXT_SUFFIXES, "data.test_path")
        test = _windows(files, encoder, config["seq_len"], "data.test_path")
    documents = standard_library_documents() if config["path"] is None else find_files(config["path"], TEXT_SUFFIXES)
    text = _windows(documents, encoder, config["seq_len"], "data.path")
    return split(text, config, test)


def _windows(documents: Sequence[bytes | Path], encoder: BytesEncoder | FileEncoder, seq_len: int, key: str) -> Windows:
    sizes = [document.stat().st_size if isinstance(document, Path) else len(document) for document in documents]
    tokens: np.ndarray | TokenFile
    if isinstance(encoder, BytesEncoder) and bytes_token_count(sizes) < IN_MEMORY_TOKENS:
        tokens = np.concatenate(list(_encoded(documents, encoder, key)))
    else:
        tokens = TokenFile(_cached(documents, encoder, key))
    return Windows([tokens], seq_len)


class BytesEncoder:
    """UTF-8 bytes as ids 0 to 255, and 256 between documents."""

    identity = "bytes"
    dtype = np.dtype("<u2")
    end_of_document: int | None = BYTES_END_OF_DOCUMENT

    def encode(self, text: bytes) -> np.ndarray:
        return np.frombuffer(text, np.uint8).astype(self.dtype)


class FileEncoder:
    """The tokens of a tokenizer.json; between documents its end-of-text token, if it has one."""

    def __init__(self, path: Path) -> None:
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise missing_tokenizers(str(path)) from None
        try:
            self.tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise ConfigError(
                f"data.tokenizer={path}", f"not a tokenizer of the library `tokenizers` ({error})"
            ) from None
        self.identity = hashlib.sha256(path.read_bytes()).hexdigest()
        highest = max(self.tokenizer.get_vocab().values(), default=0)  # ids of added tokens may leave some out
        self.dtype = np.dtype("<u2" if highest < 2**16 else "<u4")
        ids = (self.tokenizer.token_to_id(name) for name in END_OF_TEXT_NAMES)
        self.end_of_document: int | None = next((number for number in ids if number is not None), None)

    def encode(self, text: bytes) -> np.ndarray:
        # Special tokens would otherwise be put around every piece.
        encoding = self.tokenizer.encode(text.decode(), add_special_tokens=False)
        return np.asarray(encoding.ids, self.dtype)


def _encoded(documents: Sequence[bytes | Path], encoder: BytesEncoder | FileEncoder, key: str) -> Iterator[np.ndarray]:
    for number, document in enumerate(documents):
        if number and encoder.end_of_document is not None:
            yield np.asarray([encoder.end_of_document], encoder.dtype)
        before = 0
        for piece in _pieces(document):
            try:
                ids = encoder.encode(piece)
            except UnicodeDecodeError as error:
                raise ConfigError(
                    f"{key}={document}" if isinstance(document, Path) else key,
                    f"not UTF-8 (byte {before + error.start + 1})",
                    "text in UTF-8; data.tokenizer=bytes takes any bytes",
                ) from None
            yield ids
            before += len(piece)
            moved()


def _pieces(document: bytes | Path) -> Iterator[bytes]:
    """The document in pieces that end with a line, so that a file of any size is tokenised in little memory."""
    with document.open("rb") if isinstance(document, Path) else io.BytesIO(document) as file:
        while piece := file.read(_PIECE):
            yield piece + file.readline()


def _cached(documents: Sequence[bytes | Path], encoder: BytesEncoder | FileEncoder, key: str) -> Path:
    identity = hashlib.sha256(encoder.identity.encode())
    for document in documents:
        if isinstance(document, Path):
            status = document.stat()
            identity.update(repr((str(document.resolve()), status.st_size, status.st_mtime_ns)).encode())
        else:
            identity.update(hashlib.sha256(document).digest())
    with cache_errors():
        path = cache_entry(f"{identity.hexdigest()[:32]}.npy")
        if path.exists():
            return path
        # Several ranks may come here at once: each writes its own file, and the last rename wins with equal content.
        part = part_of(path)
        try:
            with part.open("xb") as file:
                _write_npy(file, _encoded(documents, encoder, key), encoder.dtype)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
    return path


def _write_npy(file: Any, chunks: Iterator[np.ndarray], dtype: np.dtype) -> None:
    def write_header(length: int) -> None:
        header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (length,)}
        np.lib.format.write_array_header_1_0(file, header)

    # The length is known only at the end; numpy pads headers so that a longer length fits in the same place.
    write_header(0)
    start, length = file.tell(), 0
    for chunk in chunks:
        file.write(chunk.tobytes())
        length += len(chunk)
    file.seek(0)
    write_header(length)
    assert file.tell() == start, "the header changed its size"
