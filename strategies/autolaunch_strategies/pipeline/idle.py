"""How much of a training step a rank of a pipeline computes, and how much of it it waits."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

WARM_UP = 2
"""Steps that do not count: the first ones tell shapes to each other and compile."""


@dataclass
class _Step:
    begin: Any
    end: Any = None
    passes: list[tuple[Any, Any]] = field(default_factory=list)


class IdleClock:
    """Measures the computing (`busy`) within training steps (`begin` to `end`) on one rank; ignored outside of them.

    On a GPU moments are events, read when the device has passed them, so that nothing waits for it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._step: _Step | None = None
        self._started: Any = None
        self._unread: deque[_Step] = deque()
        self._steps = 0
        self._busy = self._span = 0.0

    def begin(self) -> None:
        """A training step begins; one that never ended is forgotten."""
        self._step, self._started = _Step(self._now()), None

    def end(self) -> None:
        """The training step ends."""
        self.stop()
        if self._step is not None:
            self._step.end = self._now()
            self._unread.append(self._step)
            self._step = None
        while self._unread and self._has_passed(self._unread[0].end):
            self._read(self._unread.popleft())

    def start(self) -> None:
        """Computing goes on from here, until `stop`."""
        if self._step is not None and self._started is None:
            self._started = self._now()

    def stop(self) -> None:
        """Nothing is computed from here on; no error if nothing was."""
        if self._step is not None and self._started is not None:
            self._step.passes.append((self._started, self._now()))
        self._started = None

    def busy(self) -> IdleClock:
        """Computing within the block; no block within another one."""
        return self

    def __enter__(self) -> None:
        self.start()

    def __exit__(self, *error: Any) -> None:
        self.stop()

    def seconds(self) -> tuple[float, float]:
        """(busy, from begin to end) of a training step, on average after warm-up. Waits for the device.

        Both are 0 without a step. Where all steps were warm-up, those count.
        """
        while self._unread:
            if self._device.type == "cuda":
                self._unread[0].end.synchronize()
            self._read(self._unread.popleft())
        counted = self._steps - WARM_UP if self._steps > WARM_UP else max(self._steps, 1)
        return self._busy / counted, self._span / counted

    def _read(self, step: _Step) -> None:
        if self._steps == WARM_UP:
            self._busy = self._span = 0.0
        self._steps += 1
        self._busy += sum(self._between(start, end) for start, end in step.passes)
        self._span += self._between(step.begin, step.end)

    def _now(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _has_passed(self, moment: Any) -> bool:
        return bool(self._device.type != "cuda" or moment.query())

    def _between(self, start: Any, end: Any) -> float:
        return float(end - start) if self._device.type != "cuda" else start.elapsed_time(end) / 1000


def idle_share(clock: IdleClock, pipe_rank: int, ranks: int, device: torch.device) -> float | None:
    """The share of a training step, from 0 to 1, in which the ranks of a pipeline compute nothing; None without steps.

    As in a timeline, all ranks' steps are as long as the longest one: a rank waits for its first microbatch, and behind
    its last one. Collective over all ranks; the average over pipelines.

    Args:
        ranks: of one pipeline.
    """
    seconds = torch.zeros(ranks, 2, dtype=torch.float64, device=device)
    seconds[pipe_rank] = torch.tensor(clock.seconds(), dtype=torch.float64)
    dist.all_reduce(seconds)
    busy, span = seconds.unbind(1)
    longest = float(span.max())
    return 1 - float(busy.mean()) / longest if longest else None
