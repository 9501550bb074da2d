"""What one call of a pipelined model looks like to its stages: recorded anew for every new kind of arguments."""

from __future__ import annotations

import copy
import itertools
import logging
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from autolaunch_strategies.config import ConfigError
from autolaunch_strategies.config.errors import first_line
from autolaunch_strategies.context import arguments
from autolaunch_strategies.pipeline.cut import Cutting
from autolaunch_strategies.pipeline.record import Leaf, Recording, record

log = logging.getLogger(__name__)

_TRIAL_SIZES = (7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43)
"""Sizes of batches that are unlikely to be the size of anything else."""
_MOST_STRUCTURES = 64
_MOST_WAYS = 32


@dataclass(frozen=True)
class Structure:
    """One way in which the model is called."""

    recording: Recording
    stage_of: tuple[int, ...]
    """The stage of every unit call."""
    carries: tuple[tuple[Leaf, ...], ...]
    """Of every stage: the leaves that something behind it needs; of the last one: what the output needs."""
    batched: tuple[bool, ...]
    """Of every flattened argument: whether its first dim is the batch."""
    may_draw: bool
    """Whether anything in the model may draw random numbers in such a call."""
    join_dims: Mapping[Leaf, int]
    """Along which dim leaves of microbatches are joined; those that do not depend on the batch are not in it."""
    is_recorded: bool = True
    """Whether this call was recorded; if not, it is taken to run as the first one."""

    def samples(self, leaves: list[Any]) -> int:
        """How many samples flattened arguments hold."""
        return samples_in(leaves, self.batched)

    def join_dim(self, leaf: Leaf) -> int | None:
        """Along which dim the leaves of microbatches are joined; None: each is the leaf of the batch."""
        return self.join_dims.get(leaf)

    def calls_of(self, stage: int) -> tuple[int, int]:
        """(first, last) number of the unit calls of a stage."""
        first = self.stage_of.index(stage)
        return first, len(self.stage_of) - 1 - self.stage_of[::-1].index(stage)


def batch_size(leaves: list[Any]) -> int:
    """The size of the batch in flattened arguments: of the first tensor, or the first that is not of size 1.

    1 if there is no tensor with a dim.
    """
    sizes = [leaf.shape[0] for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim() > 0]
    return next((size for size in sizes if size != 1), 1)


def samples_in(leaves: Sequence[Any], batched: Sequence[bool]) -> int:
    """How many samples flattened arguments, or a part of them, hold, of which `batched` has the batch as first dim."""
    return next((leaf.shape[0] for leaf, is_batched in zip(leaves, batched, strict=True) if is_batched), 1)


class BatchDims:
    """Which tensors of a loop's batches have the samples as their first dim, by the form of the batch.

    One batch may not say: a sample alone beside a table of five rows looks as five samples do beside something that is
    the same for all, and five samples as many as the table. What batches of the same form were before says more.
    """

    def __init__(self) -> None:
        self._known: dict[Any, list[int]] = {}

    def of(self, leaves: Sequence[Any], form: Hashable) -> tuple[bool, ...]:
        """For every leaf of the next batch: whether its first dim are the samples.

        The first tensor that has been of another size than 1 in any batch tells how many they are; the others are those
        that have been as many in all of them, but for 1, which stands for all.
        """
        sizes = {
            place: leaf.shape[0]
            for place, leaf in enumerate(leaves)
            if isinstance(leaf, torch.Tensor) and leaf.dim() > 0
        }
        first, key = next((place for place, size in sizes.items() if size != 1), None), (form, tuple(sizes))
        known = self._known.get(key, [])
        if first is not None and (not known or first < known[0]):
            known = [place for place in sizes if place >= first]
        size = sizes[known[0]] if known else 1
        known = [place for place in known if sizes[place] in (1, size)]
        if key not in self._known and len(self._known) >= _MOST_STRUCTURES:
            self._known.clear()
        self._known[key] = known
        return tuple(sizes.get(place) == size and (not known or place in known) for place in range(len(leaves)))


