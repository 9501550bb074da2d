"""The line to write, as the person writes settings: an override of the command, or an argument in a script."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_command = False


@contextmanager
def on_command_line() -> Iterator[None]:
    """Within it settings were typed as overrides of the command; elsewhere a script has them as arguments."""
    global _command
    before, _command = _command, True
    try:
        yield
    finally:
        _command = before


def to_write(key: str, value: str, argument: str = "") -> str:
    """``cp.pad=true`` on the command line, ``cp={"pad": True}`` in a script.

    Args:
        key: an argument, or one of its fields: ``cp`` or ``cp.pad``.
        value: as in YAML.
        argument: what the argument is called in a script, if not as on the command line.
    """
    if _command:
        return f"{key}={value}"
    name, _, field = key.partition(".")
    in_python = _IN_PYTHON.get(value) or (value if value.lstrip("-").isdecimal() else f'"{value}"')
    return f"{argument or name}=" + (f'{{"{field}": {in_python}}}' if field else in_python)


_IN_PYTHON = {"true": "True", "false": "False", "null": "None"}


def as_typed(key: str, text: str | Path) -> str:
    """``'output_dir="my run"'``: what one types in a shell for a path, or whatever else a person has named."""
    return shlex.quote(f"{key}={quoted(str(text))}")


_PLAIN = re.compile(r"(?!(?:null|true|false|nan|inf)$)(?:[A-Za-z_/]|\.\.?/)[\w.:@%+/-]*", re.ASCII | re.IGNORECASE)
"""What a command line reads as the text that it is."""


def quoted(text: str) -> str:
    """A text as the value of a key on the command line: in quotes, unless it is read as it stands."""
    if _PLAIN.fullmatch(text):
        return text
    text = re.sub(r"(\\*)\$\{", r"\1\1\\${", text)  # which would stand for the value of another key
    return '"' + re.sub(r'(\\+)(?="|$)', r"\1\1", text).replace('"', r"\"") + '"'
