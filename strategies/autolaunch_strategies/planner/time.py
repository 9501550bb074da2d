"""How long an optimizer step takes, for many candidates at once.

Convention for flops: *model flops* are those of matrix products and attention of one forward pass and twice as many for
the backward pass, causal attention at half of the full square where the kernel skips the other half (fused attention
does, written-out attention does not); recomputation, embeddings, norms and the optimizer don't count. MFU is model
flops per second and device over the peak of the type in `Recipe.compute`. *Hardware flops* add what recomputation
does again.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autolaunch_strategies.planner.candidate import (
    FULL,
    PIPELINE_SPECS,
    PIPELINES,
    SELECTIVE,
    Candidates,
    distinct_rows,
    of_backends,
    of_schedules,
)
from autolaunch_strategies.planner.collectives import collective_time
from autolaunch_strategies.planner.constants import Constants
from autolaunch_strategies.planner.hardware import Hardware
from autolaunch_strategies.planner.profile import BackwardPass, Compiled, MatMul, ModelProfile, Part, Recipe
from autolaunch_strategies.planner.residuals import features
from autolaunch_strategies.planner.stacks import CAST_WEIGHTS_ONCE, NATIVE_STACKS
from autolaunch_strategies.planner.stages import cut

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

PARTS = ("compute", "attention", "elementwise", "kernels", "mp", "cp", "ep", "pp", "bubble", "dp", "optimizer", "fixed")
"""Where a step's time goes. `kernels` is what launching them adds to what devices do; `pp` what sends and the actions
of a schedule add; `bubble` the wait of a pipeline's busiest rank for the others. Where ranks share processors, `mp`,
`cp` and `dp` include the wait for whoever comes last."""

BACKWARD_ATTENTION = 2.5
"""Fused attention computes the scores again: five products for the forward pass's two."""
EXCHANGE_KERNELS = 1
"""Kernels that take as long to launch as one exchange."""
COMPILED_SHARDED = 0.4
"""What compiled blocks still take of the further host time of DTensors, as a share: graphs hold plain parts, which are
taken out of parameters, and gradients put together again, once per block (`tests/benchmarks/host_time.py`)."""
FP8_CAST = 6
"""Bytes that one element moves on its way from bf16 to fp8: read for the largest value, read again, and written in two
layouts, one for each pass. Inputs and weights forward, gradients backward: beside n products for each element, so that
the larger the matrices are, the less of the time it is. Of the four layers of a block of 70B on 8 ranks (16,384 rows)
that makes 1.15, 1.1, 1.5 and 1.4 times the speed of bf16; on an H100 they had 1.1, 1.4, 1.7 and 1.7, forward and
backward, compiled, one scale for each row (pytorch/ao, pull request 2185)."""
FP8_ROW_S = 3.6e-12
"""Device seconds that an element takes longer where each row has a scale: inputs, weights and gradients are needed in
two layouts, and the rows of the second one are the columns of the first, so that its kernels run against the memory's
order. Of Llama 3 8B on 8 devices torchao's docs (workflows/training.md; torch 2.7 on H100, 2.9 on B200) have 6,768 and
8,640 tokens per second with a scale for each row, 7,690 and 10,417 with one for a matrix: 4.7e-12 for an element on
either, whatever its memory's bandwidth, so that it is the clock that counts; both were limited in power, and an H100 of
500 W has 0.78 of the clock of one of 700 W under load."""
FP8_MULTIPLE = 16
"""Of which both sides of a weight must be multiples to be multiplied in fp8."""
FP8_EAGER_CAST, FP8_EAGER_KERNELS = 40, (33, 77)
"""Bytes that an element moves without a compiler, in each pass that casts it (inputs and weights forward; these again
and gradients, in two layouts, backward), and kernels that a layer has more forward and backward. Counted over the
operators of torchao 0.18, rowwise and tensorwise alike: absolute values, their largest, fp32, products with scales,
limits, padding, each a pass of its own."""
UNALIGNED = 0.33
"""Share of the speed of 16-bit products whose sides are no multiples of 8."""
HALF_OUTPUT, HALF_INNER, HALF_POSITIONS = 6e5, 150.0, 256.0
"""Elements of the result (tiles for all processors of a device), inner size, and positions with which a product or
attention reaches half of its best speed; on a device that does `_BALANCE` operations for each byte that it can read,
on others in proportion."""
WIDE = 128
_BALANCE = 156.0

FAIR = 2.0
"""How many turns a fair scheduler lets ranks that share a processor get apart."""


@dataclass(frozen=True)
class StepTime:
    """Predicted seconds of one optimizer step."""

    seconds: Floats
    """[n]"""
    parts: dict[str, Floats]
    """Name of `PARTS` -> [n] seconds of the busiest rank; they add up to `seconds`."""


def soft_max(*values: Floats) -> Floats:
    """Smooth maximum (6-norm) of numbers that are 0 or more: at most 12 % above the larger of two.

    Smooth, so that fits see what lies just below the larger one.
    """
    largest = np.maximum.reduce(np.broadcast_arrays(*values))
    total = sum(np.square((value / np.maximum(largest, 1e-300)) ** 3) for value in values)
    return np.asarray(largest * np.cbrt(np.sqrt(total)))


def share_of_attention(positions: int, width: int, constants: Constants) -> float:
    """What fused attention reaches of its best speed, which is that of endless sequences and heads of `WIDE` numbers.

    Narrow heads have fewer products for each exponential.
    """
    narrow = width / (width + constants.attention_width) * (WIDE + constants.attention_width) / WIDE
    return min(narrow, 1.0) * positions / (positions + HALF_POSITIONS)


