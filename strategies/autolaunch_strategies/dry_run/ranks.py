"""Which ranks of a mesh are worth pretending, and the order in which they hear from each other."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any

from autolaunch_strategies.config import AXES, ConfigError, MeshShape, ParallelConfig
from autolaunch_strategies.config.errors import first_line
from autolaunch_strategies.config.users_traceback import user_traceback
from autolaunch_strategies.dry_run.agreement import disagreements, unlike
from autolaunch_strategies.dry_run.forks import Caller, Fork, InProcess, can_fork, messages, most_at_once, start
from autolaunch_strategies.dry_run.step import PretendedRank, Training, built_once, pretend
from autolaunch_strategies.dry_run.world import (
    HEARS,
    RECORDED,
    RECORDS,
    SAID,
    NotSaidYet,
    Said,
    Way,
    World,
    unpickled,
)
from autolaunch_strategies.mesh.rank_mesh import coordinates, rank_at
from autolaunch_strategies.pipeline.placement import group_rank
from autolaunch_strategies.pipeline.record import Recording
from autolaunch_strategies.schedules.schedule import placement
from autolaunch_strategies.torch_private.tracing import reads_values
from autolaunch_strategies.tracing.unreadable import own_line


def telling_ranks(shape: MeshShape) -> list[int]:
    """One rank for each role: of the first and the last stage, and one that stands elsewhere along all other axes."""
    elsewhere = {axis: min(1, shape.sizes[axis] - 1) for axis in AXES if axis != "pp"}
    return sorted({rank_at(shape, place) for place in ({}, {"pp": shape.pp - 1}, elsewhere)})


def neighbours(shape: MeshShape) -> list[int]:
    """The first rank, and its neighbour along each axis but pp."""
    return sorted({rank_at(shape, {axis: min(1, shape.sizes[axis] - 1)}) for axis in AXES if axis != "pp"} | {0})


def pretend_and_compare(training: Training, ranks: Sequence[int] = ()) -> tuple[list[PretendedRank], list[str]]:
    """A step of each rank, and where two of them would wait for each other for ever: a sentence for each pair.

    Args:
        ranks: none for the telling ones, and their neighbours where these do other things.

    Raises:
        ConfigError: as `pretend_ranks`.
    """
    shape = training.parallel.mesh
    done = pretend_ranks(training, ranks or telling_ranks(shape))
    wrong = disagreements(exchanges := {rank.rank: rank.exchanges for rank in done})
    if not wrong and not ranks and unlike(exchanges, shape):
        beside = pretend_ranks(training, neighbours(shape))
        done += [rank for rank in beside if rank.rank not in exchanges]
        wrong = disagreements({rank.rank: rank.exchanges for rank in beside})
    return done, wrong


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
    """Steps of ranks in workers of their own, all of which have the one module that is built here.

    A rank that has to hear what was not said yet waits for it. One that works in this process can't: it ends, and
    begins again once it was said. A step is one of a training that goes on, in which everything that was said in the
    first step is known from the start.
    """

    def __init__(self, training: Training) -> None:
        self._training, self._shape = training, training.parallel.mesh
        self._line = _first_to_last(training.parallel)
        self._world = World()
        self._ready: deque[_Job] = deque()
        self._begin_once_said: dict[Way, list[_Job]] = {}
        self._listening: dict[Fork, tuple[Way, int, bool]] = {}
        """To which way, for which number, and whether it must hear it."""
        self._recorders: dict[Any, Fork | InProcess] = {}
        self._want_recording: dict[Any, list[Fork]] = {}
        self._running: dict[Fork | InProcess, _Job] = {}
        self._done: dict[int, PretendedRank] = {}
        self._ended: set[int] = set()
        """Places along pp of which everything was said."""
        self._is_heard = False

    def pretended(self, wanted: Sequence[int]) -> dict[int, PretendedRank]:
        """The ranks, by number."""
        if can_fork():
            self._training = built_once(self._training)
        jobs = [_Job(rank, coordinates(self._shape, rank)["pp"]) for rank in wanted]
        for job in sorted(jobs, key=lambda job: self._line.index(job.place)):
            self._begin(job)
        try:
            while not all(rank in self._done for rank in wanted):
                self._let_somebody_go_on()
                while self._ready and len(self._running) - len(self._listening) < most_at_once():
                    self._start(self._ready.popleft())
                for worker, message in messages(self._running):
                    self._hear(worker, message)
        finally:
            for worker in self._running:
                worker.end()
        return self._done

    def _begin(self, job: _Job) -> None:
        """Have it run, after those that it hears from: what comes through the pipeline has to have come as far."""
        line = self._line[: self._line.index(job.place) + 1]
        unheard = [way for way in pairwise(line) if not self._world.has_heard(way)]
        if can_fork():
            for way in unheard:
                self._have_said(way, job)
        elif unheard:
            self._begin_once_said.setdefault(unheard[0], []).append(job)
            self._have_said(unheard[0], job)
            return
        self._ready.append(job)

    def _have_said(self, way: Way, job: _Job) -> None:
        """Begin a rank that says more on a way to a job, if none runs or is about to.

        Raises:
            ConfigError: everything was said.
        """
        if way[0] in self._ended:
            raise self._waits_for_ever(way, job)
        live = chain(self._ready, self._running.values(), *self._begin_once_said.values())
        if not any(other.place == way[0] for other in live):
            self._begin(_Job(self._at(job, way[0]), way[0], way))

    def _let_somebody_go_on(self) -> None:
        """Answer who listens to what was said or never will be, and begin who says it."""
        for worker, (way, place, must) in list(self._listening.items()):
            if (header := self._world.header(way, place)) is not None or (not must and way[0] in self._ended):
                del self._listening[worker]
                worker.answer(header)
            else:
                self._have_said(way, self._running[worker])
        for way, jobs in list(self._begin_once_said.items()):
            self._have_said(way, jobs[0])
        if self._ready or len(self._running) > len(self._listening):
            return
        # All wait for each other: who only asks what it could begin early begins it later.
        for worker, (_, _, must) in self._listening.items():
            if not must:
                del self._listening[worker]
                worker.answer(None)
                return
        way, job = next(
            chain(
                ((way, self._running[worker]) for worker, (way, _, _) in self._listening.items()),
                ((way, jobs[0]) for way, jobs in self._begin_once_said.items()),
            )
        )
        raise self._waits_for_ever(way, job)

    def _at(self, job: _Job, place: int) -> int:
        """The rank at another place of the pipeline of a job."""
        return rank_at(self._shape, {**coordinates(self._shape, job.rank), "pp": place})

    def _waits_for_ever(self, way: Way, job: _Job) -> ConfigError:
        return ConfigError(
            f"mesh={self._shape.name}",
            f"rank {job.rank} waits for what rank {self._at(job, way[0])} never sends",
            "stages that agree on what",
        )

    def _start(self, job: _Job) -> None:
        # What a module prints, each rank would.
        self._running[start(lambda caller: self._work(job, caller), silent=self._is_heard)] = job
        self._is_heard = True

    def _work(self, job: _Job, caller: Caller) -> None:
        """In the worker: the step, and what is known of it then."""
        world = self._world.heard_from(caller)
        try:
            caller.tell(("done", pretend(self._training, job.rank, world, job.until)))
        except Said:
            caller.tell(("stopped", None))
        except NotSaidYet as silence:
            caller.tell(("waits", (silence.way, world.count(silence.way))))
        except ConfigError as error:
            caller.tell(("failed", error))
        except Exception as error:  # whatever a model raises when it is run
            refusal = _refusal(job.rank, self._shape, error)
            refusal.add_note(user_traceback(error))
            caller.tell(("failed", refusal))

    def _hear(self, worker: Fork | InProcess, message: Any) -> None:
        kind: str
        said: Any
        kind, said = message or ("vanished", None)
        if kind != RECORDED:  # whoever says something else records nothing: it has failed to, or can't send it
            for key in [key for key, recorder in self._recorders.items() if recorder is worker]:
                self._tell_recording(key, None)
        if kind == SAID:
            way, place, header = said
            if self._world.add(way, place, header):
                for job in self._begin_once_said.pop(way, []):
                    self._begin(job)
        elif kind == HEARS:
            assert isinstance(worker, Fork)
            self._listening[worker] = said
        elif kind == RECORDED:
            self._keep(said)
        elif kind == RECORDS:
            assert isinstance(worker, Fork)
            self._answer_recording(worker, said)
        elif kind == "failed":
            raise said
        else:
            self._end(worker, self._running.pop(worker), kind, said)

    def _end(self, worker: Fork | InProcess, job: _Job, kind: str, said: Any) -> None:
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
                self._begin_once_said.setdefault(way, []).append(job)

    def _answer_recording(self, worker: Fork, pickled_key: bytes) -> None:
        """Answer at once, but for what another one is recording."""
        try:
            key = unpickled(pickled_key)
        except Exception:  # of objects that can't be made again: it finds out by itself
            worker.answer(None)
            return
        recording = self._world.recording(key)
        if recording is None and self._recorders.setdefault(key, worker) is not worker:
            self._want_recording.setdefault(key, []).append(worker)
        else:
            _answer(worker, recording)

    def _keep(self, recorded: bytes) -> None:
        with suppress(Exception):  # it may hold what can't be made again: then others find out by themselves
            key, recording = unpickled(recorded)
            self._world.know(key, recording)
            self._tell_recording(key, recording)

    def _tell_recording(self, key: Any, recording: Recording | None) -> None:
        self._recorders.pop(key, None)
        for worker in self._want_recording.pop(key, []):
            _answer(worker, recording)


def _answer(worker: Fork, recording: Recording | None) -> None:
    worker.answer(None if recording is None else pickle.dumps(recording))


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