def skeleton_of(model: nn.Module, keep: tuple[Any, ...] = ()) -> nn.Module | None:
    """A copy of `model` without memory, on which calls can be recorded after the model itself has been cut and sharded.

    Args:
        keep: objects that the copy shares with the model.

    Returns:
        None if the model can't be copied.
    """
    memo: dict[int, Any] = {id(item): item for item in keep}
    for parameter in model.parameters():
        meta = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)
        memo[id(parameter)] = meta
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:  # whatever a module that does not want to be copied raises
        log.warning("pp: %s can't be copied (%s), so it is taken to run as it did first", type(model).__name__, error)
        return None


class Structures:
    """The structures of a model's calls, by the kind of their arguments."""

    def __init__(self, cutting: Cutting, skeleton: nn.Module | None) -> None:
        self.cutting, self.skeleton = cutting, skeleton
        self._known: dict[Any, Structure] = {}

    def of(self, args: Any, kwargs: Any, training: bool, several: bool) -> tuple[Structure, Any]:
        """The structure of a call, and a key that calls of the same structure and sizes have in common.

        Args:
            several: whether the batch will be cut into several microbatches.

        Raises:
            ConfigError: the call can't be cut into microbatches, or not between these stages.
        """
        leaves, form = arguments.flattened(args, kwargs)
        size = batch_size(leaves)
        kind = (training, several, torch.is_grad_enabled(), form, tuple([_kind(leaf, size) for leaf in leaves]))
        sizes = tuple([tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else None for leaf in leaves])
        if kind not in self._known:
            if len(self._known) >= _MOST_STRUCTURES:
                self._known.clear()
            self._known[kind] = self._record(*tree_flatten((args, kwargs)), size, training, several)
        return self._known[kind], (kind, sizes)

    def _record(self, leaves: list[Any], spec: Any, size: int, training: bool, several: bool) -> Structure:
        ways = _ways_to_cut(leaves, size)
        batched, first, second = ways[0], None, None
        taken = {dim for leaf in leaves if isinstance(leaf, torch.Tensor) for dim in leaf.shape}
        trial = [number for number in _TRIAL_SIZES if number not in taken] or list(_TRIAL_SIZES)
        if self.skeleton is not None:
            try:
                if several:
                    batched, first, second = self._first_way_to_cut(leaves, spec, ways, trial, training)
                else:
                    first = self._try(leaves, spec, batched, size, training)
            except Exception as error:  # whatever a model raises on shapes alone
                if several and _runs(lambda: self._try(leaves, spec, batched, size, training)):
                    raise _not_by_batch(leaves, spec, size, error) from error
                log.warning(
                    "pp: this call can't be recorded (%s); it is taken to run as the first one", first_line(error)
                )
                first = second = None
        recording = first or self.cutting.recording
        stage_of = self._stages_of(recording)
        carries = [tuple(recording.needed_behind(_last(stage_of, stage))) for stage in range(len(self.cutting.stages))]
        self._refuse_hidden(recording)
        self._refuse_absent(recording, stage_of)
        _refuse_shared_draws(recording, stage_of)
        dims = _join_dims(carries[-1], recording, first, second, trial) if several else {}
        may_draw = first is None or first.may_draw
        return Structure(recording, stage_of, tuple(carries), batched, may_draw, dims, first is not None)

    def _first_way_to_cut(
        self, leaves: list[Any], spec: Any, ways: list[tuple[bool, ...]], trial: list[int], training: bool
    ) -> tuple[tuple[bool, ...], Recording, Recording]:
        """The first of `ways` in which the model takes batches of two other sizes, and what it then does.

        One whose results can be put together again comes before one that runs only.
        """
        errors: list[Exception] = []
        running: list[tuple[tuple[bool, ...], Recording, Recording]] = []
        for way in ways:
            try:
                first, second = (self._try(leaves, spec, way, size, training) for size in trial[:2])
            except Exception as error:  # whatever a model raises on shapes alone
                errors.append(error)
                continue
            running.append((way, first, second))
            try:
                _join_dims(self._needed_at_the_end(first), first, first, second, trial)
            except ConfigError:
                continue
            return running[-1]
        if running:
            return running[0]
        raise errors[0]

    def _needed_at_the_end(self, recording: Recording) -> list[Leaf]:
        last = len(self.cutting.stages) - 1
        return recording.needed_behind(_last(self._stages_of(recording), last))

    def _try(self, leaves: list[Any], spec: Any, batched: tuple[bool, ...], size: int, training: bool) -> Recording:
        assert self.skeleton is not None
        placeholders = [
            _resized(leaf, size if is_batched else None) if isinstance(leaf, torch.Tensor) else leaf
            for leaf, is_batched in zip(leaves, batched, strict=True)
        ]
        args, kwargs = tree_unflatten(placeholders, spec)
        self.skeleton.train(training)
        return record(self.skeleton, self.cutting.units, args, kwargs)

    def _stages_of(self, recording: Recording) -> tuple[int, ...]:
        """The stage of every unit call: as in the first recording, or by who holds the unit."""
        order = [call.unit for call in recording.calls]
        if order == [call.unit for call in self.cutting.recording.calls]:
            return tuple(
                number for number, stage in enumerate(self.cutting.stages) for _ in range(stage.first, stage.last + 1)
            )
        homes = self.cutting.unit_stages()
        stages: list[int] = []
        for unit in order:
            at = stages[-1] if stages else 0
            later = [stage for stage in homes.get(unit, ()) if stage >= at]
            if not later:
                raise ConfigError(
                    "pp",
                    f"this call of the model runs {unit} in another order than the one that was recorded for the cut",
                    "a model whose parts run in one order",
                )
            stages.append(later[0])
        if missing := set(range(len(self.cutting.stages))) - set(stages):
            raise ConfigError(
                "pp",
                f"this call of the model leaves out every part of stage {min(missing)}",
                "calls that run all parts",
            )
        return tuple(stages)

    def _refuse_absent(self, recording: Recording, stage_of: tuple[int, ...]) -> None:
        """Refuse a call whose glue computes with parameters that a stage on which it runs does not hold.

        Such as one with an image, where the first was without.
        """
        for name, before in recording.glue_uses.items():
            holders = self.cutting.holders.get(self.cutting.name + name)
            for stage in range(len(self.cutting.stages)):
                if holders is not None and before <= _last(stage_of, stage) + 1 and stage not in holders:
                    raise ConfigError(
                        "pp",
                        f"this call of the model uses {self.cutting.name}{name} on stage {stage}, and the one that was "
                        f"recorded for the cut ({self.cutting.recording.origin}) does not, so stage "
                        f"{', '.join(map(str, holders))} holds it alone",
                        "`example_input_array` as an attribute of the model: inputs with which its forward runs as in "
                        "training",
                    )

    def _refuse_hidden(self, recording: Recording) -> None:
        for unit, reader in recording.hidden_reads().items():
            raise ConfigError(
                "pp",
                f"{reader or 'the output of this call'} needs a tensor that {unit} keeps and does not return, so it "
                "can't be sent to another stage",
                "calls that do not need it (use_cache=False, output_attentions=False, output_hidden_states=False), "
                f"or pp.global_spec={unit}",
            )


