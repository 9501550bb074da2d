"""What a model costs, as plain data: the planner knows nothing else of it. Torch-free.

Everything is for one sequence on one device, nothing sharded; a microbatch of b sequences costs b times as much
(launching its kernels, and exchanging parameters, does not).
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

COMPUTE_TYPES = ("fp32", "tf32", "bf16", "fp16", "fp8")
"""Of matrix products."""


@dataclass(frozen=True)
class MatMul:
    """Matrix products [rows, inner] x [inner, columns] of one forward pass; its backward has two for each."""

    rows: int
    """Positions of one sequence (all heads together do not count here: see `count`)."""
    inner: int
    columns: int
    count: float = 1
    """How many of this shape; heads of a batched product."""
    divided: str = ""
    """What mp shards: `columns`, `inner`, `count`; nothing if empty."""
    kept: bool = True
    """Whether `recompute=selective` keeps its output; else it is computed again."""
    routed: bool = False
    """Whether these are the products of `count` experts in one kernel, each with `rows` tokens if all get as many."""
    left_gradient: bool = True
    """Whether the backward pass computes the gradient of the left factor."""
    right_gradient: bool = True
    """The same of the right one, for a layer its weight."""
    in_fp32: bool = False
    """Whether its factors are fp32, whatever the type that others have (`Recipe.compute`)."""

    grouped: bool = True
    """Whether those of experts are one kernel: torch has that in bf16 alone."""

    @property
    def one_by_one(self) -> bool:
        """Whether experts have a kernel each, whose rows the host must know."""
        return self.routed and not self.grouped

    @property
    def flops(self) -> float:
        """Of one forward pass of one sequence: two for each multiplication with its addition."""
        return 2.0 * self.rows * self.inner * self.columns * self.count


@dataclass(frozen=True)
class Attention:
    """Calls of fused attention in one forward pass. Written-out attention is `MatMul`s and moved bytes instead."""

    heads: int
    key_heads: int
    head_dim: int
    positions: int
    causal: bool
    count: int = 1
    divided: bool = True
    """Whether mp shards its heads; else every rank of mp computes all of them."""

    @property
    def flops(self) -> float:
        """Of one forward pass of one sequence: two products of [s, d] and [s, s]; causal attention does half."""
        whole = 4.0 * self.heads * self.head_dim * self.positions**2 * self.count
        return whole / 2 if self.causal else whole


@dataclass(frozen=True)
class BackwardPass:
    """What the kernels of a backward pass do besides matrix products and fused attention; as the like of `Part`.

    Gradients of parameters are no part of it: what they take does not depend on the batch.
    """

    moved_bytes: float
    sharded_moved_bytes: float = 0
    kernels: float = 0
    sharded_kernels: float = 0
    expert_moved_bytes: float = 0


BACKWARD_MOVED, BACKWARD_KERNELS = 1.6, 1.5
"""Where no backward pass was recorded: bytes and kernels of one, for each of the forward pass."""


@dataclass(frozen=True)
class Compiled:
    """What of the numbers of a block is other if it is compiled; they mean what those of `Part` mean."""

    moved_bytes: float
    """Neighbours are one kernel: what lies between them is not moved."""
    sharded_moved_bytes: float
    kernels: int
    saved_bytes: float
    """What is cheapest to keep; the rest is computed again, beside what the backward pass computes anyway."""
    sharded_saved_bytes: float
    expert_moved_bytes: float = 0
    expert_saved_bytes: float = 0
    backward: BackwardPass | None = None

    @property
    def backward_pass(self) -> BackwardPass:
        """That which was recorded, or what is usual beside its forward pass."""
        return self.backward or _usual(self, 0)


@dataclass(frozen=True)
class Part:
    """One kind of block, or what runs before or after the blocks: its forward pass of one sequence.

    Of a number X with a `sharded_X` beside it, the latter is the share that mp shards (what lies between a
    column-wise and a row-wise layer); the rest is whole on every rank of mp, unless sequence parallelism shards it.
    """

    name: str
    parameters: int
    sharded_parameters: int = 0
    linear_parameters: int = 0
    """Of `parameters`, those that linear layers alone hold (`expert_parameters` are of other modules)."""
    matmuls: tuple[MatMul, ...] = ()
    attention: Attention | None = None
    moved_bytes: float = 0
    """Read and written by everything that is neither a matrix product nor fused attention."""
    sharded_moved_bytes: float = 0
    kernels: int = 0
    """Kernels that are launched (operators that compute, not views)."""
    sharded_kernels: int = 0
    """Of these, those that work on sharded tensors under mp (DTensors: each costs more host time)."""
    saved_bytes: float = 0
    """Kept for the backward pass without recomputation, its input included; parameters are not counted."""
    sharded_saved_bytes: float = 0
    gathered_saved_bytes: float = 0
    """Of `saved_bytes` without `sharded_saved_bytes`, what sequence parallelism leaves whole: inputs of column-wise
    layers."""
    selective_bytes: float = 0
    """Kept with `recompute=selective` (outputs of matrix products and attention), its input included."""
    sharded_selective_bytes: float = 0
    selective_share: float = 1.0
    """Of `moved_bytes` and `kernels`, what `recompute=selective` does again."""
    output_bytes: float = 0
    """What it hands on: kept with full recomputation, sent between stages."""
    peak_bytes: float = 0
    """Most that exists at one moment of its forward or backward pass beyond what is kept, without mp."""
    sharded_peak_bytes: float = 0
    late_bytes: float = 0
    """What exists beyond that if what gradients of weights are made of stays: these are computed later."""
    sharded_late_bytes: float = 0
    exchanges: int = 0
    """All-reduces along mp in its forward pass (row-wise outputs); as many in its backward pass."""
    exchange_bytes: float = 0
    """Of one of them."""
    experts: int = 0
    """Of the mixture in it that ep can share out; 0 if there is none."""
    mixtures: int = 0
    """How many such mixtures it has."""
    expert_parameters: int = 0
    """Of `parameters` without `sharded_parameters`, those of the experts."""
    cast_expert_parameters: int = 0
    """Of these, those that autocast copies; grouped products take them as they are."""
    expert_moved_bytes: float = 0
    """Of `moved_bytes`, what experts move."""
    expert_saved_bytes: float = 0
    """Of `saved_bytes`, what experts keep."""
    compiled: Compiled | None = None
    """Of a block: what is other if it is compiled; None where that is not known."""
    trained: float = 1.0
    """Share of its parameters that is trained."""
    whole_saved_bytes: float = 0
    """Of `saved_bytes` without `sharded_saved_bytes`, what is made of outputs of column-wise layers that have to be
    gathered: sequence parallelism leaves it whole, too."""
    has_backward: bool = True
    """Whether a backward pass comes through it: it, or what runs before it, is trained."""
    backward: BackwardPass | None = None
    """Of one sequence; None where none was recorded."""
    waits: bool = False
    """Whether the host waits for the device within it, so that it is not ahead of it (experts one after the other)."""

    @property
    def backward_pass(self) -> BackwardPass:
        """That which was recorded, or what is usual beside its forward pass."""
        return self.backward or _usual(self, self.sharded_kernels)

    @property
    def linear_share(self) -> float:
        """Of its parameters without experts, those of linear layers."""
        return self.linear_parameters / max(self.parameters - self.expert_parameters, 1)

    @property
    def if_compiled(self) -> Compiled:
        """Its numbers if it is compiled; where they are not known, those if it is not."""
        return self.compiled or Compiled(
            self.moved_bytes,
            self.sharded_moved_bytes,
            self.kernels,
            self.saved_bytes,
            self.sharded_saved_bytes,
            self.expert_moved_bytes,
            self.expert_saved_bytes,
            self.backward,
        )

    @property
    def routed_elements(self) -> int:
        """Numbers in the rows of one sequence that come to its experts: positions x experts per token x width."""
        return int(next((item.rows * item.count * item.inner for item in self.matmuls if item.routed), 0))

    @property
    def flops(self) -> float:
        """Of the matrix products and the attention of one forward pass."""
        return sum(item.flops for item in self.matmuls) + (self.attention.flops if self.attention else 0.0)

    @property
    def backward_flops(self) -> float:
        """Of the backward pass of one sequence: products for weights that are frozen, or inputs of the first layer that
        needs no gradient, are none of it."""
        if not self.has_backward:
            return 0.0
        products = sum(item.flops * (item.left_gradient + item.right_gradient) for item in self.matmuls)
        return products + (2 * self.attention.flops if self.attention else 0.0)


def _usual(forward: Part | Compiled, sharded_kernels: int) -> BackwardPass:
    return BackwardPass(
        BACKWARD_MOVED * forward.moved_bytes,
        BACKWARD_MOVED * forward.sharded_moved_bytes,
        BACKWARD_KERNELS * forward.kernels,
        BACKWARD_KERNELS * sharded_kernels,
        BACKWARD_MOVED * forward.expert_moved_bytes,
    )


@dataclass(frozen=True)
class ModelProfile:
    """A model as the planner sees it: a part that runs before its blocks, the blocks, a part that runs after them."""

    name: str
    positions: int
    """Tokens (or whatever a position is) of one sequence."""
    before: Part
    kinds: tuple[Part, ...]
    """Distinct blocks."""
    blocks: tuple[int, ...]
    """The kind of every block, in order of execution."""
    block_names: tuple[str, ...]
    """Their dotted names as in `pp.split_spec`."""
    after: Part
    """The rest, with the head and the loss."""
    loss_bytes: float = 0
    """Most that the loss needs beyond what is kept, for one sequence: logits in fp32 and their gradients."""
    sharded_loss_bytes: float = 0
    forward_loss_bytes: float | None = None
    """The same while gradients of the step before are still there, in the forward pass; None: as much."""
    sharded_forward_loss_bytes: float = 0
    shared_parameters: int = 0
    """Parameters of `before` that `after` uses, too (tied weights): with a pipeline the last stage holds them, too."""
    element_bytes: int = 4
    """Of one activation."""
    mp_sizes: tuple[int, ...] = ()
    """Numbers that mp has to divide (heads, key heads, ...)."""
    heads: int | None = None
    """Attention heads, which ulysses shares out; None without fused attention."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Axis (`mp`, `pp`, `cp`) or degree (`ep`) -> why this model can't be divided along it; `schedules` -> why none but
    `exact` computes its loss; `compile` -> why its blocks are not compiled; `sequence_parallel` -> why it shards
    nothing."""
    guessed: str = ""
    """What it was called with, in words, where nothing shows how it is called; empty where something does."""

    @property
    def parameters(self) -> int:
        """Of the whole model, tied weights once."""
        return self.before.parameters + sum(self.kinds[kind].parameters for kind in self.blocks) + self.after.parameters

    @property
    def experts(self) -> int:
        """What ep has to divide: the experts of every mixture; 0 if there are none that it can share out."""
        return math.gcd(*(part.experts for part in (self.before, *self.kinds, self.after)))

    @property
    def flops(self) -> float:
        """Of one forward pass of one sequence."""
        return self.before.flops + sum(self.kinds[kind].flops for kind in self.blocks) + self.after.flops

    @property
    def backward_flops(self) -> float:
        """Of one backward pass of one sequence, nothing computed again."""
        parts = (self.before, *(self.kinds[kind] for kind in self.blocks), self.after)
        return sum(part.backward_flops for part in parts)

    def to_json(self) -> str:
        """As text; `from_json` reads it back."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> ModelProfile:
        """The profile that `to_json` wrote."""
        values: dict[str, Any] = json.loads(text)
        values["before"], values["after"] = _part(values["before"]), _part(values["after"])
        values["kinds"] = tuple(_part(item) for item in values["kinds"])
        for key in ("kinds", "blocks", "block_names", "mp_sizes"):
            values[key] = tuple(values[key])
        return cls(**values)


