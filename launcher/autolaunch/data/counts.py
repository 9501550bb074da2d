"""How many sequences there are and which part is for validation, from sizes alone: no data is read."""

from __future__ import annotations

from pathlib import Path

ITEM_SIZES = {"uint8": 1, "uint16": 2, "int32": 4, "uint32": 4, "int64": 8}
"""Bytes per token of the types that a .bin file may have."""


def window_count(tokens: int, seq_len: int) -> int:
    """How many windows of `seq_len` inputs and their shifted labels fit into `tokens` tokens (neighbours share one)."""
    return max(tokens - 1, 0) // seq_len


VALIDATION_FRACTION = 0.05
"""Of the sequences, where `data.validation_fraction` is left open and that is enough for a batch."""


def split_counts(sequences: int, fraction: float | None, batch: int) -> tuple[int, int]:
    """(training, validation): how many sequences at the start and at the end are for what.

    Args:
        fraction: `data.validation_fraction`; None for `VALIDATION_FRACTION`, or nothing if that is less than a batch.
        batch: sequences of an optimizer step, which is the same on every mesh; into how many parts they come is not.
    """
    validation = round(sequences * (VALIDATION_FRACTION if fraction is None else fraction))
    if fraction is None and validation < batch:
        validation = 0
    return sequences - validation, validation


def no_validation(sequences: int, fraction: float | None, validation: int) -> list[str]:
    """What to say where there is no validation although nobody said so."""
    if fraction is not None or validation:
        return []
    return [
        f"no validation: {VALIDATION_FRACTION:.0%} of {sequences:,} sequences are fewer than one batch; "
        "data.validation_path or data.validation_fraction says of what"
    ]


def bytes_token_count(document_sizes: list[int]) -> int:
    """Tokens of byte-tokenised documents: their bytes and one end-of-document id between two of them."""
    return sum(document_sizes) + max(len(document_sizes) - 1, 0)


def npy_length(path: Path) -> int:
    """Tokens in a .npy file, from its header.

    Raises:
        ValueError: not a one-dimensional array of integers, or the file is shorter than its header says.
    """
    import numpy as np

    with path.open("rb") as file:
        version = np.lib.format.read_magic(file)
        read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read_header(file)
        start = file.tell()
    if len(shape) != 1 or dtype.kind not in "iu":
        raise ValueError(f"an array of {dtype} with shape {shape}")
    if path.stat().st_size - start < shape[0] * dtype.itemsize:
        raise ValueError(
            f"cut off: {shape[0]} tokens announced, {(path.stat().st_size - start) // dtype.itemsize} there"
        )
    return int(shape[0])


def token_file_length(path: Path, dtype: str) -> int:
    """Tokens in a .bin file of `dtype` or in a .npy file."""
    return npy_length(path) if path.suffix == ".npy" else path.stat().st_size // ITEM_SIZES[dtype]