def flops_per_step(profile: ModelProfile, recipe: Recipe, recompute: int = 0) -> float:
    """Flops of one optimizer step of the whole batch, by the convention of this module.

    Args:
        recompute: as `Candidate.recompute`; 0 for model flops, else hardware flops with that setting.
    """
    again = 0.0
    if recompute == SELECTIVE:
        again = sum(item.flops for kind in profile.blocks for item in profile.kinds[kind].matmuls if not item.kept)
    elif recompute:
        again = sum(profile.kinds[kind].flops for kind in profile.blocks) / recompute
    return (profile.flops + profile.backward_flops + again) * recipe.batch_size


# --- one part of the model, one microbatch -----------------------------------------------------------------------

_COMPONENTS = ("compute", "attention", "elementwise", "kernels", "mp", "cp", "ep")
_PHASES = ("forward", "backward", "weights")
"""Sums of components by phase: backward is that for inputs, recomputation included."""


@dataclass(frozen=True)
class _Ways:
    """Distinct ways [u] to compute one microbatch."""

    batch: Floats
    """Sequences of a microbatch."""
    mp: Floats
    cp: Floats
    sequence_parallel: NDArray[np.bool_]
    recompute: Ints
    backend: Ints
    ulysses: Floats
    ep: Floats
    held: Floats
    """Ranks that share the experts of a mixture out: those of ep, or without it those of mp, unless it is compiled."""
    compiled: NDArray[np.bool_]
    fullest: Floats
    """Tokens that come to the experts of the fullest rank, over those of a rank; ranks of mp have the same."""
    accumulates: NDArray[np.bool_]
    """Whether gradients are added to those of other microbatches."""
    sharded: NDArray[np.bool_]
    """Whether dp shards state."""


class _Device:
    """Seconds of single operators on one device.

    Args:
        kind: the type of products.
        rowwise: whether those in fp8 have a scale for each row.
    """

    def __init__(self, kind: str, hardware: Hardware, rowwise: bool = False) -> None:
        constants = hardware.constants
        flops = hardware.flops
        peak = hardware.peak(kind)
        self.is_fp8, self.row_s = kind == "fp8", FP8_ROW_S * rowwise
        half = "bf16" if self.is_fp8 else kind
        self.attention_rate = (flops.get(half) or peak) * constants.attention
        self.matmul_rate = peak * constants.matmul * (constants.fp8 if self.is_fp8 else 1.0)
        self.memory_rate = hardware.memory_bytes_per_s * constants.memory
        balance = peak / hardware.memory_bytes_per_s / _BALANCE
        self.half_output, self.half_inner = HALF_OUTPUT * balance, HALF_INNER * balance
        self.aligned = 8 if kind not in ("fp32", "tf32") and hardware.device == "cuda" else 1
        self.grouped = constants.grouped
        self.element_bytes = {"fp32": 4, "tf32": 4, "fp8": 1}.get(kind, 2)
        self.casts_weights = hardware.stack not in CAST_WEIGHTS_ONCE
        self.is_torch = hardware.stack in NATIVE_STACKS

    def casts(self, inputs: Floats, weights: Floats, outputs: Floats, compiled: NDArray[np.bool_]) -> tuple[Any, Any]:
        """Seconds forward and backward to bring so many elements to the type of products, where that takes kernels."""
        if not self.is_fp8:
            return 0.0, 0.0
        fused = inputs + weights if self.casts_weights else inputs
        cast_s = FP8_CAST / self.memory_rate + self.row_s
        forward, backward = fused * cast_s, outputs * cast_s
        if self.is_torch:
            alone = (inputs + weights) * FP8_EAGER_CAST
            forward = np.where(compiled, forward, alone / self.memory_rate)
            backward = np.where(compiled, backward, (alone + 2 * outputs * FP8_EAGER_CAST) / self.memory_rate)
        return forward, backward

    def reordered(self, gathered: Floats, scattered: Floats, batch: Floats) -> Floats:
        """Seconds to copy what is gathered and what is scattered along sequences, bytes of each.

        Collectives know the first dim alone: torch puts what several sequences gather in order, and always what is
        scattered (`all_gather_single`, `reduce_scatter_single` of torch.distributed._functional_collectives). Megatron
        has the sequence first.
        """
        copied = np.where(batch > 1, gathered, 0.0) + scattered
        return 2 * copied / self.memory_rate if self.is_torch else np.zeros_like(copied)

    def matmul(self, rows: Floats, inner: Floats, columns: Floats, count: Floats, together: bool) -> Floats:
        """Seconds of `count` products [rows, inner] x [inner, columns]; `together`: in one kernel, not one by one."""
        output = rows * columns * (count if together else 1)
        rate = self.matmul_rate * output / (output + self.half_output) * inner / (inner + self.half_inner)
        if self.aligned > 1:
            rate = np.where((inner % self.aligned == 0) & (columns % self.aligned == 0), rate, rate * UNALIGNED)
        moved = self.element_bytes * (rows * inner + inner * columns + rows * columns)
        return count * soft_max(2 * rows * inner * columns / rate, moved / self.memory_rate)


