"""Which ranks of a mesh are worth pretending, and the order in which they hear from each other."""

from __future__ import annotations

from collections.abc import Iterable

from autolaunch_strategies.config import AXES, ConfigError, MeshShape, ParallelConfig
from autolaunch_strategies.dry_run.step import PretendedRank, Training, pretend
from autolaunch_strategies.dry_run.world import NotSaidYet, World
from autolaunch_strategies.mesh.rank_mesh import coordinates, rank_at
from autolaunch_strategies.torch_private.tracing import reads_values


def telling_ranks(shape: MeshShape) -> list[int]:
    """One rank for each role: of the first and the last stage, and a neighbour of the first rank along other axes."""
    places = [{}, {"pp": shape.pp - 1}, *({axis: 1} for axis in AXES if axis != "pp" and shape.sizes[axis] > 1)]
    return sorted({rank_at(shape, place) for place in places})


def pretend_ranks(training: Training, ranks: Iterable[int]) -> list[PretendedRank]:
    """Run a step of each of these ranks, one after the other; other stages too, where one has to hear from them.

    Raises:
        ConfigError: no such rank, something that can't be pretended, or as a run would.
    """
    refuse_what_cannot_be_pretended(training.parallel)
    shape, world = training.parallel.mesh, World()
    wanted = list(dict.fromkeys(ranks))
    for rank in wanted:
        if not 0 <= rank < shape.size:
            raise ConfigError(f"rank={rank}", f"mesh={shape.name} has {shape.size} ranks", f"0 to {shape.size - 1}")
    done: dict[int, PretendedRank | None] = {}
    todo, waiting = list(wanted), 0
    while todo:
        rank = todo.pop(0)
        try:
            done[rank] = pretend(training, rank, world, is_told=rank in wanted)
            waiting = 0
        except ConfigError:
            raise
        except NotSaidYet:
            todo.append(rank)
            waiting += 1
            if waiting > len(todo):
                place = coordinates(shape, rank)
                line = [rank_at(shape, {**place, "pp": stage}) for stage in range(shape.pp)]
                more = [item for item in line if item not in todo and item not in done]
                if not more and waiting > 2 * len(todo) + 2 * shape.pp:
                    raise RuntimeError("stages wait for each other: none can be pretended first") from None
                todo = more + todo
        except Exception as error:  # whatever a model raises when it is run
            raise _refusal(rank, shape, error) from error
    return [told for rank in wanted if (told := done[rank]) is not None]


def _refusal(rank: int, shape: MeshShape, error: Exception) -> ConfigError:
    """What is said of a step that can't be run."""
    said = str(error).strip().partition("\n")[0]
    if reads_values(error):
        return ConfigError(
            f"dryrun with mesh={shape.name}",
            f"a step of rank {rank} needs values, of which a dry run has none: {said}",
            "a model that does not look at values, or a run",
        )
    return ConfigError(f"mesh={shape.name}", f"a step of rank {rank} raises {type(error).__name__}: {said}")


def refuse_what_cannot_be_pretended(config: ParallelConfig) -> None:
    """Raise ConfigError for what needs values, or was not tried."""
    reasons = {
        "compile": (bool(config.compile), "what is compiled allocates by itself", "compile=false"),
        "recompute=offload": (
            config.recompute.mode == "offload",
            "memory of the host is told apart on GPUs alone",
            "none, selective, full",
        ),
    }
    for key, (refused, problem, allowed) in reasons.items():
        if refused:
            raise ConfigError(f"dryrun with {key}", problem, allowed)
