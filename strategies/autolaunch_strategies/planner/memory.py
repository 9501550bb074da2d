"""Bytes that every device needs at most, for many candidates at once: the fullest rank of the pipeline at its worst.

A rank is full at one of four moments: in the backward pass of a block while most microbatches are in flight, in the
first forward pass, while the loss is computed, or when gradients are exchanged and the optimizer steps. At each of them
the bytes are a sum of amounts that depend on the candidate (a block's activations, say) times counts that depend on
the cut and the schedule alone (how many of them a rank holds). So candidates with one cut are one matrix product.

Sources: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022), for what is kept;
the tables of `schedules` for microbatches in flight; `data_parallel` for what is sharded when. Torch-free.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autolaunch_strategies.config import ScheduleSpec
from autolaunch_strategies.planner.candidate import (
    FULL,
    NO_RECOMPUTE,
    PIPELINE_SPECS,
    PIPELINES,
    SELECTIVE,
    Candidate,
    Candidates,
    distinct_rows,
    of_backends,
    of_schedules,
)
from autolaunch_strategies.planner.constants import Constants
from autolaunch_strategies.planner.hardware import Hardware
from autolaunch_strategies.planner.profile import ModelProfile, Part, Recipe
from autolaunch_strategies.planner.stages import Cut, cut
from autolaunch_strategies.schedules.in_flight import Flight, in_flight

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

PIECES = ("parameters", "gradients", "optimizer", "activations", "loss", "other")
"""What `memory_account` tells apart. `other` is working memory, the runtime's own, and what allocation wastes."""


@dataclass(frozen=True)
class Memory:
    """What candidates need at most."""

    bytes: Floats
    """[n]: of the fullest device, everything included."""
    limit: float
    """Bytes that a device has."""
    stage: Ints
    """[n]: the pipe rank that is fullest."""


Counted = dict[tuple[int, ...], tuple[Floats, Ints]]
"""What `_counts` says of pipelines of one model that were looked at before."""


def peak_memory(
    profile: ModelProfile,
    recipe: Recipe,
    hardware: Hardware,
    candidates: Candidates,
    counted: Counted | None = None,
) -> Memory:
    """The most bytes that any device needs at any moment of a step.

    Args:
        counted: read, and added to.
    """
    columns = _Columns(len(profile.kinds))
    candidates = candidates.as_they_run(profile.refused)
    first, way = distinct_rows(_decides_amounts(candidates))
    together = np.zeros((columns.count, len(first)))
    _put_amounts(profile, recipe, hardware, candidates.select(first), columns, dict.fromkeys(PIECES, together))
    fullest = np.zeros(len(candidates))
    stage = np.zeros(len(candidates), dtype=np.int64)
    for which, counts, ranks in _groups(profile, candidates, columns, counted):
        totals = counts @ together[:, way[which]]
        best = totals.argmax(axis=0)
        fullest[which] = totals[best, np.arange(len(which))]
        stage[which] = ranks[best]
    constants = hardware.constants
    return Memory(
        fullest * (1 + constants.fragmentation) + constants.context_bytes, float(hardware.memory_bytes), stage
    )


def memory_account(
    profile: ModelProfile, recipe: Recipe, hardware: Hardware, candidate: Candidate
) -> list[dict[str, float]]:
    """What fills a device of each pipe rank at its fullest moment: bytes by the names of `PIECES`, and `total`.

    The largest total is what `peak_memory` says.
    """
    columns = _Columns(len(profile.kinds))
    candidates = Candidates.of([candidate]).as_they_run(profile.refused)
    pieces = {name: np.zeros((columns.count, 1)) for name in PIECES}
    _put_amounts(profile, recipe, hardware, candidates, columns, pieces)
    ((_, counts, ranks),) = _groups(profile, candidates, columns)
    by_piece = {name: counts @ amounts[:, 0] for name, amounts in pieces.items()}
    totals = np.sum(list(by_piece.values()), axis=0)
    constants = hardware.constants
    account = []
    for rank in range(candidate.pp):
        rows = np.flatnonzero(ranks == rank)
        row = rows[np.argmax(totals[rows])]
        values = {name: float(by_piece[name][row]) for name in PIECES}
        values["other"] += sum(values.values()) * constants.fragmentation + constants.context_bytes
        account.append({**values, "total": sum(values.values())})
    return account


# --- amounts: what one of everything takes ----------------------------------------------------------------------------