def _matmul_times(item: MatMul, ways: _Ways, device: _Device) -> tuple[Floats, Floats, Floats]:
    """Forward, gradient of the input, gradient of the weight (products without a weight: of the other input, 0)."""
    ones = np.ones_like(ways.batch)
    of_left, of_right = float(item.left_gradient), float(item.right_gradient)
    if item.routed:
        experts = item.count / ways.held
        rows = np.ceil(item.rows * ways.batch / ways.cp * ways.fullest * ways.held / 8) * 8
        inner, columns = item.inner * ones, item.columns * ones
        together, share = not item.one_by_one, 1.0 if item.one_by_one else device.grouped
        forward = device.matmul(rows, inner, columns, experts, together)
        back = device.matmul(rows, columns, inner, experts, together)
        weight = device.matmul(inner, rows, columns, experts, together)
        return forward / share, of_left * back / share, of_right * weight / share
    batched = item.divided == "count"
    rows = item.rows / ways.cp * (1 if batched else ways.batch)
    count = item.count * (ways.batch if batched else ones)
    inner, columns = item.inner * ones, item.columns * ones
    if batched:
        count = count / ways.mp
    elif item.divided == "columns":
        columns = columns / ways.mp
    elif item.divided == "inner":
        inner = inner / ways.mp
    forward = device.matmul(rows, inner, columns, count, batched)
    back = device.matmul(rows, columns, inner, count, batched)
    other = device.matmul(inner, rows, columns, count, batched)
    back, other = of_left * back, of_right * other
    if batched:
        return forward, back + other, 0 * ones
    sizes = (count * rows * inner, count * inner * columns, count * rows * columns)
    cast_forward, cast_backward = device.casts(*sizes, ways.compiled)
    return forward + cast_forward, back + cast_backward, other


def _can_be_fp8(item: MatMul, device: _Device) -> bool:
    """Whether a product in a block is that of a layer which multiplies in fp8; torch has none for stacked experts."""
    weights = item.divided != "count" and not (item.routed and device.is_torch) and not item.in_fp32
    return weights and not item.inner % FP8_MULTIPLE and not item.columns % FP8_MULTIPLE