def _ways_to_cut(leaves: list[Any], size: int) -> list[tuple[bool, ...]]:
    """Which arguments may have the batch as their first dim, the likeliest guess first.

    All that have its size, but a square one behind the first (a mask, if anything else runs, too); then fewer, since
    positions may by chance be as many as samples. Last of all the first tensor alone, whatever its size: a batch of one
    sample beside such arguments.
    """
    tensors = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.dim() > 0]
    fitting = [place for place in tensors if leaves[place].shape[0] == size]
    squares = {place for place in fitting[1:] if tuple(leaves[place].shape) == (size, size)}
    ways = [set(fitting) - squares, set(fitting)]
    ways += [
        {fitting[0], *others}
        for count in range(len(fitting) - 1)
        for others in itertools.combinations(fitting[1:], count)
    ]
    unique = {
        tuple(place in way for place in range(len(leaves))): None for way in (*ways[:_MOST_WAYS], set(tensors[:1]))
    }
    return list(unique)


def _refuse_shared_draws(recording: Recording, stage_of: Sequence[int]) -> None:
    """Refuse random numbers that glue draws for several stages: every stage would draw its own.

    What follows the last part runs once for the whole batch, after all microbatches.
    """
    for draw in sorted(recording.output_draws.union(*(call.draws for call in recording.calls))):
        readers = {
            stage: call.unit for call, stage in zip(recording.calls, stage_of, strict=True) if draw in call.draws
        }
        if draw in recording.output_draws:
            readers[len(stage_of)] = "the output of the model"
        if len(readers) > 1:
            first, second, *_ = readers.values()
            raise ConfigError(
                "pp",
                f"random numbers that are drawn between the parts of the model reach both {first} and {second}, which "
                "run at different times, on different stages; each would draw its own",
                "random numbers that are drawn within one part of the model, or given to it",
            )


