"""Which ranks of a mesh are worth pretending, and the order in which they hear from each other."""

from __future__ import annotations

import pickle
import traceback
import warnings
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any

from autolaunch_strategies.config import AXES, ConfigError, MeshShape, ParallelConfig
from autolaunch_strategies.config.errors import first_line
from autolaunch_strategies.dry_run.forks import Fork, InProcess, Send, messages, most_at_once, start
from autolaunch_strategies.dry_run.step import PretendedRank, Training, pretend
from autolaunch_strategies.dry_run.world import NotSaidYet, Said, Way, World
from autolaunch_strategies.mesh.rank_mesh import coordinates, rank_at
from autolaunch_strategies.pipeline.placement import group_rank
from autolaunch_strategies.schedules.schedule import placement
from autolaunch_strategies.torch_private.tracing import reads_values
from autolaunch_strategies.tracing.unreadable import own_line


def telling_ranks(shape: MeshShape) -> list[int]:
    """One rank for each role: of the first and the last stage, and a neighbour of the first rank along other axes."""
    places = [{}, {"pp": shape.pp - 1}, *({axis: 1} for axis in AXES if axis != "pp" and shape.sizes[axis] > 1)]
    return sorted({rank_at(shape, place) for place in places})


def pretend_ranks(training: Training, ranks: Iterable[int]) -> list[PretendedRank]:
    """Run a step of each of these ranks, side by side; of other stages as much as one has to hear from them.

    Raises:
        ConfigError: no such rank, something that can't be pretended, or as a run would.
    """
    refuse_what_cannot_be_pretended(training.parallel)
    shape = training.parallel.mesh
    wanted = list(dict.fromkeys(ranks))
    for rank in wanted:
        if not 0 <= rank < shape.size:
            raise ConfigError(f"rank={rank}", f"mesh={shape.name} has {shape.size} ranks", f"0 to {shape.size - 1}")
    done = _SideBySide(training).pretended(wanted)
    return [done[rank] for rank in wanted]


@dataclass(frozen=True)
class _Job:
    """A step of a rank."""

    rank: int
    place: int
    """Along pp."""
    until: Way | None = None
    """Of a rank that is only listened to: as far as it says something new on this way."""


