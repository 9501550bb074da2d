"""Whether the ranks of a run still move: what each says of itself, and when standing still is a hang.

The task says `PULSE.moved(...)` where it makes progress; whoever watches (the parent of a local run, rank 0 of one on
several machines) hears of it and judges by its own clock.

A long step, a first step that compiles, a validation, a slow file system are no hang. So nothing is a hang before *no*
rank has moved for `launch.hang_timeout`, and then it depends on what the ranks do: one whose process is stopped, or
ranks that all wait for each other, will never move again; one that works may take longer, see `Limits`.
"""

from __future__ import annotations

import contextlib
import os
import struct
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from autolaunch.launch.stacks import Frame, Stack, named, render_stacks, same_place

LONGER = 10
"""A step may take so many times as long as the longest before it."""

MOST_SECONDS, LEAST_SECONDS = 5.0, 0.1
"""Between two looks at the ranks; a twelfth of `launch.hang_timeout` in between."""


class Activity(StrEnum):
    """What a rank is doing."""

    STARTING = "starting"
    """Everything until its first step is done."""
    STEP = "in a step"
    BETWEEN = "between two steps"
    """Between two steps, or in a validation."""
    SAVING = "saving a checkpoint"
    ENDING = "ending"


class Beat(NamedTuple):
    """What a rank says of itself."""

    moves: int = 0
    """How often it has moved so far."""
    activity: Activity = Activity.STARTING
    step: int = 0
    """Optimizer steps done."""
    longest: float = 0.0
    """The longest time between two moves within a step, in seconds; the first step aside."""


class Board:
    """Where the ranks of a local run write what they do: memory that they share with their parent, a slot for each.

    Args:
        descriptor: of an open file; see `make`.
    """

    _SLOT = struct.Struct("<qqqd")
    _ACTIVITIES = list(Activity)
    _NUMBERS = {activity: number for number, activity in enumerate(_ACTIVITIES)}

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    @classmethod
    @contextlib.contextmanager
    def make(cls) -> Iterator[Board]:
        """A new board; ranks inherit its descriptor. No file of a disk, which might be slow or full."""
        with contextlib.ExitStack() as opened:
            if hasattr(os, "memfd_create"):
                descriptor = os.memfd_create("heartbeats")
                opened.callback(os.close, descriptor)
            else:
                descriptor = opened.enter_context(tempfile.TemporaryFile()).fileno()
            yield cls(descriptor)

    def write(self, rank: int, beat: Beat) -> None:
        """Say what a rank does."""
        slot = self._SLOT.pack(beat.moves, self._NUMBERS[beat.activity], beat.step, beat.longest)
        os.pwrite(self.descriptor, slot, rank * self._SLOT.size)

    def read(self, rank: int) -> Beat:
        """What the rank has said last."""
        slot = os.pread(self.descriptor, self._SLOT.size, rank * self._SLOT.size)
        if len(slot) < self._SLOT.size:
            return Beat()
        moves, activity, step, longest = self._SLOT.unpack(slot)
        return Beat(moves, self._ACTIVITIES[activity], step, longest)


class Pulse:
    """The moves of this process, as the one rank that it is."""

    def __init__(self) -> None:
        self.beat = Beat()
        self._since = time.monotonic()
        self._tell: Callable[[Beat], None] | None = None

    def begin(self, tell: Callable[[Beat], None] | None = None) -> None:
        """Count from nothing, for a new run; `tell` is called at every move."""
        self.beat, self._since, self._tell = Beat(), time.monotonic(), tell

    def moved(self, activity: Activity, step: int) -> None:
        """Note that this rank has got somewhere: what it does now, and its optimizer steps so far."""
        now, before = time.monotonic(), self.beat
        longest = before.longest
        if before.activity == Activity.STEP and now - self._since > longest:
            longest = now - self._since
        self.beat, self._since = Beat(before.moves + 1, activity, step, longest), now
        if self._tell is not None:
            self._tell(self.beat)


PULSE = Pulse()
"""Of this process."""


def interval(hang_timeout: float) -> float:
    """Seconds between two looks at the ranks."""
    return min(MOST_SECONDS, max(LEAST_SECONDS, hang_timeout / 12))


@dataclass(frozen=True)
class Limits:
    """How long ranks may stand still."""

    hang_timeout: float
    """`launch.hang_timeout`: nothing is a hang before it is over."""
    first_step_timeout: float
    """`launch.first_step_timeout`: for a rank that works where nothing is known of how long that takes."""

    def of(self, standing: Standing) -> float:
        """Seconds that a rank may stay where it is and not wait for others."""
        compiles = standing.stack is not None and standing.stack.compiles
        if standing.beat.activity == Activity.STEP and not compiles:
            return max(self.hang_timeout, LONGER * standing.beat.longest)
        return max(self.hang_timeout, self.first_step_timeout)