def _part(values: dict[str, Any]) -> Part:
    matmuls = tuple(MatMul(**item) for item in values["matmuls"])
    attention = Attention(**values["attention"]) if values["attention"] else None
    compiled = None
    if values["compiled"]:
        compiled = Compiled(**{**values["compiled"], "backward": _backward(values["compiled"])})
    own = {"matmuls": matmuls, "attention": attention, "compiled": compiled, "backward": _backward(values)}
    return Part(**{**values, **own})


def _backward(values: Mapping[str, Any]) -> BackwardPass | None:
    return BackwardPass(**values["backward"]) if values["backward"] else None


@dataclass(frozen=True)
class Recipe:
    """What a training step is: how much data, and how many bytes a parameter takes in which role."""

    batch_size: int
    """Sequences per optimizer step, over all ranks."""
    compute: str = "fp32"
    """One of `COMPUTE_TYPES`."""
    parameter_bytes: float = 4
    """Of a parameter at rest."""
    gathered_bytes: float = 4
    """Of a parameter while it is used: sharded parameters are gathered in it (autocast adds copies: `cast_bytes`)."""
    cast_bytes: float = 0
    """Of a copy of each used weight in a narrower type (bf16-mixed without `dp.param_dtype`) while a part runs."""
    gradient_bytes: float = 4
    reduce_bytes: float = 4
    """Of a gradient while it is exchanged over dp."""
    optimizer_bytes: float = 8
    """State of the optimizer for a parameter, master copy included: AdamW 8, SGD 0, Megatron's mixed precision 12."""
    trained: float = 1.0
    """Share of the parameters that can be trained (`Part.trained`) that the optimizer has."""
    steps: int | None = None
    """Of the whole training; None where it is not known."""
    mean_loss: bool = True
    """Whether the loss is a mean over samples, so that schedules that see microbatches may be used."""
    gathers_casts: bool = False
    """Whether sharded weights of linear layers are gathered in the type of those copies, which are not made then."""
    full: str = "fp32"
    """The one of `COMPUTE_TYPES` in which factors are multiplied that are fp32."""
    rowwise: bool = False
    """Whether matrices in fp8 have a scale for each row, not one."""