class _SideBySide:
    """Steps of ranks in workers of their own, as many at once as there are processors.

    A rank that has to hear what was not said yet ends, and begins again once it was: a step is one of a training that
    goes on, in which everything that was said in the first step is known from the start.
    """

    def __init__(self, training: Training) -> None:
        self._training, self._shape = training, training.parallel.mesh
        self._line = _first_to_last(training.parallel)
        self._world = World()
        self._ready: deque[_Job] = deque()
        self._waiting: dict[Way, list[_Job]] = {}
        self._running: dict[Fork | InProcess, _Job] = {}
        self._done: dict[int, PretendedRank] = {}
        self._ended: set[int] = set()
        """Places along pp of which everything was said."""
        self._is_heard = False

    def pretended(self, wanted: Sequence[int]) -> dict[int, PretendedRank]:
        """The ranks, by number."""
        jobs = [_Job(rank, coordinates(self._shape, rank)["pp"]) for rank in wanted]
        for job in sorted(jobs, key=lambda job: self._line.index(job.place)):
            self._begin(job)
        try:
            while not all(rank in self._done for rank in wanted):
                while self._ready and len(self._running) < most_at_once():
                    self._start(self._ready.popleft())
                if not self._running:
                    raise self._waits_for_ever(*next(iter(self._waiting.items())))
                for worker, message in messages(self._running):
                    self._hear(worker, message)
                self._ask_who_says_more()
        finally:
            for worker in self._running:
                worker.end()
        return self._done

    def _begin(self, job: _Job) -> None:
        """Have it run, once it can: what comes through the pipeline has to have come as far."""
        line = self._line[: self._line.index(job.place) + 1]
        unheard = next((way for way in pairwise(line) if not self._world.has_heard(way)), None)
        if unheard is None:
            self._ready.append(job)
        else:
            self._wait(job, unheard)

    def _wait(self, job: _Job, way: Way) -> None:
        self._waiting.setdefault(way, []).append(job)
        self._ask_who_says_more()

    def _ask_who_says_more(self) -> None:
        """Begin ranks that somebody waits for, of places of which none runs or is about to."""
        for way, jobs in list(self._waiting.items()):
            live = chain(self._ready, self._running.values(), *self._waiting.values())
            if way[0] in self._ended:
                raise self._waits_for_ever(way, jobs)
            if not any(job.place == way[0] for job in live):
                self._begin(_Job(self._at(jobs[0], way[0]), way[0], way))

    def _at(self, job: _Job, place: int) -> int:
        """The rank at another place of the pipeline of a job."""
        return rank_at(self._shape, {**coordinates(self._shape, job.rank), "pp": place})

    def _waits_for_ever(self, way: Way, jobs: Sequence[_Job]) -> ConfigError:
        return ConfigError(
            f"mesh={self._shape.name}",
            f"rank {jobs[0].rank} waits for what rank {self._at(jobs[0], way[0])} never sends",
            "stages that agree on what",
        )

    def _start(self, job: _Job) -> None:
        # What a module prints, each rank would.
        self._running[start(lambda send: self._work(job, send), silent=self._is_heard)] = job
        self._is_heard = True

    def _work(self, job: _Job, send: Send) -> None:
        """In the worker: the step, and what is known of it then."""

        def recorded(*seen: Any) -> None:
            # It may hold objects of a model that can't be sent: then others find out by themselves.
            with suppress(Exception):
                send(("recorded", pickle.dumps(seen)))

        world = self._world.heard_from(lambda *said: send(("said", said)), recorded)
        try:
            send(("done", pretend(self._training, job.rank, world, job.until)))
        except Said:
            send(("stopped", None))
        except NotSaidYet as silence:
            send(("waits", (silence.way, world.count(silence.way))))
        except ConfigError as error:
            send(("failed", error))
        except Exception as error:  # whatever a model raises when it is run
            refusal = _refusal(job.rank, self._shape, error)
            refusal.add_note("".join(traceback.format_exception(error)))
            send(("failed", refusal))

    def _hear(self, worker: Fork | InProcess, message: Any) -> None:
        job = self._running[worker]
        kind: str
        said: Any
        kind, said = message or ("vanished", None)
        if kind == "said":
            way, place, header = said
            if self._world.add(way, place, header):
                for waiting in self._waiting.pop(way, []):
                    self._begin(waiting)
            return
        if kind == "recorded":
            with suppress(Exception), warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # torch's own, as it unpickles a tree
                self._world.know(*pickle.loads(said))  # of a fork of this process
            return
        if kind == "failed":
            raise said
        del self._running[worker]
        if kind == "vanished":
            assert isinstance(worker, Fork)
            raise ConfigError(
                f"mesh={self._shape.name}", f"the step of rank {job.rank} ended with exit code {worker.exit_code}"
            )
        worker.end()
        if kind == "done":
            self._ended.add(job.place)
            if job.until is None:
                self._done[job.rank] = said
        elif kind == "waits":
            way, heard = said
            if self._world.count(way) > heard:
                self._begin(job)
            else:
                self._wait(job, way)


def _first_to_last(parallel: ParallelConfig) -> list[int]:
    """Places along pp in the order in which a batch comes through them first."""
    if parallel.mesh.pp == 1 or parallel.pp is None:
        return list(range(parallel.mesh.pp))
    rank_of_stage = placement(parallel.pp, parallel.mesh.pp)
    return list(dict.fromkeys(group_rank(rank_of_stage, parallel.mesh.pp, n) for n in range(len(rank_of_stage))))


def _refusal(rank: int, shape: MeshShape, error: Exception) -> ConfigError:
    """What is said of a step that can't be run."""
    said, line = first_line(error), own_line(error)
    if reads_values(error):
        return ConfigError(
            f"dryrun with mesh={shape.name}",
            f"a step of rank {rank} needs values, of which a dry run has none: {line or said}",
            "a model that does not look at values, or a run",
        )
    at = f" at {line}" if line else ""
    return ConfigError(f"mesh={shape.name}", f"a step of rank {rank} raises {type(error).__name__}{at}: {said}")


def refuse_what_cannot_be_pretended(config: ParallelConfig) -> None:
    """Raise ConfigError for what needs values, or was not tried."""
    reasons = {
        "compile": (bool(config.compile), "what is compiled allocates by itself", "compile=false"),
        "recompute=budget": (
            config.recompute.mode == "budget",
            "what is computed again is chosen when blocks are compiled, which a dry run leaves out",
            "recompute=none, selective, full",
        ),
        "recompute=offload": (
            config.recompute.mode == "offload",
            "memory of the host is told apart on GPUs alone",
            "recompute=none, selective, full",
        ),
    }
    for key, (refused, problem, allowed) in reasons.items():
        if refused:
            raise ConfigError(f"dryrun with {key}", problem, allowed, allowed.partition(",")[0])
