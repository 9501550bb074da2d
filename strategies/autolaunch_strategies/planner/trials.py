"""Trials of candidates: what one run told, what several of them say of a candidate, and the file that keeps them.

No trial is started here. Torch-free.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from autolaunch_strategies.planner.candidate import Candidate

MEASURED, TOO_SLOW, OUT_OF_MEMORY = "measured", "too slow", "out of memory"
CRASH, HANG, NOT_A_NUMBER, MISCONFIGURED, LOST = "crash", "hang", "not a number", "misconfigured", "lost"

VERDICTS = (MEASURED, TOO_SLOW, OUT_OF_MEMORY)
"""What says something about the candidate itself, so that it need not run again."""

RETRIED = (CRASH, HANG, NOT_A_NUMBER, LOST)
"""What is run once more before it is believed."""

WARM_UP = 2
"""First steps of a run that are not timed: they allocate, compile, and connect."""

_RESAMPLES = 400


@dataclass(frozen=True)
class Outcome:
    """How one run of a candidate ended."""

    status: str
    """One of the names above."""
    reason: str = ""
    """In one line; empty if it was measured."""
    seconds: tuple[float, ...] = ()
    """Of every optimizer step after the warm-up, in order."""
    tokens_per_second: float | None = None
    memory_bytes: int | None = None
    """Most that one rank had."""


@dataclass(frozen=True)
class Trial:
    """One run of one candidate."""

    candidate: Candidate
    round: int
    """0 for the first; later rounds have more steps."""
    steps: int
    """Timed steps that it was asked for."""
    predicted_s: float
    """Seconds of a step, as they were foreseen when it started."""
    outcome: Outcome
    overrides: tuple[str, ...] = ()
    """What makes the candidate, as one would type it."""
    directory: str = ""
    """Of the run, below that of the search."""

    def to_json(self, context: str) -> str:
        """As one line, for the record of searches whose `context` is the same."""
        return json.dumps({"context": context, **dataclasses.asdict(self)}, sort_keys=True)


def fingerprint(facts: Mapping[str, Any]) -> str:
    """A short text that is the same for equal facts: all that a step time depends on besides the candidate."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def read_record(path: str | os.PathLike[str], context: str) -> list[Trial]:
    """The trials of a record that were made under the same `context`; of a line cut short by a crash, nothing."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    trials = []
    for line in lines:
        try:
            values = json.loads(line)
        except json.JSONDecodeError:
            continue
        if values.pop("context") == context:
            outcome = values["outcome"]
            values["outcome"] = Outcome(**{**outcome, "seconds": tuple(outcome["seconds"])})
            values["overrides"] = tuple(values["overrides"])
            trials.append(Trial(**{**values, "candidate": Candidate(**values["candidate"])}))
    return trials


def append_record(path: str | os.PathLike[str], trial: Trial, context: str) -> None:
    """Add a trial to a record, at once: a search that is killed afterwards has it."""
    path = Path(path)
    # Behind half a line, which a crash may have left, a new one begins.
    torn = path.is_file() and path.stat().st_size > 0 and not path.read_bytes().endswith(b"\n")
    with path.open("a", encoding="utf-8") as file:
        file.write("\n" * torn + trial.to_json(context) + "\n")
        file.flush()
        os.fsync(file.fileno())


@dataclass(frozen=True)
class Timing:
    """What timed steps say: a median, and between which values it lies with 95 % confidence."""

    median: float
    low: float
    high: float
    least: float
    count: int


def timing(seconds: Sequence[float]) -> Timing:
    """Summarise timed steps by bootstrap of their median; the same for the same steps."""
    values = np.sort(np.asarray(seconds, dtype=float))
    assert len(values), "no step was timed"
    drawn = np.random.default_rng(0).integers(len(values), size=(_RESAMPLES, len(values)))
    low, high = np.quantile(np.median(values[drawn], axis=1), (0.025, 0.975))
    return Timing(float(np.median(values)), float(low), float(high), float(values[0]), len(values))
