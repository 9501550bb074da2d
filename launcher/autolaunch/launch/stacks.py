"""Where ranks stand: the stacks that they write when asked, read, and told by the line of the user's code."""

from __future__ import annotations

import linecache
import re
import sysconfig
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from autolaunch_strategies.config.users_traceback import plumbing

_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')
_COLLECTIVE = re.compile(r"torch/distributed/(distributed_c10d|_functional_collectives|nn/functional)\.py$")
_COMPILER = re.compile(r"torch/(_inductor/|_dynamo/convert_frame\.py$)|/triton/compiler/")
INNERMOST = 4
"""In so many frames a call into torch.distributed shows a wait; further out the same files only lead to the code."""

FRAMES_SHOWN = 15
"""Of a stack without any of the user's code."""


@dataclass(frozen=True)
class Frame:
    """One line of a stack."""

    file: str
    line: int
    function: str

    @property
    def source(self) -> str:
        """The text of the line; empty if the file can't be read here."""
        return linecache.getline(self.file, self.line).strip()

    @property
    def is_plumbing(self) -> bool:
        """Whether it is code of the launcher, the trainer, torch or Python, and nobody's own."""
        return self.file.startswith(_not_own())


@dataclass(frozen=True)
class Stack:
    """What all threads of a rank do, as `faulthandler` writes it: the innermost frame of each first."""

    text: str

    @property
    def threads(self) -> list[list[Frame]]:
        """The frames of each thread; the main thread, which answers to the signal, first."""
        found: list[list[Frame]] = []
        main: list[Frame] = []
        for line in self.text.splitlines():
            if line.endswith("(most recent call first):"):
                frames = main if line.startswith("Current thread") else []
                if frames is not main:
                    found.append(frames)
            elif match := _FRAME.match(line):
                frames.append(Frame(match["file"], int(match["line"]), match["function"]))
        return [main, *found]

    @property
    def waits(self) -> bool:
        """Whether the rank waits in a collective, as far as its Python frames tell."""
        main, *others = self.threads
        if _is_waiting(main):
            return True
        # Hooks of a backward pass run in a thread of their own on a GPU.
        return bool(main) and main[0].function == "_engine_run_backward" and any(map(_is_waiting, others))

    @property
    def compiles(self) -> bool:
        """Whether torch.compile is at work."""
        return any(_COMPILER.search(frame.file) for frame in self.threads[0])

    @property
    def own_line(self) -> Frame | None:
        """The innermost frame of the user's code; without one the innermost that is not torch's."""
        main = self.threads[0]
        own = next((frame for frame in main if not frame.is_plumbing), None)
        return own or next((frame for frame in main if "/torch/" not in frame.file), main[0] if main else None)


def _is_waiting(frames: list[Frame]) -> bool:
    if not frames:
        return False
    if any(_COLLECTIVE.search(frame.file) for frame in frames[:INNERMOST]):
        return True
    # A handle of torch.distributed is waited for in C, by whoever holds it; Python's own locks have a frame of Python.
    return ".wait()" in frames[0].source and not frames[0].file.startswith(sysconfig.get_path("stdlib") + "/")


@lru_cache(maxsize=1)
def _not_own() -> tuple[str, ...]:
    # site-packages lies below the standard library: a package of others in it is own code here.
    stdlib = Path(sysconfig.get_path("stdlib"))
    parts = [f"{item}/" if item.is_dir() else str(item) for item in stdlib.iterdir() if item.name != "site-packages"]
    return (*plumbing(), *parts)


def same_place(stacks: Mapping[int, Stack]) -> dict[Frame | None, list[int]]:
    """The ranks that stand in each line, by `Stack.own_line`; the line with the lowest rank first."""
    places: dict[Frame | None, list[int]] = {}
    for rank, stack in sorted(stacks.items()):
        places.setdefault(stack.own_line, []).append(rank)
    return places


def render_stacks(stacks: Mapping[int, Stack]) -> list[str]:
    """What the main thread of each rank does, from its innermost frame out to the user's code; what is equal, once."""
    texts: dict[str, list[int]] = {}
    for rank, stack in sorted(stacks.items()):
        texts.setdefault(_shown(stack.threads[0]), []).append(rank)
    return [f"stack of {named(ranks)} (most recent call first):\n{text}" for text, ranks in texts.items()]


def _shown(frames: list[Frame]) -> str:
    own = [index for index, frame in enumerate(frames) if not frame.is_plumbing]
    kept = frames[: max(own) + 1 if own else FRAMES_SHOWN]
    lines = [f'  File "{frame.file}", line {frame.line} in {frame.function}' for frame in kept]
    return "\n".join([*lines, f"  ... {len(frames) - len(kept)} more of the trainer"] if frames != kept else lines)


def named(ranks: Iterable[int]) -> str:
    """`rank 3`, or `ranks 0-2, 5`."""
    numbers = sorted(ranks)
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][-1] == number - 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    text = ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)
    return f"rank{'s' if len(numbers) > 1 else ''} {text}"