class _Columns:
    """Where each amount stands in a row. Names with `kinds` have one column for each kind of block."""

    KINDS = (
        "state",  # parameters, optimizer state and gradients that add up over passes, while one runs
        "gradients",  # those of a pipeline, or of a step of one pass: from its first backward pass on
        "stale",  # those of the step before, during its forward pass
        "end",  # state and gradients when the optimizer steps
        "kept",  # activations between forward and backward, as `recompute` has it
        "kept_done",  # those of one microbatch, taken off
        "input",  # the same of a block that is recomputed as a whole
        "waits",  # for gradients of weights that are put off
        "works",  # beyond what is kept, while its backward pass runs
        "repeats",  # the same of a block that is recomputed as a whole
        "late",  # beyond either, while gradients of weights are put off
        "reduced",  # gradients of the block whose backward pass was before, on their way to their ranks
        "next",  # a block that is gathered ahead of its pass
        "converts",  # beside a pass, copies of a matrix on its way to float8 that no compiler fuses
        "casts",  # copies of weights in a narrower type that one microbatch keeps for its backward pass
        "casts_done",  # those of one microbatch, taken off
    )
    PARTS = ("state", "gradients", "stale", "end")
    ONES = (
        "before",
        "after",
        "after_done",
        "after_waits",
        "output",
        "before_works",
        "after_works",
        "loss",
        "loss_later",
        "drain",
        "gathered",
        "gathered_last",
    )

    def __init__(self, kinds: int) -> None:
        self.kinds = kinds
        self.at: dict[str, slice] = {}
        self.count = 0
        for name in self.KINDS:
            self._add(name, kinds)
        for name in self.PARTS:
            for part in ("before", "after", "shared"):
                self._add(f"{name}_{part}", 1)
        for name in self.ONES:
            self._add(name, 1)

    def _add(self, name: str, width: int) -> None:
        self.at[name] = slice(self.count, self.count + width)
        self.count += width


def _decides_amounts(c: Candidates) -> list[NDArray[Any]]:
    """[n] each: all that amounts depend on, so that they are worked out once for candidates that are alike in it.

    Of a pipeline it is that there is one, when its forward passes come, and its loss; not in how many stages it is.
    """
    all_forward_first = of_schedules("all_forward_first", c.pipeline)
    return [
        *(c.dp, c.cp, c.mp, c.ep, c.level, c.replicate, c.sequence_parallel, c.microbatches, c.recompute, c.compile),
        *(c.backend, c.ulysses > 1, c.pp > 1, all_forward_first, c.pipeline == PIPELINES.index("exact")),
    ]


def _put_amounts(
    profile: ModelProfile,
    recipe: Recipe,
    hardware: Hardware,
    c: Candidates,
    columns: _Columns,
    pieces: Mapping[str, Floats],
) -> None:
    """Add to arrays [columns, n] by piece the bytes of one of everything: a block, a microbatch, a loss."""

    def put(piece: str, name: str, value: Any, kind: int = 0) -> None:
        pieces[piece][columns.at[name].start + kind] += value

    made = _put_states(profile, recipe, hardware, c, put)
    _put_activations(profile, recipe, hardware.constants, c, made, put)


def _put_states(
    profile: ModelProfile, recipe: Recipe, hardware: Hardware, c: Candidates, put: Callable[..., None]
) -> Floats:
    """Parameters, gradients and optimizer state, as `data_parallel` treats them, and what exchanging them takes.

    Returns:
        [n]: what the gradients of what is behind the blocks take while they are made.
    """
    parts = [("", kind, part) for kind, part in enumerate(profile.kinds)]
    parts += [("_before", 0, profile.before), ("_after", 0, profile.after), ("_shared", 0, _shared(profile))]
    largest: Any = 0.0
    made = np.zeros(len(c))
    for suffix, kind, part in parts:
        trains = dataclasses.replace(recipe, trained=recipe.trained * part.trained)
        dense = _over_mp(part.parameters - part.expert_parameters, part.sharded_parameters, c.mp)
        # Of those that dp shards, weights of linear layers are gathered as their copies.
        cast = np.where(c.is_sharded, part.linear_share * recipe.gathers_casts, 0.0)
        alone = suffix != "_shared" and (not suffix or not profile.shared_parameters)  # tied, both ends are one table
        # Stages keep one copy of those that are not gathered so, for all microbatches.
        once = np.where((c.pp > 1) & (c.compile == 0), part.linear_share, 0.0) * (cast == 0)
        if recipe.compute == "fp8":
            once = once * bool(suffix)  # layers of blocks that multiply so copy by themselves
        put("parameters", f"state{suffix}", dense * once * recipe.cast_bytes, kind)
        copies = dense * (1 - cast) * (1 - once) * recipe.cast_bytes
        each = recipe.gathered_bytes * (1 - cast) + recipe.cast_bytes * cast
        gathered = _put_state(trains, hardware, c, put, suffix, kind, dense, c.shard, each, cast, copies, alone)
        if part.expert_parameters:
            experts = part.expert_parameters / c.expert_parts
            # Without ep a rank of mp computes with its own ones; compiled, with all, which the backward pass uses, too.
            whole = np.where((c.ep == 1) & (c.mp > 1) & (c.compile == 1), recipe.gathered_bytes, 0.0)
            held = np.where(c.compile == 1, c.ep, c.expert_parts)
            copies = (part.cast_expert_parameters * recipe.cast_bytes + part.expert_parameters * whole) / held
            own = recipe.gathered_bytes
            gathered = gathered + _put_state(
                trains, hardware, c, put, suffix, kind, experts, c.expert_shard, own, 0.0, copies, alone
            )
        if not suffix:
            largest = np.maximum(largest, gathered)
        elif suffix == "_after":
            made = _put_gradients_of_end(trains, c, put, suffix, dense, c.shard, each, once * recipe.cast_bytes)
            put("other", "gathered_last", gathered if alone else largest)
        elif suffix == "_before":
            _put_gradients_of_end(trains, c, put, suffix, dense, c.shard, each, 0.0)
    tied = _shared(profile)
    put("parameters", "loss", _over_mp(tied.parameters, tied.sharded_parameters, c.mp) * recipe.cast_bytes)
    put("other", "gathered", largest)
    return made


