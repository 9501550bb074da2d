"""The terminal that everything is shown on."""

from __future__ import annotations

import os
import sys

from rich.console import Console


class Terminal(Console):
    """A console whose reader may leave (`| head`): what runs goes on, unseen, and writes its files."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
