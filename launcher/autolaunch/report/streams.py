"""Standard streams that cannot end a run: closed, full, hung up, or of an encoding that lacks a letter."""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import Any

_STREAMS = (("stdin", os.O_RDONLY), ("stdout", os.O_WRONLY), ("stderr", os.O_WRONLY))


class _Unbreakable(io.FileIO):
    """A stream that takes everything: once it cannot be written to, what comes is dropped."""

    error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or 0
        except OSError as error:
            self.error = error
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            return len(data)


def keep_streams_open() -> None:
    """Let nothing that happens to standard output and errors raise in whoever prints.

    A descriptor that was closed would be given to the next file that is opened, and what is printed would go there.
    """
    for number, (name, mode) in enumerate(_STREAMS):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, mode)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            os.set_inheritable(number, True)
        if name != "stdin":
            stream = _unbreakable(number, getattr(sys, name))
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)


def lost_output() -> OSError | None:
    """Why standard output could not be written, if so; None if its reader only left (`| head`)."""
    stream = sys.stdout
    if stream is None:
        return None
    stream.flush()
    raw = getattr(getattr(stream, "buffer", None), "raw", None)
    error = raw.error if isinstance(raw, _Unbreakable) else None
    return None if error is None or error.errno == errno.EPIPE else error


def _unbreakable(number: int, stream: Any) -> Any:
    if stream is not None and (not hasattr(stream, "fileno") or _number(stream) != number):
        return stream  # somebody has put another one in its place
    if stream is not None:
        stream.flush()
    at_once = number == 2 or bool(stream and (stream.line_buffering or stream.write_through))
    raw = _Unbreakable(number, "w", closefd=False)
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=stream.encoding if stream is not None else "utf-8",
        errors="backslashreplace",
        line_buffering=at_once,
        write_through=bool(stream and stream.write_through),
    )


def _number(stream: Any) -> int | None:
    try:
        return int(stream.fileno())
    except (OSError, ValueError):
        return None
