"""Which ranks of a mesh are worth pretending, and the order in which they hear from each other."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from autolaunch_strategies.config import AXES, ConfigError, MeshShape, ParallelConfig
from autolaunch_strategies.config.errors import first_line
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
    """Run a step of each of these ranks, one after the other; of other stages as much as one has to hear from them.

    Raises:
        ConfigError: no such rank, something that can't be pretended, or as a run would.
    """
    refuse_what_cannot_be_pretended(training.parallel)
    shape, world = training.parallel.mesh, World()
    wanted = list(dict.fromkeys(ranks))
    for rank in wanted:
        if not 0 <= rank < shape.size:
            raise ConfigError(f"rank={rank}", f"mesh={shape.name} has {shape.size} ranks", f"0 to {shape.size - 1}")
    line = _first_to_last(training.parallel)
    done = {}
    for rank in sorted(wanted, key=lambda rank: line.index(coordinates(shape, rank)["pp"])):
        place = line.index(coordinates(shape, rank)["pp"])
        for way in pairwise(line[: place + 1]):
            if not world.has_heard(way):
                _hear(training, rank, world, way, [])
        done[rank] = _pretend(training, rank, world, None, [])
    return [done[rank] for rank in wanted]


def _first_to_last(parallel: ParallelConfig) -> list[int]:
    """Places along pp in the order in which a batch comes through them first."""
    if parallel.mesh.pp == 1 or parallel.pp is None:
        return list(range(parallel.mesh.pp))
    rank_of_stage = placement(parallel.pp, parallel.mesh.pp)
    return list(dict.fromkeys(group_rank(rank_of_stage, parallel.mesh.pp, n) for n in range(len(rank_of_stage))))


def _hear(training: Training, rank: int, world: World, way: Way, waiting: list[Way]) -> None:
    """Run the rank at the beginning of a way, in the pipeline of `rank`, until it says something new on it.

    Raises:
        ConfigError: it never does, or waits itself for who waits for it.
    """
    shape = training.parallel.mesh
    speaker = rank_at(shape, {**coordinates(shape, rank), "pp": way[0]})
    if way not in waiting:
        try:
            _pretend(training, speaker, world, way, [*waiting, way])
        except Said:
            return
    listener = rank_at(shape, {**coordinates(shape, rank), "pp": way[1]})
    raise ConfigError(
        f"mesh={shape.name}", f"rank {listener} waits for what rank {speaker} never sends", "stages that agree on what"
    )


def _pretend(training: Training, rank: int, world: World, until: Way | None, waiting: list[Way]) -> PretendedRank:
    while True:
        try:
            return pretend(training, rank, world, until)
        except NotSaidYet as silence:
            _hear(training, rank, world, silence.way, waiting)
        except ConfigError:
            raise
        except Exception as error:  # whatever a model raises when it is run
            raise _refusal(rank, training.parallel.mesh, error) from error


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
        "recompute=offload": (
            config.recompute.mode == "offload",
            "memory of the host is told apart on GPUs alone",
            "recompute=none, selective, full",
        ),
    }
    for key, (refused, problem, allowed) in reasons.items():
        if refused:
            raise ConfigError(f"dryrun with {key}", problem, allowed, allowed.partition(",")[0])