def limits_of(launch_cfg: Mapping[str, Any]) -> Limits | None:
    """What the keys of `autolaunch.config.schema.Launch` say; None if ranks may stand still for ever."""
    if launch_cfg["hang_timeout"] is None:
        return None
    return Limits(launch_cfg["hang_timeout"], launch_cfg["first_step_timeout"])


@dataclass(frozen=True)
class Standing:
    """Where a rank is while none moves."""

    beat: Beat
    stack: Stack | None
    """None if it did not answer: its process is stopped, or deep in the kernel."""


class Moves:
    """When ranks moved last, by the clock of whoever watches.

    Args:
        now: the time, as `time.monotonic` counts it.
    """

    def __init__(self, ranks: int, now: float) -> None:
        self.beats = {rank: Beat() for rank in range(ranks)}
        self._moved = dict.fromkeys(range(ranks), now)

    def hear(self, rank: int, beat: Beat, now: float) -> None:
        """Take in what a rank says."""
        if beat != self.beats[rank]:
            self.beats[rank] = beat
            self._moved[rank] = now

    def still(self, now: float) -> float:
        """Seconds for which not one rank has moved."""
        return now - max(self._moved.values())


@dataclass(frozen=True)
class Hang:
    """Ranks that will not move any more."""

    culprits: list[int]
    """Those that the others wait for; empty if all wait for each other."""
    standings: Mapping[int, Standing]
    still: float
    """Seconds for which no rank has moved."""

    def render(self) -> str:
        """The text that a person sees."""
        return "\n".join([self._headline(), *where_ranks_are(self.standings)])

    def _headline(self) -> str:
        count, seconds = len(self.standings), f"{self.still:.0f} s (launch.hang_timeout)"
        if self.culprits:
            stopped = [rank for rank in self.culprits if self.standings[rank].stack is None]
            has = "has" if len(self.culprits) == 1 else "have"
            why = ": it does not answer, its process is stopped or its machine is stuck" if stopped else ""
            return f"{named(self.culprits)} of {count} {has} not moved for {seconds}{why}"
        stacks = {rank: item.stack for rank, item in self.standings.items() if item.stack is not None}
        if len(same_place(stacks)) == 1:
            return f"no rank of {count} has moved for {seconds}: all wait for each other"
        return (
            f"no rank of {count} has moved for {seconds}: they wait for each other in different lines. What only some "
            "ranks run (`if trainer.is_global_zero:`) must not need the others: compute it on every rank, and print "
            "or write it on one"
        )


def find_hang(standings: Mapping[int, Standing], still: float, limits: Limits) -> Hang | None:
    """What keeps the ranks from moving, if it is a hang; None if there is one that may need its time.

    Args:
        standings: of every rank that is not done.
        still: seconds for which none of them has moved.
    """
    if still <= limits.hang_timeout or not standings:
        return None
    silent = [rank for rank, item in standings.items() if item.stack is None]
    if silent:
        return Hang(silent, standings, still)
    busy = [rank for rank, item in standings.items() if item.stack is not None and not item.stack.waits]
    if busy:
        patient = [rank for rank in busy if still <= limits.of(standings[rank])]
        return None if patient else Hang(busy if len(busy) < len(standings) else [], standings, still)
    # All wait in collectives: within the loop that can't end well, before it a large model may be on its way.
    uncertain = any(item.beat.activity in (Activity.STARTING, Activity.SAVING) for item in standings.values())
    if uncertain and still <= limits.first_step_timeout:
        return None
    return Hang(_behind(standings), standings, still)


def _behind(standings: Mapping[int, Standing]) -> list[int]:
    """The ranks that have done fewer steps than others."""
    most = max(item.beat.step for item in standings.values())
    return [rank for rank, item in standings.items() if item.beat.step < most]


def where_ranks_are(standings: Mapping[int, Standing]) -> list[str]:
    """Which ranks stand in which line of the user's code, then all stacks."""
    answered = {rank: item.stack for rank, item in standings.items() if item.stack is not None}
    lines = ["where the ranks are:"]
    for rank, item in standings.items():
        if item.stack is None:
            lines.append(f"  {named([rank])} ({_doing(item.beat)}): no answer")
    for frame, ranks in same_place(answered).items():
        doing = ", ".join(dict.fromkeys(_doing(standings[rank].beat) for rank in ranks))
        waiting = "waiting for other ranks" if all(answered[rank].waits for rank in ranks) else "busy"
        lines += [f"  {named(ranks)} ({doing}), {waiting}: {_place(frame)}"]
    return [*lines, *render_stacks(answered)]


def _place(frame: Frame | None) -> str:
    if frame is None:
        return "in no line of Python"
    return f"{frame.file}:{frame.line} in {frame.function}" + (f"\n      {frame.source}" if frame.source else "")


def _doing(beat: Beat) -> str:
    if beat.activity in (Activity.STEP, Activity.BETWEEN):
        return f"step {beat.step + 1}" if beat.activity == Activity.STEP else f"after step {beat.step}"
    return str(beat.activity)