def _cp_times(part: Part, ways: _Ways, element_bytes: float, hardware: Hardware) -> tuple[Floats, Floats, Floats]:
    """Exchange of keys and values forward and backward, and the share of attention that can hide it."""
    attention = part.attention
    zero = np.zeros_like(ways.batch)
    if attention is None or not (ways.cp > 1).any():
        return zero, zero, zero
    per_head = ways.batch * attention.positions * attention.head_dim * element_bytes * attention.count
    keys = per_head * attention.key_heads / np.minimum(ways.mp, attention.key_heads)
    queries = per_head * attention.heads / ways.mp
    gathers, passes, exchanges, mixed = (
        of_backends(attribute, ways.backend)
        for attribute in ("gathers_keys", "passes_keys", "exchanges_heads", "is_mixed")
    )
    inner = np.where(exchanges, np.where(mixed, np.maximum(ways.ulysses, 1), ways.cp), 1.0)
    outer = ways.cp / inner
    # Rings and gathering: keys and values of all positions of the ring come by.
    held = 2 * keys / inner
    around = collective_time(hardware, "all_gather", outer, ways.mp * inner, held)
    returning = collective_time(hardware, "all_gather", outer, ways.mp * inner, held * 4 / element_bytes)
    scattered = collective_time(hardware, "all_to_all", outer, ways.mp * inner, held)
    # Key heads are repeated until every rank gets as many of them (`ulysses.attention_by_heads`).
    own = np.maximum(attention.key_heads // ways.mp, 1).astype(np.int64)
    copies = np.lcm(own, inner.astype(np.int64)) / own
    swapped = collective_time(hardware, "all_to_all", inner, ways.mp, (queries + 2 * keys * copies) / ways.cp)
    swapped = swapped + collective_time(hardware, "all_to_all", inner, ways.mp, queries / ways.cp)
    forward = np.where(passes | gathers, around, 0.0) + swapped
    backward = np.where(passes, around + returning, np.where(gathers, around + scattered, 0.0)) + swapped
    hides = np.where(passes, (outer - 1) / outer, np.where(gathers & attention.causal, 1 / outer, 0.0))
    return forward, backward, hides


def _ep_times(part: Part, ways: _Ways, profile: ModelProfile, hardware: Hardware) -> Floats:
    """Seconds in which tokens go to their experts and come back, once: the backward pass takes as long.

    Ranks along mp have the same tokens and do a part of them each; then they gather what all of them have made.
    """
    if not part.routed_elements or not (ways.ep > 1).any():
        return np.zeros_like(ways.batch)
    size = ways.batch * part.routed_elements * profile.element_bytes / ways.cp * ways.fullest
    there = collective_time(hardware, "all_to_all", ways.ep, 1, size)
    whole = ways.batch * part.output_bytes / ways.cp
    gathered = collective_time(hardware, "all_gather", ways.mp, 1, whole)
    once = 2 * there + part.mixtures * (gathered + hardware.constants.ep_s)
    return np.where(ways.ep > 1, once, 0.0)


def _part_costs(
    part: Part, ways: _Ways, profile: ModelProfile, recipe: Recipe, hardware: Hardware, is_block: bool
) -> Floats:
    """[components + phases, u] seconds of one microbatch in one part of the model, forward and backward."""
    constants = hardware.constants
    # Heads, experts in stacks and products without a weight stay what they are beside layers of fp8.
    device = _Device("bf16" if recipe.compute == "fp8" else recipe.compute, hardware)
    fp8 = _Device("fp8", hardware, recipe.rowwise) if recipe.compute == "fp8" and is_block else device
    fp32 = device if recipe.compute in ("fp32", "tf32") else _Device(recipe.full, hardware)
    zero = np.zeros_like(ways.batch)
    whole_share = 1 / np.where(ways.sequence_parallel, ways.mp, 1.0)

    def local(total: Any, sharded: float) -> Floats:
        return np.asarray((total - sharded) * whole_share + sharded / ways.mp)

    compiled = ways.compiled & is_block

    def with_experts(total: Any, sharded: float, of_experts: Any) -> Floats:
        return local(total - of_experts, sharded) + of_experts * ways.fullest

    full = np.where(ways.recompute >= FULL, 1 / np.maximum(ways.recompute, 1), 0.0) if is_block else zero
    selective = np.where(ways.recompute == SELECTIVE, 1.0, 0.0) if is_block else zero

    compute_f = compute_b = compute_w = compute_s = zero
    in_fp8 = 0.0
    for item in part.matmuls:
        is_fp8 = fp8.is_fp8 and _can_be_fp8(item, fp8)
        in_fp8 += item.count * is_fp8
        forward, back, weight = _matmul_times(item, ways, fp8 if is_fp8 else fp32 if item.in_fp32 else device)
        compute_f, compute_b, compute_w = compute_f + forward, compute_b + back, compute_w + weight
        if not item.kept:
            compute_s = compute_s + forward
    compute_b = compute_b + full * compute_f + selective * compute_s

    attention_f = zero
    if part.attention is not None:
        positions = part.attention.positions
        rate = device.attention_rate * share_of_attention(positions, part.attention.head_dim, constants)
        ranks = ways.mp * ways.cp if part.attention.divided else ways.cp
        attention_f = ways.batch * part.attention.flops / ranks / rate
    attention_b = attention_f * (BACKWARD_ATTENTION + full)

    other = part.if_compiled

    def moved_by(eager: Part | BackwardPass, fused: Compiled | BackwardPass) -> Floats:
        """Bytes of one pass in this part."""
        moved = with_experts(eager.moved_bytes, eager.sharded_moved_bytes, eager.expert_moved_bytes)
        if compiled.any():
            # Experts that are shared out run as they are.
            experts = np.where(ways.ep > 1, eager.expert_moved_bytes, fused.expert_moved_bytes)
            beside = fused.moved_bytes - fused.expert_moved_bytes
            moved = np.where(compiled, with_experts(beside + experts, fused.sharded_moved_bytes, experts), moved)
        return np.asarray(moved * ways.batch / ways.cp)

    moved, moved_b = moved_by(part, other), moved_by(part.backward_pass, other.backward_pass)
    again = full + selective * part.selective_share
    weights = part.parameters - part.expert_parameters - part.sharded_parameters + part.sharded_parameters / ways.mp
    of_experts = part.expert_parameters / ways.held
    weights = weights + of_experts
    # What is gathered as a copy is cast in shards, which takes a small part of that.
    in_shards = np.where(ways.sharded, part.linear_share * recipe.gathers_casts, 0.0)
    copied = weights * (1 - in_shards) + of_experts * in_shards
    cast = copied * (recipe.gathered_bytes + recipe.cast_bytes) if recipe.cast_bytes else zero
    gradients = (
        weights * recipe.trained * part.trained * (recipe.gradient_bytes + ways.accumulates * recipe.gradient_bytes)
    )
    elementwise_f = (moved + cast) / device.memory_rate
    elementwise_b = (moved_b + moved * again + cast * full) / device.memory_rate
    elementwise_w = gradients / device.memory_rate

    size = part.exchange_bytes * ways.batch / ways.cp
    # Autocast makes outputs of row-wise layers narrow; what column-wise ones are given, and its gradient, stays wide.
    wide = size * max(profile.element_bytes / recipe.cast_bytes, 1.0) if recipe.cast_bytes else size
    reduced, reduced_b = (collective_time(hardware, "all_reduce", ways.mp, 1, item) for item in (size, wide))
    if ways.sequence_parallel.any():
        gathered, gathered_b = (collective_time(hardware, "all_gather", ways.mp, 1, item) for item in (wide, size))
        scattered, scattered_b = (
            collective_time(hardware, "reduce_scatter", ways.mp, 1, item) for item in (size, wide)
        )
        ordered, ordered_b = (device.reordered(*sizes, ways.batch) for sizes in ((wide, size), (size, wide)))
        reduced = np.where(ways.sequence_parallel, gathered + scattered + ordered, reduced)
        reduced_b = np.where(ways.sequence_parallel, gathered_b + scattered_b + ordered_b, reduced_b)
    mp_f, mp_b = (part.exchanges * item * max(1 - constants.hidden_mp, 0.0) for item in (reduced, reduced_b))
    of_mixtures = zero
    if part.expert_parameters:  # each rank of mp has a part of them; compiled, it gathers the others
        parts = collective_time(hardware, "all_gather", ways.mp, 1, part.expert_parameters * recipe.gathered_bytes)
        results = part.mixtures * collective_time(hardware, "all_reduce", ways.mp, 1, size)
        of_mixtures = np.where(ways.ep > 1, 0.0, np.where(compiled, parts, results))
    mp_b = mp_b + mp_f * full + of_mixtures * (full + selective + ~compiled)
    mp_f = mp_f + of_mixtures
    ep_f = _ep_times(part, ways, profile, hardware)
    ep_b = ep_f * (1 + full)  # selective recomputation keeps what has travelled

    forward, backward, hides = _cp_times(part, ways, profile.element_bytes, hardware)
    hidden = min(constants.hidden_cp, 1.0) * hides
    cp_f = forward - np.minimum(forward, attention_f) * hidden
    cp_b = backward - np.minimum(backward, attention_f * BACKWARD_ATTENTION) * hidden + full * cp_f

    calls = part.attention.count if part.attention is not None else 0
    one_by_one = sum(item.count for item in part.matmuls if item.one_by_one) / ways.held
    exchanged = np.where(ways.mp > 1, part.exchanges * EXCHANGE_KERNELS, 0.0)

    def kernels_of(
        eager: Part | BackwardPass, fused: Compiled | BackwardPass, of_fp8: float, products: int
    ) -> tuple[Floats, Floats]:
        """(kernels of one pass, with so many products for each of the forward pass; host seconds to launch them)."""
        kernels = np.where(compiled, fused.kernels, eager.kernels + in_fp8 * of_fp8 * fp8.is_torch)
        kernels = kernels + products * one_by_one
        # With sequences sharded between what mp shards, everything works on DTensors.
        sharded = np.where(ways.sequence_parallel & (eager.sharded_kernels > 0), eager.kernels, eager.sharded_kernels)
        sharded = sharded * np.where(compiled, COMPILED_SHARDED, 1.0)
        host = (kernels + exchanged) * constants.kernel_s + np.where(ways.mp > 1, sharded * constants.mp_kernel_s, 0.0)
        return kernels, host + np.where(ways.cp > 1, calls * constants.cp_s, 0.0)

    kernels, host = kernels_of(part, other, FP8_EAGER_KERNELS[0], 1)
    kernels_b, host_b = kernels_of(part.backward_pass, other.backward_pass, FP8_EAGER_KERNELS[1], 2)
    kernels_b, host_b = kernels_b + kernels * again, host_b + host * again
    if hardware.device != "cpu":
        elementwise_f, elementwise_b = (
            elementwise_f + kernels * constants.start_s,
            elementwise_b + kernels_b * constants.start_s,
        )
    if not part.has_backward:
        compute_b = compute_w = attention_b = elementwise_b = elementwise_w = mp_b = cp_b = ep_b = host_b = zero
    busy_f = compute_f + attention_f + elementwise_f + mp_f + cp_f + ep_f
    busy_b = compute_b + attention_b + elementwise_b + mp_b + cp_b + ep_b
    busy_w = compute_w + elementwise_w
    # Compiled blocks compute the gradients of weights with those of inputs.
    busy_b, busy_w = busy_b + np.where(compiled, busy_w, 0.0), np.where(compiled, 0.0, busy_w)
    if hardware.device == "cpu" or part.waits:  # one processor launches and computes, or they take turns
        extra_f, extra_b = host, host_b
    else:
        extra_f = np.maximum(soft_max(busy_f, host) - busy_f, 0.0)
        extra_b = np.maximum(soft_max(busy_b + busy_w, host_b) - (busy_b + busy_w), 0.0)
    share_w = np.divide(busy_w, busy_b + busy_w, out=zero.copy(), where=busy_w > 0)
    return np.stack(
        [
            compute_f + compute_b + compute_w,
            attention_f + attention_b,
            elementwise_f + elementwise_b + elementwise_w,
            extra_f + extra_b,
            mp_f + mp_b,
            cp_f + cp_b,
            ep_f + ep_b,
            busy_f + extra_f,
            busy_b + extra_b * (1 - share_w),
            busy_w + extra_b * share_w,
        ]
    )


# --- all of a step -----------------------------------------------------------------------------------------------


def step_time(profile: ModelProfile, recipe: Recipe, hardware: Hardware, candidates: Candidates) -> StepTime:
    """Predict the time of one optimizer step for each candidate. They are taken to be valid.

    Args:
        candidates: n of them. Rank order is pp, dp, cp, mp, from the outermost to the innermost.

    Returns:
        Seconds, and where they go, for the rank that is busiest.
    """
    c, constants, n = candidates.as_they_run(profile.refused), hardware.constants, len(candidates)
    if not n:
        return StepTime(np.zeros(0), {name: np.zeros(0) for name in PARTS})
    micro = c.microbatches.astype(np.float64)
    first, way = distinct_rows(
        [
            *(c.dp * c.microbatches, c.microbatches > 1, c.mp, c.cp, c.sequence_parallel, c.recompute),
            *(c.backend, c.ulysses, c.ep, c.compile, c.is_sharded),
        ]
    )
    compiled = c.compile[first] > 0
    held = np.where((c.ep[first] > 1) | compiled, c.ep[first], c.mp[first])
    ways = _Ways(
        batch=np.maximum(recipe.batch_size / (c.dp * c.microbatches)[first], 1.0),
        mp=c.mp[first].astype(np.float64),
        cp=c.cp[first].astype(np.float64),
        sequence_parallel=(c.sequence_parallel[first] > 0) & (c.mp[first] > 1),
        recompute=c.recompute[first],
        backend=c.backend[first],
        ulysses=c.ulysses[first].astype(np.float64),
        ep=c.ep[first].astype(np.float64),
        held=held.astype(np.float64),
        compiled=compiled,
        fullest=constants.fullest(profile.experts, held) / np.where(held > 1, c.mp[first], 1),
        accumulates=c.microbatches[first] > 1,
        sharded=c.is_sharded[first],
    )
    members = (profile.before, *profile.kinds, profile.after)
    costs = np.stack(
        [_part_costs(part, ways, profile, recipe, hardware, 0 < k < len(members) - 1) for k, part in enumerate(members)]
    )  # [members, components + phases, u]
    number = len(_COMPONENTS)
    exact = c.pipeline == PIPELINES.index("exact")
    loss = costs[-1, _COMPONENTS.index("elementwise")][way] * exact

    inside = _contents(profile, recipe, c, costs[:, number:].sum(axis=1), way, loss)
    everything = np.bincount(profile.blocks, minlength=len(profile.kinds)).astype(np.float64)
    everything = np.concatenate([[1.0], everything, [1.0]])
    # [n, components + phases] of one microbatch on the busiest rank, and on all ranks of a pipeline together.
    busiest, together = np.zeros((costs.shape[1], n)), np.zeros((costs.shape[1], n))
    for k in range(len(members)):
        own = costs[k][:, way]
        busiest += own * inside.members[k]
        together += own * everything[k]

    parts = {name: busiest[k] * micro for k, name in enumerate(_COMPONENTS)}
    at_the_end = inside.members[-1]
    parts["elementwise"] = parts["elementwise"] - micro * loss * at_the_end
    for phases, own in ((busiest[number:], loss * at_the_end), (together[number:], loss)):
        forward = np.minimum(phases[0], own / 3)  # the rest of the loss is its backward pass
        phases[0] -= forward
        phases[1] -= np.minimum(phases[1], own - forward)
    send = _send_time(profile, hardware, c, ways.batch[way])
    actions = np.where(c.pp > 1, (2 + _splits_backward(c)) * c.virtual_stages, 0)
    parts["pp"] = micro * (2 * c.virtual_stages * send + actions * constants.action_s)
    filling = 2 * send + actions / c.virtual_stages * constants.action_s
    parts["bubble"] = _bubble(c, busiest[number:], together[number:]) + (c.pp - 1) * filling + micro * loss
    parts["dp"] = _dp_time(profile, recipe, hardware, c, inside, busiest[number:])
    parts["optimizer"] = _optimizer_time(recipe, hardware, c, inside)
    parts["fixed"] = constants.step_s + micro * constants.microbatch_s
    parts = {name: parts[name] for name in PARTS}
    seconds = np.sum(list(parts.values()), axis=0)
    if hardware.processors is not None:
        work = together[:number].sum(axis=0) * micro / c.pp + micro * loss / c.pp + parts["pp"]
        work += parts["optimizer"] + parts["fixed"] + parts["dp"]
        parts, seconds = _share_processors(hardware, c, parts, seconds, work)
        waiting = _waiting(profile, hardware, c, inside, seconds - parts["bubble"])
        parts |= {name: parts[name] + wait for name, wait in waiting.items()}
        seconds = seconds + sum(waiting.values())
    if hardware.residuals is not None:
        factor = np.exp(hardware.residuals.correction(features(profile, recipe, hardware.peak(recipe.compute), c)))
        parts, seconds = {name: part * factor for name, part in parts.items()}, seconds * factor
    return StepTime(seconds, parts)


@dataclass(frozen=True)
class _Contents:
    """What the busiest rank of a pipeline holds."""

    members: Floats
    """[1 + kinds + 1, n]: how often it has the part before the blocks, blocks of each kind, the part after them."""
    parameters: Floats
    """[n]: most of all pipe ranks, after mp; without `experts`."""
    gathered: Floats
    """[n]: their bytes where they are gathered."""
    regathered: Floats
    """[n]: those of blocks alone; what runs before and after them is not gathered for the backward pass again."""
    experts: Floats
    """[n]: of the experts that ep shares out: most of all pipe ranks, those of one rank of ep."""
    trained: Floats
    """[n]: as `parameters`, those that are trained."""
    trained_experts: Floats
    """[n]: as `experts`, those that are trained."""
    mixtures: Floats
    """[n]"""
    blocks: Floats
    """[n]"""


def _contents(
    profile: ModelProfile, recipe: Recipe, c: Candidates, totals: Floats, way: Ints, loss: Floats
) -> _Contents:
    """Which rank of each pipeline is busiest.

    Args:
        totals: [members, u] seconds of each part for a microbatch.
        loss: [n] seconds of the last part that all ranks wait for; they count for none.
    """
    n, parts = len(c), (profile.before, *profile.kinds, profile.after)
    whole = np.array([part.parameters - part.sharded_parameters - part.expert_parameters for part in parts], float)
    of_experts = np.array([part.expert_parameters for part in parts], dtype=np.float64)
    sharded = np.array([part.sharded_parameters for part in parts], dtype=np.float64)
    less = (recipe.gathered_bytes - recipe.cast_bytes) * recipe.gathers_casts
    each = recipe.gathered_bytes - less * np.array([part.linear_share for part in parts])
    trained = np.array([part.trained for part in parts])
    members, experts, trained_experts = np.zeros((len(parts), n)), np.zeros(n), np.zeros(n)
    parameters, trained_parameters, gathered, regathered = np.zeros(n), np.zeros(n), np.zeros(n), np.zeros(n)
    first, group = distinct_rows([c.pp, c.virtual_stages, c.split, c.pipeline])
    order = np.argsort(group, kind="stable")
    bounds = np.searchsorted(group[order], np.arange(len(first) + 1))
    seconds = totals[:, way]
    seconds[-1] -= loss
    for index, begin, end in zip(first, bounds[:-1], bounds[1:], strict=True):
        own = order[begin:end]
        pp, virtual = int(c.pp[index]), int(c.virtual_stages[index])
        name = PIPELINE_SPECS[c.pipeline[index]].name
        held_by_ranks = _held(profile, name, pp, virtual, int(c.split[index])).tolist()
        rows = np.array(sorted(set(map(tuple, held_by_ranks))))
        busiest = np.argmax(rows @ seconds[:, own], axis=0)
        members[:, own] = rows[busiest].T
        tied = profile.shared_parameters * (rows[:, -1] > rows[:, 0])  # on the last stage, too
        # Without ep experts are sharded as all else is, and in parts along mp.
        alone = (c.ep[own] == 1) / c.mp[own]

        def held(rows: Floats, tied: Any, each: Any, of_expert: Any, own: Ints = own, alone: Floats = alone) -> Floats:
            """[pp, candidates]: `each` of what the rows hold is so much."""
            split = rows @ (sharded * each) + tied
            experts = (rows @ (of_experts * of_expert))[:, None] * alone
            return np.asarray((rows @ (whole * each))[:, None] + split[:, None] / c.mp[own] + experts)

        of_blocks = rows.copy()
        of_blocks[:, [0, -1]] = 0
        size = recipe.gathered_bytes
        parameters[own] = held(rows, tied, 1.0, 1.0).max(axis=0)
        trained_parameters[own] = held(rows, tied * profile.before.trained, trained, trained).max(axis=0)
        gathered[own] = held(rows, tied * size, each, size).max(axis=0)
        regathered[own] = held(of_blocks, 0.0 * tied, each, size).max(axis=0)
        experts[own] = np.where(c.ep[own] > 1, (rows @ of_experts).max() / c.ep[own], 0.0)
        trained_experts[own] = np.where(c.ep[own] > 1, (rows @ (of_experts * trained)).max() / c.ep[own], 0.0)
    mixtures = np.array([part.mixtures for part in parts]) @ members
    blocks = members[1:-1].sum(axis=0)
    return _Contents(
        *(members, parameters, gathered, regathered, experts, trained_parameters, trained_experts, mixtures, blocks)
    )


def _held(profile: ModelProfile, pipeline: str, pp: int, virtual: int, split: int) -> Floats:
    """[pp, 1 + kinds + 1]: what each pipe rank holds."""
    rows = np.zeros((pp, len(profile.kinds) + 2))
    stages = cut(profile, pipeline, pp, virtual, split)
    np.add.at(rows[:, 1:-1], stages.rank_of_stage, stages.blocks)
    rows[stages.rank_of_stage[0], 0] = 1
    rows[stages.rank_of_stage[-1], -1] = 1
    return rows


def _splits_backward(c: Candidates) -> Floats:
    """1 where gradients of weights are computed apart from those of inputs."""
    return of_schedules("splits_backward", c.pipeline).astype(np.float64)


def _bubble(c: Candidates, busiest: Floats, together: Floats) -> Floats:
    """Seconds that the busiest rank of a pipeline waits, beyond its own work on all microbatches.

    With many microbatches, filling and draining: every other rank's work on one microbatch, or what of it the schedule
    does not fill (`ScheduleSpec.waits`); virtual stages divide it. With few, the way of one microbatch through all
    stages, and of the others behind it: no schedule is faster.

    Args:
        busiest, together: [phases, n] seconds of one microbatch on the busiest rank and on all ranks.
    """
    forward, backward, weights = np.maximum(together - busiest, 0.0)
    virtual = np.maximum(c.virtual_stages, 1).astype(np.float64)
    micro = c.microbatches.astype(np.float64)
    many = np.zeros(len(c))
    for waits in {PIPELINE_SPECS[number].waits for number in np.unique(c.pipeline)}:
        own = [number for number, spec in enumerate(PIPELINE_SPECS) if spec.waits == waits]
        longest = np.maximum.reduce([f * forward + b * backward + w * weights for f, b, w in waits])
        many = np.where(np.isin(c.pipeline, own), longest / virtual, many)

    split = _splits_backward(c)
    through = busiest[0] + busiest[1] + (1 - split) * busiest[2]
    others = forward + backward + (1 - split) * weights
    looped = np.where(of_schedules("v_shaped", c.pipeline), 1.0, virtual)
    shortest = others + through + (split * busiest[2] + (micro - 1) * through) / looped - micro * busiest.sum(axis=0)
    return np.where(c.pp > 1, np.maximum(many, shortest), 0.0)


def _send_time(profile: ModelProfile, hardware: Hardware, c: Candidates, batch: Floats) -> Floats:
    """Exposed seconds of sending one microbatch's output, or its gradient, to the next stage."""
    size = max((part.output_bytes for part in profile.kinds), default=0.0) * batch / c.cp
    size = size / np.where(c.sequence_parallel > 0, c.mp, 1)
    stride = c.mp * c.cp * c.dp
    seconds = collective_time(hardware, "p2p", np.where(c.pp > 1, 2, 1), stride, size)
    return seconds * max(1 - hardware.constants.hidden_pp, 0.0)


def _dp_time(
    profile: ModelProfile, recipe: Recipe, hardware: Hardware, c: Candidates, inside: _Contents, phases: Floats
) -> Floats:
    """Exposed seconds of exchanging gradients and gathering parameters, with the host's for groups of parameters."""
    constants = hardware.constants
    size = c.dp * c.cp
    forward, backward = phases[0], phases[1] + phases[2]
    shard = c.shard
    groups, of_experts = inside.blocks + 1, inside.mixtures

    def exposed(seconds: Floats, under: Floats) -> Floats:
        """A share of the shorter one is hidden (a smooth minimum)."""
        shorter = seconds * under / np.maximum(soft_max(seconds, under), 1e-30)
        return np.asarray(seconds - min(constants.hidden_dp, 1.0) * np.minimum(shorter, seconds))

    def collective(kind: str, ranks: Ints, stride: Ints, total: Floats, number: Floats) -> Floats:
        """Seconds to exchange `total` bytes of parameters in their groups, one collective for each group."""
        number = np.maximum(number, 1)
        return np.asarray(number * collective_time(hardware, kind, ranks, stride, total / number))

    def both(
        kind: str, total: Floats, for_experts: Any, dense: tuple[Ints, Ints, Any], experts: tuple[Ints, Ints, Any]
    ) -> Floats:
        """Of bytes that ep does not share out, and of experts': with ranks, stride and number of groups each."""
        seconds = collective(kind, dense[0], dense[1], total, dense[2])
        if inside.experts.any():
            ranks = np.where(c.ep > 1, experts[0], 1)
            seconds = seconds + collective(kind, ranks, experts[1], for_experts, experts[2])
        return seconds

    gradient_bytes = recipe.trained * recipe.reduce_bytes
    efsdp = c.expert_ranks // c.ep  # ranks with the same experts, of one replica
    gradients, expert_gradients = inside.trained * gradient_bytes, inside.trained_experts * gradient_bytes
    reduced = both("all_reduce", gradients, expert_gradients, (size, c.mp, 1), (efsdp, c.ep, 1))
    result = np.where(c.level == 0, exposed(reduced, backward), 0.0)
    sharded = c.level > 0
    if sharded.any():
        apart = (shard, c.mp, groups), (efsdp, c.ep, of_experts)
        gathered_experts = inside.experts * recipe.gathered_bytes
        gather = both("all_gather", inside.gathered, gathered_experts, *apart)
        gather_again = both("all_gather", inside.regathered, gathered_experts, *apart)
        scatter = both("reduce_scatter", gradients, expert_gradients, *apart)
        among = np.where(sharded, c.replicate, 1)
        one = shard * c.mp  # ranks of a replica
        replicas = both(
            "all_reduce", gradients / shard, expert_gradients / shard, (among, one, groups), (among, one, of_experts)
        )
        gathers, again, scatters = _sharded_exchanges(c)
        host = (groups + np.where(c.ep > 1, of_experts, 0)) * constants.group_s
        time = gathers * (exposed(gather, forward) + host)
        # Parameters that were freed are gathered beside the exchange of gradients, under the same backward pass.
        beside = np.where(again > 0, gather_again, 0.0)
        time = time + scatters * (exposed(scatter + beside, backward) + host)
        time = time + exposed(replicas, backward)
        result = np.where(sharded & (size > 1), time, result)
    return np.where((size > 1) | (efsdp > 1) & (c.ep > 1), result, 0.0)


def _sharded_exchanges(c: Candidates) -> tuple[Floats, Floats, Floats]:
    """How often a step gathers a group of sharded parameters before they are used, and again for the backward pass, and
    how often it exchanges their gradients: [n] each."""
    micro = c.microbatches.astype(np.float64)
    again = np.where((c.level == 3) & (c.pp == 1), micro, 0.0)
    scatters = np.where((c.level == 1) | (c.pp > 1), 1.0, micro)  # a pipeline exchanges at the end of its step
    return np.maximum(again, 1.0), again, scatters


def _optimizer_time(recipe: Recipe, hardware: Hardware, c: Candidates, inside: _Contents) -> Floats:
    """State is read and written, gradients are read (twice: their norm), parameters written."""
    per_parameter = 2 * recipe.optimizer_bytes + 2 * recipe.gradient_bytes + 2 * recipe.parameter_bytes
    moved = (inside.trained / c.shard + inside.trained_experts / c.expert_shard) * recipe.trained * per_parameter
    return np.asarray(moved / (hardware.memory_bytes_per_s * hardware.constants.memory))


def _share_processors(
    hardware: Hardware, c: Candidates, parts: dict[str, Floats], seconds: Floats, work: Floats
) -> tuple[dict[str, Floats], Floats]:
    """A step lasts at least as long as the processors of a node need for the work of all its ranks.

    Args:
        work: [n] seconds of work of one rank, on average.
    """
    assert hardware.processors is not None
    ranks = np.minimum(c.dp * c.mp * c.pp * c.cp, hardware.devices_per_node)
    needed = work * ranks / hardware.processors
    longer = np.where(ranks > 1, soft_max(seconds, needed), seconds)
    waiting = parts["bubble"]
    factor = (longer - waiting) / (seconds - waiting)
    return {name: value if name == "bubble" else value * factor for name, value in parts.items()}, longer


def _waiting(
    profile: ModelProfile, hardware: Hardware, c: Candidates, inside: _Contents, busy: Floats
) -> dict[str, Floats]:
    """Seconds that ranks which share processors wait for each other at their exchanges, by part of the step.

    They take turns. Between two exchanges some have had more of them than others, as in a random walk: how far they are
    apart grows with the square root of the time in between, up to `FAIR` turns, and all wait for the last of a group.
    (Four ranks on two cores: 5 to 8 ms for each exchange of sharded parameters, when the exchange alone takes 1 to 2.)

    Args:
        busy: [n] seconds of the step without this.
    """
    assert hardware.processors is not None
    micro = c.microbatches.astype(np.float64)
    again = np.where(c.recompute >= FULL, 1 / np.maximum(c.recompute, 1), 0.0)
    passes = micro * (2 + again)
    members = (profile.before, *profile.kinds, profile.after)
    exchanges = np.array([part.exchanges for part in members]) @ inside.members
    calls = np.array([part.attention.count if part.attention is not None else 0 for part in members]) @ inside.members
    exchanged = np.where(c.level == 0, 1.0, (inside.blocks + 1) * sum(_sharded_exchanges(c)))
    counts = {
        "dp": np.where(c.dp * c.cp > 1, exchanged, 0.0),
        "mp": np.where(c.mp > 1, exchanges * passes * np.where(c.sequence_parallel > 0, 2, 1), 0.0),
        "cp": np.where(c.cp > 1, calls * passes, 0.0),
        # Counts, tokens there and back; there and back again in the backward pass.
        "ep": np.where(c.ep > 1, inside.mixtures * (2 * passes + micro), 0.0),
    }
    # Those who often wait for one group keep another one waiting: they are as far apart as all of them together.
    often = np.where(counts["dp"] > 1, c.dp * c.cp, np.where(counts["cp"] > 1, c.cp, 1))
    often = often * np.where(counts["mp"] > 1, c.mp, 1)
    between = busy / np.maximum(sum(counts.values()), 1.0)
    slice_s = hardware.constants.slice_s
    apart = 1 / np.sqrt(1 / (slice_s * np.maximum(between, 1e-9)) + 1 / (FAIR * slice_s) ** 2)
    shares = np.minimum(c.dp * c.mp * c.pp * c.cp, hardware.devices_per_node) > hardware.processors
    last = {name: _last_of(np.where(number > 1, often, c.dp * c.cp * c.mp)) for name, number in counts.items()}
    return {name: np.where(shares, number * last[name] * apart, 0.0) for name, number in counts.items()}


def _last_of(ranks: Ints) -> Floats:
    """How many standard deviations the last of so many is behind the mean, on average (Blom, 1958)."""
    known, index = np.unique(ranks, return_inverse=True)
    behind = [NormalDist().inv_cdf((n - 0.375) / (n + 0.25)) if n > 1 else 0.0 for n in known.tolist()]
    return np.asarray(np.array(behind)[index])