def _kind(leaf: Any, size: int) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.dtype, leaf.dim(), leaf.requires_grad, leaf.dim() > 0 and leaf.shape[0] == size
    if isinstance(leaf, bool | str) or leaf is None:
        return leaf
    return type(leaf)


def _resized(leaf: torch.Tensor, size: int | None) -> torch.Tensor:
    shape = tuple(leaf.shape) if size is None else (size, *leaf.shape[1:])
    return torch.empty(shape, dtype=leaf.dtype, device="meta").requires_grad_(leaf.requires_grad)


def _runs(function: Any) -> bool:
    try:
        function()
    except Exception:
        return False
    return True


def _last(stage_of: tuple[int, ...], stage: int) -> int:
    return len(stage_of) - 1 - stage_of[::-1].index(stage)


def _not_by_batch(leaves: list[Any], spec: Any, size: int, error: Exception) -> ConfigError:
    shapes = [tuple(leaf.shape) for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return ConfigError(
        "pp.microbatches",
        f"the model is called with tensors of shapes {', '.join(map(str, shapes))}, and it does not run with another "
        f"number than {size} as their first dim ({first_line(error)[:160]}), so they can't be cut into microbatches "
        "along it",
        "a model that takes the batch as the first dim, or one microbatch",
        "pp.microbatches=1",
    )


def _join_dims(
    needed: Sequence[Leaf], recording: Recording, first: Recording | None, second: Recording | None, trial: list[int]
) -> dict[Leaf, int]:
    """Along which dim each leaf of a batch is put together, told by two recordings with different batches.

    Raises:
        ConfigError: a leaf that is needed for the whole batch can't be put together.
    """
    dims: dict[Leaf, int] = {}
    for number, call in enumerate(recording.calls):
        for place, shape in enumerate(call.shapes):
            leaf = Leaf(number, place)
            other = shape if second is None else second.calls[number].shapes[place]
            if shape is None or other is None:
                continue
            if first is None or second is None:
                dims |= {leaf: 0} if shape and call.from_data[place] else {}
                continue
            differing = [dim for dim, sizes in enumerate(zip(shape, other, strict=True)) if sizes[0] != sizes[1]]
            if len(differing) == 1 and shape[differing[0]] * trial[1] == other[differing[0]] * trial[0]:
                dims[leaf] = differing[0]
            elif leaf in needed and (differing or call.from_data[place]):
                raise ConfigError(
                    "pp.microbatches",
                    f"{call.unit} returns a tensor of shape {shape} for a batch of {trial[0]}: it says something of "
                    "the whole batch, and can't be put together from microbatches",
                    "one microbatch; or pp.loss=microbatch, where the loss is the mean over microbatches",
                    "pp.microbatches=1",
                )
    return dims