def _put_gradients_of_end(
    recipe: Recipe,
    c: Candidates,
    put: Callable[..., None],
    suffix: str,
    count: Floats,
    over: Ints,
    each: Any,
    copied: Any,
) -> Floats:
    """Of a table or a head, which is one large layer: what its gradient takes until it is added or exchanged.

    Args:
        suffix, count, over, each: as of `_put_state`.
        copied: [n]: bytes of a copy for all passes, which has a gradient of its own.

    Returns:
        [n]: the bytes, where nothing is held of it before.
    """
    sharded, adds_up = c.is_sharded, c.microbatches > 1
    adds_up_whole = _adds_up_whole(c)
    exchanged = sharded & ~adds_up_whole
    reduced = recipe.reduce_bytes * recipe.trained
    whole = np.where(sharded, each, 0.0)
    freed = np.where(_frees_gathered(c), whole, 0.0)
    own = np.where(sharded, each, recipe.gradient_bytes + copied) * recipe.trained
    widened = adds_up_whole & (own != reduced)
    own = own + np.where(widened, reduced, 0.0)  # one of a copy, and what it is added up as
    # What is sent is as large, and what was gathered is gone by then, but where another pass needs it. What comes back
    # is added to what there is, or becomes the gradient.
    sent = np.where(sharded, reduced - np.where(exchanged & adds_up, freed, whole), 0.0)
    part = np.where(sharded, recipe.gradient_bytes / np.where(sharded, over, 1), 0.0) * recipe.trained
    bucket = np.where((c.level == 0) & (c.dp * c.cp > 1), recipe.gradient_bytes, 0.0) * recipe.trained
    if suffix == "_before":  # its gradient is counted, and a look-up's needs no table
        beside = np.where(adds_up | widened, own, np.where(sharded, sent + part, bucket))
        beside = np.where(exchanged, own + sent + np.where(adds_up, part, 0.0), beside) + freed
        put("other", "before_works", count * np.maximum(freed, beside))
    sent = np.where(adds_up_whole & adds_up, 0.0, sent + part)  # at the end of the step, when most is gone
    return np.asarray(count * (own + np.maximum(sent, np.where(adds_up, 0.0, bucket))))


def _adds_up_whole(c: Candidates) -> NDArray[np.bool_]:
    """[n]: whether gradients of whole parameters add up, in the type of their exchange, until there is one."""
    return np.asarray(c.is_sharded & ((c.pp > 1) | ((c.level == 1) & (c.microbatches > 1))))


def _frees_gathered(c: Candidates) -> NDArray[np.bool_]:
    """[n]: whether what is gathered is freed between passes."""
    return np.asarray(c.is_sharded & (c.level == 3) & (c.pp == 1))


def _put_state(
    recipe: Recipe,
    hardware: Hardware,
    c: Candidates,
    put: Callable[..., None],
    suffix: str,
    kind: int,
    count: Floats,
    over: Ints,
    each: Any,
    cast: Any,
    copies: Floats,
    alone: bool,
) -> Floats:
    """Put what so many parameters of a rank take; the bytes of those that are gathered at once.

    Args:
        suffix, kind: which of the columns.
        count: [n], before dp shards them.
        over: [n]: over how many ranks it does.
        each: [n]: bytes of a parameter that is gathered.
        cast: [n]: the share of them that is gathered as copies in a narrower type.
        copies: [n]: bytes in other types, or whole, that a pass makes of them.
        alone: whether they are gathered by themselves, not with everything that is outside of the blocks.
    """
    sharded = c.is_sharded
    shard = np.where(sharded, over, 1)
    pipelined = c.pp > 1
    freed = _frees_gathered(c)
    whole = _adds_up_whole(c)
    per_parameter = recipe.parameter_bytes / shard
    gradient = recipe.gradient_bytes * recipe.trained / shard
    in_pass = np.where(whole, recipe.reduce_bytes * recipe.trained, gradient)
    later = pipelined | (c.microbatches == 1)  # the first backward pass brings them; when passes add up, one before did
    optimizer = recipe.optimizer_bytes * recipe.trained / shard
    gathered = np.where(sharded, each, 0.0)
    # Level 0 holds its buckets until all of them are exchanged, but gradients that can be views of them are. AdamW on
    # CUDA works on all parameters at once.
    buckets = np.where((c.level == 0) & (c.dp * c.cp > 1) & (c.mp > 1), recipe.gradient_bytes * recipe.trained, 0.0)
    steps = recipe.parameter_bytes * recipe.trained / shard if hardware.device == "cuda" and optimizer.any() else 0.0
    at_end = np.maximum(buckets, steps)
    # Gradients of one block, before they are exchanged or added; stages add those of copies one by one.
    own = recipe.trained * np.where(pipelined, (1 - cast) * recipe.gathered_bytes, each)
    added = np.where(pipelined, recipe.gathered_bytes, each) == recipe.reduce_bytes
    apart = np.where(sharded & ~(whole & added), own, 0.0)
    reduced = np.where(sharded & ~whole, recipe.reduce_bytes * recipe.trained, 0.0)

    for column in (f"state{suffix}", f"end{suffix}"):
        put("parameters", column, count * per_parameter, kind)
        put("optimizer", column, count * optimizer, kind)
    put("gradients", f"state{suffix}", count * np.where(later, 0.0, in_pass), kind)
    put("gradients", f"gradients{suffix}", count * np.where(later, in_pass, 0.0), kind)
    exact = c.pipeline == PIPELINES.index("exact")
    put("gradients", f"stale{suffix}", count * np.where(later & (~pipelined | exact), gradient, 0.0), kind)
    put("gradients", f"end{suffix}", count * gradient, kind)
    put("other", f"end{suffix}", count * at_end, kind)
    put("parameters", f"state{suffix}", count * (np.where(freed, 0.0, gathered) if alone else gathered), kind)
    if suffix:
        if alone and suffix == "_after":  # whole while it is used, at one end of the step
            put("parameters", "loss", count * np.where(freed, gathered, 0.0))
        if suffix == "_after":  # a look-up in a table needs no copy of it, a tied head does
            put("parameters", "loss", copies)
        return count * gathered
    for column in ("works", "repeats"):
        put("other", column, count * (apart + np.where(freed, gathered, 0.0)), kind)
    put("other", "reduced", count * reduced, kind)
    put("other", "next", count * np.where(freed, gathered, 0.0), kind)
    again = c.recompute == NO_RECOMPUTE
    keeps = copies * (again | (c.recompute > FULL))
    put("parameters", "casts", keeps * np.where(of_schedules("all_forward_first", c.pipeline), c.microbatches, 1), kind)
    put("parameters", "casts_done", -keeps, kind)
    put("other", "repeats", copies, kind)
    put("other", "works", copies * ~again, kind)
    return count * gathered


def _shared(profile: ModelProfile) -> Part:
    """Tied weights as a part: the last stage holds a copy of those that the part before the blocks has."""
    count, before = profile.shared_parameters, profile.before
    return Part("shared", count, min(count, before.sharded_parameters), trained=before.trained)


def _put_activations(
    profile: ModelProfile, recipe: Recipe, constants: Constants, c: Candidates, made: Floats, put: Callable[..., None]
) -> None:
    """What is kept for the backward pass, and what passes need beyond it.

    Args:
        made: [n]: what gradients of what is behind the blocks take while they are made.
    """
    on_rank = -(-recipe.batch_size // c.dp)
    sequences = -(-on_rank // c.microbatches)
    flying = np.where(of_schedules("all_forward_first", c.pipeline), c.microbatches, 1) * sequences
    exact = c.pipeline == PIPELINES.index("exact")
    whole_mp = np.where(c.sequence_parallel == 1, c.mp, 1)

    ones = np.ones_like(c.mp)
    compiled = c.compile == 1
    # Scaled in fp32, then cut off at the largest value.
    converts = np.where(compiled, 0.0, 2 * 4.0) * (recipe.compute == "fp8")
    # The share of a sequence that a rank's experts see: ranks of mp share them out, too, unless they are compiled.
    held = np.where((c.ep > 1) | compiled, c.ep, c.mp)
    fullest = constants.fullest(profile.experts, held) / np.where(held > 1, c.mp, 1) / c.cp

    def of(whole: float, sharded: float = 0.0, over: Ints = whole_mp) -> Floats:
        """Bytes on one rank of `whole` for one sequence: mp shards `sharded` of them, the rest is on `over` ranks."""
        return ((whole - sharded) / over + sharded / c.mp) / c.cp

    def saved_by(part: Part, others: float, sharded: float) -> Floats:
        """Of what a block saves without its experts."""
        whole = part.gathered_saved_bytes + part.whole_saved_bytes
        gathered = min(max(part.exchanges * part.exchange_bytes, whole), others - sharded)
        return of(others - gathered, sharded) + of(gathered, 0.0, ones)

    def kept_by(part: Part) -> tuple[Floats, Floats, Floats]:
        saved = saved_by(part, part.saved_bytes - part.expert_saved_bytes, part.sharded_saved_bytes)
        saved = saved + part.expert_saved_bytes * fullest
        if compiled.any():
            other = part.if_compiled
            fused = saved_by(part, other.saved_bytes - other.expert_saved_bytes, other.sharded_saved_bytes)
            # Experts that are shared out run as they are.
            experts = np.where(c.ep > 1, part.expert_saved_bytes, other.expert_saved_bytes)
            saved = np.where(compiled, fused + experts * fullest, saved)
        saved = saved + _attention_sent_back(part, profile.element_bytes, c)
        selective = of(part.selective_bytes, part.sharded_selective_bytes)
        # Rows that have travelled, there and back, are kept.
        selective = selective + np.where(c.ep > 1, 2 * part.routed_elements * profile.element_bytes * fullest, 0.0)
        return saved, np.minimum(selective, saved), np.minimum(of(part.output_bytes), saved)

    for kind, part in enumerate(profile.kinds):
        saved, selective, inputs = kept_by(part)
        kept = np.where(c.recompute == FULL, inputs, np.where(c.recompute == SELECTIVE, selective, saved))
        peak = of(part.peak_bytes, part.sharded_peak_bytes) + _attention_over_cp(part, profile.element_bytes, c)
        # Rows on their way there, and those that have come.
        peak = peak + np.where(c.ep > 1, 2 * part.routed_elements * profile.element_bytes * fullest, 0.0)
        put("activations", "kept", flying * kept, kind)
        put("activations", "kept_done", -sequences * kept, kind)
        put("activations", "input", flying * inputs, kind)
        put("other", "works", sequences * (saved - kept + peak), kind)
        put("other", "repeats", sequences * (saved - inputs + peak), kind)
        put("other", "converts", converts * _largest_converted(part, c, sequences), kind)
        late = of(part.late_bytes, part.sharded_late_bytes, ones)
        # Compiled blocks put the gradients of their weights off in no schedule.
        put("other", "late", ~compiled * sequences * late, kind)
        put("activations", "waits", ~compiled * sequences * _put_off(part, profile, recipe, c), kind)
    before, after = (of(part.saved_bytes, part.sharded_saved_bytes, ones) for part in (profile.before, profile.after))
    put("activations", "before", flying * before)
    put("activations", "after", flying * after)
    put("activations", "after_done", -sequences * after)
    put("activations", "after_waits", sequences * _put_off(profile.after, profile, recipe, c))
    output = of(max((part.output_bytes for part in profile.kinds), default=0.0))
    put("activations", "output", flying * output)
    put("other", "before_works", sequences * of(profile.before.peak_bytes, profile.before.sharded_peak_bytes, ones))
    # What has just arrived from a neighbour, and what is on its way to one.
    travelling = np.where(c.pp > 1, 2 * sequences, 0) * output
    put("other", "loss", travelling * (c.microbatches > 1))  # beside a loss, those of other microbatches
    for kind in range(len(profile.kinds)):
        put("other", "works", travelling, kind)
        put("other", "repeats", travelling, kind)
    of_after = of(profile.after.peak_bytes, profile.after.sharded_peak_bytes, ones)
    of_loss = _over_mp(profile.loss_bytes, profile.sharded_loss_bytes, c.mp) / c.cp
    put("other", "after_works", sequences * of_after + made)
    scored = np.where(exact, on_rank, sequences)
    in_backward = np.maximum(scored * of_loss, scored * of_after + made)
    put("loss", "loss", in_backward)
    # exact: outputs of all microbatches are joined; their gradients stay until the last of them is used.
    outputs = np.where(exact, on_rank * _outputs(profile, recipe, c) / c.cp, 0.0)
    joined = np.where(c.microbatches > 1, 2, 1)
    put("loss", "loss", joined * outputs)
    put("loss", "drain", (joined + 1) * outputs)
    of_forward = of_loss
    if profile.forward_loss_bytes is not None:
        of_forward = _over_mp(profile.forward_loss_bytes, profile.sharded_forward_loss_bytes, c.mp) / c.cp
        # The forward pass has the output, too, which is there already with exact.
        put("loss", "loss_later", -outputs)
    # What the backward pass alone needs is taken off.
    put("loss", "loss_later", np.minimum(scored * np.maximum(of_forward, of_after) - in_backward, 0))


def _over_mp(whole: float, sharded: float, mp: Ints) -> Floats:
    return (whole - sharded) + sharded / mp


def _attention_over_cp(part: Part, element_bytes: int, c: Candidates) -> Any:
    """What exchanging keys and values over cp takes in the backward pass of a block, for one sequence."""
    attention = part.attention
    if attention is None or not (c.cp > 1).any():
        return 0.0
    per_head = attention.positions * attention.head_dim * element_bytes / c.mp
    keys = 2.0 * attention.key_heads * per_head
    queries = 2.0 * attention.heads * per_head
    held = {
        "gathers_keys": 2 * keys,
        "passes_keys": 2 * keys / c.cp * (1 + 4 / element_bytes),
        "exchanges_heads": (keys + queries) / c.cp,
    }
    return np.where(c.cp > 1, sum(of_backends(flag, c.backend) * size for flag, size in held.items()), 0.0)


def _attention_sent_back(part: Part, element_bytes: int, c: Candidates) -> Any:
    """What attention returns for one sequence where heads come back to positions: kept beside what is made of it."""
    attention = part.attention
    if attention is None or not (c.ulysses > 1).any():
        return 0.0
    size = float(attention.positions * attention.heads * attention.head_dim * element_bytes * attention.count)
    return np.where((c.cp > 1) & (c.ulysses > 1), size / np.where(attention.divided, c.mp, 1) / c.cp, 0.0)


def _put_off(part: Part, profile: ModelProfile, recipe: Recipe, c: Candidates) -> Floats:
    """Inputs and output gradients of linear layers: zero-bubble schedules make gradients of weights of them later."""
    whole = sharded_inner = sharded_columns = 0.0
    for item in part.matmuls:
        if item.divided == "count" or not item.kept or not (item.left_gradient and item.right_gradient):
            continue  # no weight, or no gradient of it, or none that goes on
        narrow = bool(recipe.cast_bytes) and not item.in_fp32
        element_bytes = recipe.cast_bytes if narrow else profile.element_bytes
        copies = item.count if narrow else 1  # each layer narrows its input by itself
        inputs = float(item.rows * item.inner * copies) * element_bytes
        gradients = float(item.rows * item.columns * item.count) * element_bytes
        if item.divided == "inner":
            sharded_inner += inputs
            whole += gradients
        else:
            whole += inputs
            sharded_columns += gradients if item.divided else 0.0
            whole += 0.0 if item.divided else gradients
    # With sequence parallelism inputs have been gathered and gradients will be scattered: both are whole there.
    return (whole + (sharded_inner + sharded_columns) / c.mp) / c.cp


def _largest_converted(part: Part, c: Candidates, sequences: Ints) -> Floats:
    """[n]: elements of the largest input or weight of a linear layer, on one rank."""
    largest = np.zeros(len(c))
    for item in part.matmuls:
        if item.divided == "count" or item.routed or item.in_fp32:
            continue
        inner = item.inner / np.where(item.divided == "inner", c.mp, 1)
        columns = item.columns / np.where(item.divided == "columns", c.mp, 1)
        largest = np.maximum(largest, inner * np.maximum(columns, sequences * item.rows / c.cp))
    return largest


def _outputs(profile: ModelProfile, recipe: Recipe, c: Candidates) -> Floats:
    """What the model returns for one sequence: what its last matrix product makes."""
    if not profile.after.matmuls:
        return np.full(len(c), float(profile.after.output_bytes))
    last = profile.after.matmuls[-1]
    element_bytes = profile.element_bytes if last.in_fp32 or not recipe.cast_bytes else recipe.cast_bytes
    whole = last.rows * last.columns * last.count * float(element_bytes)
    return whole / np.where(last.divided == "columns", c.mp, 1)


# --- counts: how many of everything a rank holds at a moment ----------------------------------------------------------


def _groups(
    profile: ModelProfile, c: Candidates, columns: _Columns, counted: Counted | None = None
) -> Iterator[tuple[Ints, Floats, Ints]]:
    """Candidates that share their counts: (their indices, counts [moments, columns], pipe rank [moments])."""
    counted = {} if counted is None else counted
    every = np.where(c.recompute > FULL, c.recompute, 0)
    keys = np.stack([c.pipeline, c.pp, c.virtual_stages, c.split, _kinds_of_flight(c), c.microbatches == 1, every])
    order = np.lexsort(keys)
    ordered = keys[:, order]
    begins = np.flatnonzero((ordered[:, 1:] != ordered[:, :-1]).any(axis=0)) + 1
    cuts: dict[tuple[int, ...], Cut] = {}
    for which in np.split(order, begins) if len(order) else []:
        key = tuple(keys[:, which[0]].tolist())
        if key not in counted:
            pipeline, pp, virtual_stages, split, microbatches, one_microbatch, step = key
            spec, place = PIPELINE_SPECS[pipeline], key[:4]
            if place not in cuts:
                cuts[place] = cut(profile, spec.name, pp, virtual_stages, split)
            flight = in_flight(spec, pp, virtual_stages, microbatches)
            counted[key] = _counts(
                profile, cuts[place], flight, step, columns, spec, microbatches, bool(one_microbatch)
            )
        yield which, *counted[key]


def _kinds_of_flight(c: Candidates) -> Ints:
    """[n]: a number of microbatches with which as many of them are in flight."""
    rounds = of_schedules("equal_rounds", c.pipeline)
    regular = rounds & (c.microbatches % c.pp == 0)
    few = np.minimum(c.microbatches, np.where(regular, 3 * c.pp, 2 * c.pp + 1))
    few = np.where(rounds & ~regular, c.microbatches, few)
    return np.where((c.pp == 1) | of_schedules("all_forward_first", c.pipeline), 1, few)


def _counts(
    profile: ModelProfile,
    cut: Cut,
    flight: Flight,
    every: int,
    columns: _Columns,
    spec: ScheduleSpec,
    microbatches: int,
    one_microbatch: bool,
) -> tuple[Floats, Ints]:
    """(counts [moments, columns], pipe rank [moments]) of a cut with so many microbatches in flight.

    Args:
        one_microbatch: whether a step has no more, so blocks have no gradients before their own backward pass.
    """
    flying, waiting = flight.flying, flight.waiting
    ranks, times, per_rank = flying.shape
    stages = len(cut.rank_of_stage)
    own = np.argsort(cut.rank_of_stage, kind="stable").reshape(ranks, per_rank)  # [ranks, its stages]
    blocks = cut.blocks[own]  # [ranks, its stages, kinds]
    recomputed, behind = np.zeros_like(blocks), np.zeros_like(blocks)
    if every:
        recomputed, behind = (item[own] for item in _recomputed(profile, cut, every))
    first, last = int(cut.rank_of_stage[0]), int(cut.rank_of_stage[-1])
    follows = np.append(cut.rank_of_stage[1:], cut.rank_of_stage[-1])
    sends = (cut.rank_of_stage != follows)[own]
    held = blocks.sum(axis=1)
    at = columns.at
    suffixes = ("", "_before", "_after", "_shared")

    def base_of(flying: Ints) -> Floats:
        """What ranks hold with so many microbatches in flight, before there are gradients."""
        base = np.zeros((ranks, times, columns.count))
        base[:, :, at["state"]] = held[:, None]
        base[first, :, at["state_before"]] = 1
        base[last, :, at["state_after"]] = 1
        base[last, :, at["state_shared"]] = float(first != last)
        base[:, :, at["kept"]] = flying @ (blocks - recomputed)
        base[:, :, at["casts"]] = flying @ (blocks - recomputed)
        base[:, :, at["input"]] = flying @ recomputed
        base[:, :, at["waits"]] = waiting @ blocks
        base[:, :, at["output"]] = flying @ sends[..., None]
        base[first, :, at["before"]] = flying[first, :, :1]
        # Its backward pass follows at once, except where all of them come last (there they count as one).
        base[last, :, at["after"]] = np.minimum(flying[last, :, -1:], 1)
        base[last, :, at["after_waits"]] = waiting[last, :, -1:]
        return base

    def with_gradients(rows: Floats, name: str = "gradients") -> Floats:
        rows = rows.copy()
        for suffix in suffixes:
            rows[..., at[f"{name}{suffix}"]] = rows[..., at[f"state{suffix}"]]
        return rows

    def drained(rows: Floats) -> Floats:
        """With exact the loss of all microbatches is differentiated before the last block of any of them."""
        rows = rows.copy()
        if spec.name == "exact":
            rows[..., at["drain"]] = 1
            for name in ("after", "after_done"):
                rows[..., at[name]] = 0
        return rows

    moments, of_ranks = [], []

    def add(rows: Floats, of: Any) -> None:
        moments.append(rows.reshape(-1, columns.count))
        of_ranks.append(np.repeat(of, rows.size // columns.count // np.size(of)))

    base = base_of(flying)
    # The fullest moments before the first backward pass of a rank, and after it.
    early, late = base, with_gradients(base)
    if spec.all_forward_first:
        late[:, :, at["kept_done"]] = late[:, :, at["kept"]]
        late[:, :, at["casts_done"]] = late[:, :, at["casts"]]
        late[:, :, at["after_done"]] = late[:, :, at["after"]]
    elif one_microbatch:
        late = with_gradients(base_of(np.zeros_like(flying)))
    elif spec.most_stages == 1:
        least = (microbatches <= ranks - np.arange(ranks))[:, None, None]  # no forward pass comes after it
        late = with_gradients(base_of(flying - least))
    looks = (early, late) if ranks > 1 and spec.most_stages == 1 else (late,)
    looks = (early,) if one_microbatch else looks

    again = recomputed.sum(axis=1) > 0
    # Blocks behind the last one of a stage that is recomputed are done when it is; the stage with the fewest counts.
    done = np.where((recomputed.sum(axis=2) > 0)[..., None], behind, np.iinfo(np.int64).max).min(axis=1)
    one_by_one = ranks == 1 or one_microbatch
    puts_off = spec.splits_backward and not spec.pairs_passes  # paired passes make gradients of weights at once
    for alike, kinds, chosen in _ranks_alike(profile, cut, every) if one_by_one else ():
        rows = _one_after_the_other(profile, kinds, chosen, base[alike].max(axis=1), columns)
        rows[alike == last] = drained(rows[alike == last])
        add(rows, alike)
    for kind in range(0 if one_by_one else len(profile.kinds)):
        for column, which in (("works", held[:, kind] > recomputed.sum(axis=1)[:, kind]), ("repeats", again[:, kind])):
            here = np.flatnonzero(which)
            for look in looks if len(here) else ():
                rows = look[here]  # a copy
                for name in (column, "converts"):
                    rows[:, :, at[name].start + kind] = 1
                rows[:, :, at["late"].start + kind] = puts_off | flight.behind
                if column == "repeats":
                    rows[:, ~flight.behind, at["kept_done"]] += done[here, None]
                    rows[:, ~flight.behind, at["casts_done"]] += done[here, None]
                # While the last block of a pass runs it waits for nothing yet, and what it has kept is there.
                rows[:, flight.behind, at["waits"].start + kind] -= 1
                for name in ("input",) if column == "repeats" else ("kept", "casts"):
                    rows[:, flight.behind, at[name].start + kind] += 1
                rows *= rows[:, :, at["waits"].start + kind, None] >= 0  # no block of the kind was in that pass
                ends = here == last
                its_pass = look[last, :, at["after"]] > 0  # the loss's, and what is behind the blocks
                rows[ends, :, at["after_done"]] += its_pass
                rows[ends, :, at["after_waits"]] += its_pass * (puts_off & ~flight.behind)[:, None]
                rows[ends] = drained(rows[ends])
                add(rows, here)
    embeds = with_gradients(late[first])  # forward or backward, whichever has more
    embeds[:, at["before_works"]] = 1
    # The buffer in which a block came; stages gather their own before there is much else.
    embeds[:, at["gathered"]] = float(ranks == 1)
    add(embeds, first)
    before_backward = ranks == 1 or spec.name == "exact"  # one loss for all microbatches
    for look in (base,) if before_backward else looks:
        scores = look[last, flying[last, :, -1] > 0]
        scores[:, at["loss"]] = 1
        add(scores, last)
    if before_backward:  # gradients of the step before and the buffer in which a block came are gone in backward passes
        scores = with_gradients(base[last], "stale")
        for name in ("loss", "loss_later", *(["gathered_last"] if ranks == 1 else [])):
            scores[:, at[name]] = 1
        add(scores, last)
    for kind in profile.blocks[-1:] if ranks == 1 else ():  # before that, in the last block, with the buffer it came in
        forward = with_gradients(base[last], "stale")
        for name in ("next", "converts"):
            forward[:, at[name].start + kind] = 1
        forward[:, at["gathered"]] = 1
        forward[:, at["after_done"]] = forward[:, at["after"]]
        add(forward, last)
    if spec.name == "exact":  # what is behind the blocks has its backward passes before them, one after the other
        of_end = drained(base[last])
        of_end[:, at["after_works"]] = 1
        of_end[:, at["gradients_after"]] = of_end[:, at["state_after"]] * (not one_microbatch)
        add(of_end, last)
    if spec.name == "exact" and ranks > 1:  # all forward passes are done, and gradients of the step before still there
        add(with_gradients(base, "stale"), np.arange(ranks))
    ends_step = np.zeros((ranks, columns.count))
    ends_step[:, at["end"]] = held
    ends_step[first, at["end_before"]] = 1
    ends_step[last, at["end_after"]] = 1
    ends_step[last, at["end_shared"]] = float(first != last)
    add(ends_step, np.arange(ranks))
    assert stages == ranks * per_rank
    return np.concatenate(moments), np.concatenate(of_ranks)


def _one_after_the_other(profile: ModelProfile, kinds: Ints, again: Ints, base: Floats, columns: _Columns) -> Floats:
    """[ranks, moments, columns]: the backward passes of a rank's blocks, each when those behind it have had theirs.

    What is held changes evenly while blocks are of one kind, so the first and the last two of each are enough.

    Args:
        kinds: [blocks], of ranks whose blocks are alike, in their order.
        again: [blocks], 1 for those that are recomputed.
        base: [ranks, columns], of these ranks with everything in flight.
    """
    at = columns.at
    if not len(kinds):
        return np.empty((len(base), 0, columns.count))
    has_backward = np.asarray([part.has_backward for part in profile.kinds])[kinds]
    of_kinds = [np.flatnonzero(kinds == kind) for kind in range(len(profile.kinds))]
    ends = np.unique(np.concatenate([np.append(places[:2], places[-2:]) for places in of_kinds]))
    places = ends[has_backward[ends]]
    is_of_kind = (kinds[:, None] == np.arange(len(profile.kinds))).astype(np.int64)
    recomputed = is_of_kind * again[:, None]
    behind = is_of_kind.sum(axis=0) - is_of_kind.cumsum(axis=0)[places]
    rows = np.repeat(base[:, None], len(places), axis=1)
    rows[..., at["kept"]] = rows[..., at["casts"]] = (is_of_kind - recomputed).cumsum(axis=0)[places]
    rows[..., at["input"]] = recomputed.cumsum(axis=0)[places]
    rows[..., at["gradients"]] += behind
    rows[..., at["waits"]] = np.minimum(behind, base[:, None, at["waits"]])
    for suffix in ("after", "shared"):
        rows[..., at[f"gradients_{suffix}"]] = rows[..., at[f"state_{suffix}"]]
    rows[..., at["after_done"]] = rows[..., at["after"]]
    for moment, place in enumerate(places):
        for name in ("repeats" if again[place] else "works", "converts"):
            rows[:, moment, at[name].start + kinds[place]] = 1
        if place + 1 < len(kinds):
            rows[:, moment, at["reduced"].start + kinds[place + 1]] = 1
        if place and has_backward[place - 1]:
            rows[:, moment, at["next"].start + kinds[place - 1]] = 1
    return rows


def _ranks_alike(profile: ModelProfile, cut: Cut, every: int) -> Iterator[tuple[Ints, Ints, Ints]]:
    """(ranks, the kinds of their blocks in their order, 1 for each that is recomputed) of ranks that share these."""
    rank_of_block = np.repeat(cut.rank_of_stage, cut.sizes)
    again = (np.arange(len(profile.blocks)) % every == 0) if every else np.zeros(len(profile.blocks))
    of_blocks = np.stack([np.asarray(profile.blocks), again.astype(np.int64)])
    alike: dict[bytes, list[int]] = {}
    for rank in range(int(cut.rank_of_stage.max()) + 1):
        alike.setdefault(of_blocks[:, rank_of_block == rank].tobytes(), []).append(rank)
    for ranks in alike.values():
        kinds, chosen = of_blocks[:, rank_of_block == ranks[0]]
        yield np.asarray(ranks), kinds, chosen


def _recomputed(profile: ModelProfile, cut: Cut, every: int) -> tuple[Ints, Ints]:
    """[stages, kinds] each: the blocks that are recomputed if every n-th one of the model is, its first one included;
    and those of a stage behind its last recomputed one.
    """
    stage = np.repeat(np.arange(len(cut.sizes)), cut.sizes)
    kinds = np.asarray(profile.blocks)
    chosen = np.arange(len(kinds)) % every == 0
    recomputed, behind = np.zeros_like(cut.blocks), np.zeros_like(cut.blocks)
    np.add.at(recomputed, (stage[chosen], kinds[chosen]), 1)
    last = np.zeros(len(cut.sizes), dtype=np.int64)
    np.maximum.at(last, stage[chosen], np.flatnonzero(chosen))
    later = np.arange(len(kinds)) > last[stage]
    np.add.at(behind, (stage[later], kinds[later]), 1)
    return recomputed, behind
