"""Modules that run on this rank's part of a sequence, within models whose own code sees whole sequences.

The call of such a module is intercepted: of its arguments, tensors with one sequence dim are cut to the positions of
this rank; those with two (masks) and those with none stay whole. What it returns says the shape of the whole and holds
this rank's part (`SequenceShard`).

Which dims are those of the sequence, and that the module gives the same result when its sequence is sharded, is tried
out at the first call of each kind, on a short sequence: run whole and run sharded, it must return the same.
"""

from __future__ import annotations

import hashlib
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_flatten, tree_unflatten

from autolaunch_strategies.config import ConfigError
from autolaunch_strategies.context.arguments import Form, flattened
from autolaunch_strategies.context.interception import AttentionCalls
from autolaunch_strategies.context.shown import show_whole
from autolaunch_strategies.context.transformers_attention import attention_by_hand
from autolaunch_strategies.mesh.layout import Layout, Peers
from autolaunch_strategies.sharded_sequence.shard import Positions, SequenceShard, cut
from autolaunch_strategies.tensor.views import plain
from autolaunch_strategies.torch_private.calls import intercept_calls, intercepted, run_call
from autolaunch_strategies.torch_private.fsdp import end_left_forward, gathered_once
from autolaunch_strategies.torch_private.modes import is_active, without_torch_functions
from autolaunch_strategies.torch_private.random_state import saved_random_state, seed_torch

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Anchor:
    """The argument of a call that tells how long the sequence is."""

    leaf: int
    dim: int
    size: int


@dataclass(frozen=True)
class CallSharding:
    """How one kind of call of a module is sharded."""

    argument_dims: tuple[int | None, ...]
    """For every flattened argument the dim along which it is cut; None: it is handed over whole."""
    output_dims: tuple[int | None, ...]
    """For every flattened output its sequence dim; None: it has none."""


@dataclass
class Sequences:
    """What all sharded modules of a model share."""

    peers: Peers
    calls: AttentionCalls
    pad: bool
    device: torch.device
    together: dist.ProcessGroup | None
    """Ranks that are given the same data, so call the same modules alike, and agree on what a trial has shown."""
    ranks_along_mp: int = 1
    inside: bool = False
    """Whether a module runs that is sharded, or found not to be shardable: those within it run as they are called."""
    trying: bool = False
    """Whether a module runs for a trial only."""
    _cut: dict[tuple[int, int, Any], tuple[weakref.ref[torch.Tensor], int, torch.Tensor]] = field(default_factory=dict)

    def cut(self, leaf: torch.Tensor, dim: int, layout: Layout, padded: bool) -> torch.Tensor:
        """This rank's part of a whole plain tensor. Tables that every block gets are cut once."""
        with without_torch_functions():
            needs_gradient, version = leaf.requires_grad and torch.is_grad_enabled(), leaf._version
        if needs_gradient:
            return self._cut_now(leaf, dim, layout, padded)
        key = (id(leaf), dim, (layout, padded))
        known = self._cut.get(key)
        if known is None or known[0]() is not leaf or known[1] != version:
            if len(self._cut) >= _MOST_CUT:
                self._cut.clear()
            self._cut[key] = known = weakref.ref(leaf), version, self._cut_now(leaf, dim, layout, padded)
        return known[2]

    def _cut_now(self, leaf: torch.Tensor, dim: int, layout: Layout, padded: bool) -> torch.Tensor:
        if padded and layout.is_padded:
            return leaf.index_select(dim, layout.repeated_positions(self.peers.rank, leaf.device))
        return cut(leaf, dim, Positions.of_layout(layout), self.peers.group)


_KNOWN = (torch.Tensor, bool, int, float, str, type(None))
"""What a call that leaves nothing behind is given."""
_MOST_CUT = 16
_TRIAL_LENGTH = 1024
"""Positions of the sequence on which a call is tried out: what meets over a larger distance only is not seen."""


class ShardedModule:
    """One module whose calls run on this rank's part of the sequence."""

    def __init__(self, name: str, module: nn.Module, sequences: Sequences, is_block: bool, backend: str) -> None:
        """Take over the calls of `module`.

        Args:
            is_block: it holds attention: that it can't be sharded is an error. Any other module then runs whole.
            backend: what computes attention in it.
        """
        self.name, self.module, self.sequences, self.is_block = name, module, sequences, is_block
        self.backend = backend
        own = intercepted(module)
        self._own: Callable[..., Any] = own or (lambda *args, **kwargs: run_call(module, *args, **kwargs))
        self._shardings: dict[Any, CallSharding | None] = {}
        self._draws: bool | None = None
        self._rows = 1
        """Samples in the batch of the present call."""
        intercept_calls(module, self._called)

    def _called(self, *args: Any, **kwargs: Any) -> Any:
        if self.sequences.inside or not is_active(self.sequences.calls):  # outside of steps everything is whole
            return self._own(*args, **kwargs)
        leaves, form = flattened(args, kwargs)
        if not torch.is_grad_enabled() and any(not isinstance(leaf, _KNOWN) for leaf in leaves):
            return self._whole(leaves, form)  # such as a cache of keys that text is generated with
        with without_torch_functions():  # shapes of the whole, as shards know them, without asking every mode
            anchor = self._anchor(leaves)
            kinds = () if anchor is None else tuple(_kind(leaf, anchor.size) for leaf in leaves)
        if anchor is None or not self._fits(anchor.size):
            return self._whole(leaves, form)
        layout = self.sequences.peers.layout(anchor.size)
        show_whole(self.module, self._shown, self._is_trial)
        key = form, kinds
        if key not in self._shardings:
            self._shardings[key] = self._try(leaves, form, anchor)
        sharding = self._shardings[key]
        if sharding is None:
            return self._whole(leaves, form)
        with self._own_numbers():
            output = self._on_part(leaves, form, sharding, layout)
        output_dims: Sequence[int | None] = sharding.output_dims
        if isinstance(output, torch.Tensor) and len(output_dims) == 1 and output_dims[0] is not None:
            return self._shard(output, output_dims[0], layout)
        outputs, out_spec = tree_flatten(output)
        if len(output_dims) != len(outputs):
            output_dims = [_dim_of_part(leaf, layout) for leaf in outputs]
        shards = [
            leaf if dim is None or not isinstance(leaf, torch.Tensor) else self._shard(leaf, dim, layout)
            for leaf, dim in zip(outputs, output_dims, strict=True)
        ]
        return tree_unflatten(shards, out_spec)

    def _is_trial(self) -> bool:
        return self.sequences.trying

    # --- whole or sharded -------------------------------------------------------------------------------------------

    def _whole(self, leaves: list[Any], form: Form) -> Any:
        args, kwargs = form.arguments([_whole(leaf) for leaf in leaves])
        with self._within(None):
            return self._own(*args, **kwargs)

    def _on_part(self, leaves: list[Any], form: Form, sharding: CallSharding, layout: Layout) -> Any:
        """What the module returns for this rank's part; with padding, if there is any."""
        parts = [
            self._part(leaf, dim, layout) if isinstance(leaf, torch.Tensor) else leaf
            for leaf, dim in zip(leaves, sharding.argument_dims, strict=True)
        ]
        args, kwargs = form.arguments(parts)
        with without_torch_functions():
            pairs = zip(parts, sharding.argument_dims, strict=True)
            self._rows = next((_batch_of(part, dim) for part, dim in pairs if dim is not None), 1)
        with self._within(layout):
            return self._own(*args, **kwargs)

    def _shown(self, part: torch.Tensor) -> torch.Tensor | None:
        """What a hook within the module is shown: the tensor of the whole sequence, if one has the part's length."""
        within = self.sequences.calls.within
        if within is None or isinstance(part, SequenceShard):
            return None
        dim = _dim_of_part(part, within.layout)
        if dim is None and part.dim() > 0 and part.shape[0] == self._rows * within.layout.local:
            dim = 0  # the batch is flattened into it
        return None if dim is None else self._shard(part, dim, within.layout)

    @contextmanager
    def _within(self, layout: Layout | None) -> Iterator[None]:
        calls = self.sequences.calls
        self.sequences.inside = True
        try:
            with calls.whole() if layout is None else calls.sharding(self.name, layout, self.backend):
                yield
        finally:
            self.sequences.inside = False

    def _part(self, leaf: torch.Tensor, dim: int | None, layout: Layout) -> torch.Tensor:
        if dim is None:
            return _whole(leaf)
        if isinstance(leaf, SequenceShard):
            if leaf.sequence_dim == dim and leaf.positions == Positions.of_layout(layout):
                return _padded(leaf.local, dim, layout.local)
            leaf = leaf.whole()
        return self.sequences.cut(leaf, dim, layout, padded=True)

    def _shard(self, local: torch.Tensor, dim: int, layout: Layout) -> torch.Tensor:
        """What the module has returned as a tensor of the whole sequence, without padding."""
        outer = local.shape[dim] // layout.local
        if layout.is_padded:
            valid = layout.valid(self.sequences.peers.rank)
            if outer == 1:
                local = local.narrow(dim, 0, valid)
            else:
                local = local.unflatten(dim, (outer, layout.local)).narrow(dim + 1, 0, valid).flatten(dim, dim + 1)
        positions = Positions.of_layout(layout)
        if outer != 1:
            positions = positions.flattened(outer)
        return SequenceShard.of(local, dim, positions, self.sequences.peers.group)

    # --- what is cut ------------------------------------------------------------------------------------------------

    def _anchor(self, leaves: list[Any]) -> Anchor | None:
        """The argument whose sequence dim tells how long the sequence is; None if no argument has one.

        The first that is a shard or a tensor of floats [b, s, h]; else the first with dims enough to have a sequence.
        """
        other = None
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, SequenceShard):
                return Anchor(place, leaf.sequence_dim, leaf.shape[leaf.sequence_dim])
            if not isinstance(leaf, torch.Tensor):
                continue
            if leaf.is_floating_point() and leaf.dim() == 3:
                return Anchor(place, 1, leaf.shape[1])
            if other is None and leaf.dim() >= (4 if leaf.is_floating_point() else 2):
                other = Anchor(place, 1, leaf.shape[1])
        return other

    def _fits(self, size: int) -> bool:
        """Whether a sequence of so many positions is sharded.

        Raises:
            ConfigError: a block would be trained on one that can't be.
        """
        ranks = self.sequences.peers.size
        if size % (2 * ranks) == 0 or (self.sequences.pad and size >= 2 * ranks):
            return True
        if not self.is_block or not torch.is_grad_enabled():  # a prompt that grows has every length
            return False
        below = max(size // (2 * ranks), 1) * 2 * ranks
        enough = size >= 2 * ranks
        raise ConfigError(
            f"cp={ranks} with {self.name}",
            f"a sequence of {size} positions can't be cut into 2 x {ranks} parts of equal length",
            f"multiples of {2 * ranks}, such as {below}" + (", or padding" if enough else ""),
            "cp.pad=true" if enough else "",
        )

    # --- trial ------------------------------------------------------------------------------------------------------

    def _try(self, leaves: list[Any], form: Form, anchor: Anchor) -> CallSharding | None:
        """How this call is sharded, found by running a short one of its kind whole and sharded; None: it is not.

        Collective over `Sequences.together`.

        Raises:
            ConfigError: a block returns something else when its sequence is sharded.
        """
        if isinstance(self.module, _NEVER_BY_POSITION) and not self.is_block:
            return None
        ranks = self.sequences.peers.size
        pairs = max(_TRIAL_LENGTH // (2 * ranks), self.sequences.ranks_along_mp)
        per_rank = 2 * max(min(anchor.size // (2 * ranks), pairs), 1)
        layout = self.sequences.peers.layout(per_rank * ranks)
        problem = ""
        # Replicas have other data, so a call may be new to one of them alone: the others must not notice.
        alone = gathered_once(self.module)
        with torch.no_grad(), saved_random_state(self.sequences.device), self._evaluating(), alone:
            for cuts in _ways_to_cut(leaves, anchor):
                short = [
                    self._short(leaf, anchor.size, dim, layout.local) for leaf, dim in zip(leaves, cuts, strict=True)
                ]
                sharding, problem = self._compare(short, form, cuts, layout)
                if self._agree(sharding is not None):
                    return sharding
        if not self.is_block:
            log.debug("cp: %s runs on whole sequences: %s", self.name, problem)
            return None
        problem = problem or "another rank found that it returns something else for a sharded sequence"
        if other := attention_by_hand(self.module):
            problem += f"; transformers computes its attention as `{other}`, having no other way for this model"
        raise ConfigError(
            f"cp={ranks} with {self.name} ({type(self.module).__name__})",
            f"{problem}. Positions of a sharded sequence may meet only in attention that is computed by "
            "torch.nn.functional.scaled_dot_product_attention",
            "blocks whose other operations treat each position by itself, or a mesh with cp of size 1",
        )

    def _compare(
        self, short: list[Any], form: Form, cuts: tuple[int | None, ...], layout: Layout
    ) -> tuple[CallSharding | None, str]:
        """(sharding, "") if the module returns for a sharded sequence what it returns for a whole one, or why not."""
        try:
            theirs = tree_flatten(self._whole(short, form))[0]
            ours = tree_flatten(self._on_part(short, form, CallSharding(cuts, ()), layout))[0]
        except ConfigError:
            raise
        except Exception as error:  # whatever a model raises when shapes don't fit
            if isinstance(self.module, FSDPModule):
                end_left_forward(self.module)
            first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
            return None, f"it does not run on a part of a sequence ({type(error).__name__}: {first_line})"
        if len(ours) != len(theirs):
            return None, "it returns other things for a part of a sequence"
        output_dims: list[int | None] = []
        tolerance = self._tolerance(short)
        for one, other in zip(ours, theirs, strict=True):
            dim = None
            if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
                sizes = list(zip(one.shape, other.shape, strict=False))
                changed = [place for place, (ours_here, theirs_here) in enumerate(sizes) if ours_here != theirs_here]
                if one.dim() != other.dim() or len(changed) > 1 or (changed and one.shape[changed[0]] % layout.local):
                    shapes = f"{list(one.shape)} for a part, {list(other.shape)} for the whole"
                    return None, f"what it returns does not have the sequence as one of its dims ({shapes})"
                dim = changed[0] if changed else None
                if _far(plain(one if dim is None else self._shard(one, dim, layout)), plain(other), tolerance):
                    return None, "it returns something else when its sequence is sharded"
            output_dims.append(dim)
        if all(dim is None for dim in output_dims):
            return None, "nothing that it returns has the sequence among its dims"
        return CallSharding(cuts, tuple(output_dims)), ""

    def _tolerance(self, leaves: list[Any]) -> float:
        """By how much results may differ, relative to the largest value: by the coarsest type that is computed in."""
        used = {leaf.dtype for leaf in [*leaves, *self.module.parameters()] if isinstance(leaf, torch.Tensor)}
        kind = self.sequences.device.type
        if torch.is_autocast_enabled(kind):
            used.add(torch.get_autocast_dtype(kind))
        return 5e-2 if any(dtype.is_floating_point and dtype.itemsize < 4 for dtype in used) else 1e-3

    def _short(self, leaf: Any, size: int, cut_dim: int | None, local: int) -> Any:
        """An argument with so many positions per rank instead of `size`, whole, with values of the real one."""
        peers = self.sequences.peers
        if not isinstance(leaf, torch.Tensor):
            return leaf
        leaf = leaf.detach()
        if isinstance(leaf, SequenceShard):
            dim = leaf.sequence_dim
            if leaf.shape[dim] != size:
                return leaf.whole()
            positions = Positions.of_layout(peers.layout(local * peers.size))
            part = _padded(leaf.local.narrow(dim, 0, min(local, leaf.local.shape[dim])), dim, local)
            return SequenceShard.of(part, dim, positions, peers.group).whole()
        dims = _sequence_dims(leaf, size) if cut_dim is None else [cut_dim]
        if cut_dim is None and len(dims) == 1:
            dims = []  # taken for one that has that length by chance
        for dim in dims:
            leaf = leaf.narrow(dim, 0, local * peers.size)
        return leaf

    def _agree(self, fine: bool) -> bool:
        """Whether all ranks pass True. Collective."""
        vote = torch.tensor(int(fine), device=self.sequences.device)
        dist.all_reduce(vote, dist.ReduceOp.MIN, group=self.sequences.together or self.sequences.peers.group)
        return bool(vote)

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Within it the module runs for a trial: without dropout, and unseen."""
        seen, self.sequences.trying = self.sequences.calls.seen, True
        modes = {module: module.training for module in self.module.modules()}
        for module in modes:
            module.training = False
        try:
            yield
        finally:
            self.sequences.trying = False
            self.sequences.calls.seen = seen
            for module, mode in modes.items():
                module.training = mode

    # --- random numbers ---------------------------------------------------------------------------------------------

    @contextmanager
    def _own_numbers(self) -> Iterator[None]:
        """Other random numbers than those of the other ranks, whose default generators stay in step with this one's."""
        if not self.module.training or self._draws is False:
            yield
            return
        device, rank = self.sequences.device, self.sequences.peers.rank
        digest = hashlib.blake2b(_random_state(device) + bytes([rank % 256, rank // 256]), digest_size=8).digest()
        with saved_random_state(device):
            seed_torch(int.from_bytes(digest, "little") >> 1, device)
            before = _random_state(device)
            yield
            drew = _random_state(device) != before
        if self._draws is None:
            self._draws = drew
        if drew:
            torch.rand((), device=device)  # the next module draws others


def _random_state(device: torch.device) -> bytes:
    states = [torch.get_rng_state()]
    if device.type != "cpu":
        states.append(torch.get_device_module(device).get_rng_state(device))
    return b"".join(state.numpy().tobytes() for state in states)


_NEVER_BY_POSITION = (
    nn.modules.conv._ConvNd,
    nn.RNNBase,
    nn.modules.batchnorm._NormBase,
    nn.GroupNorm,
    nn.MultiheadAttention,
)
"""Layers without parts whose positions meet."""


def _kind(leaf: Any, size: int) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf if isinstance(leaf, bool | int | str | None) else type(leaf)
    if isinstance(leaf, SequenceShard):
        return "shard", leaf.dim(), leaf.sequence_dim, leaf.shape[leaf.sequence_dim] == size
    return leaf.dtype, leaf.dim(), tuple(_sequence_dims(leaf, size))


def _sequence_dims(leaf: torch.Tensor, size: int) -> list[int]:
    """The dims that may be those of a sequence of `size` positions: the first only where it is the only one."""
    first = 0 if leaf.dim() == 1 or (leaf.dim() == 2 and leaf.shape[0] == leaf.shape[1]) else 1
    return [dim for dim in range(first, leaf.dim()) if leaf.shape[dim] == size]


def _ways_to_cut(leaves: Sequence[Any], anchor: Anchor) -> Iterator[tuple[int | None, ...]]:
    """Which dims of a call's arguments may be those along which they are cut, the likeliest first.

    A tensor with two dims of that length is a mask and stays whole, one with one such dim is cut; or else the length
    of a dim is the same by chance: then the others are tried.
    """
    choices: list[list[int | None]] = []
    for place, leaf in enumerate(leaves):
        if place == anchor.leaf:
            choices.append([anchor.dim])
        elif isinstance(leaf, SequenceShard):
            dim = leaf.sequence_dim
            choices.append([dim if leaf.shape[dim] == anchor.size else None])
        elif isinstance(leaf, torch.Tensor):
            dims = _sequence_dims(leaf, anchor.size)
            choices.append([None] if not dims else [dims[0], None] if len(dims) == 1 else [None, *dims])
        else:
            choices.append([None])
    yield tuple(options[0] for options in choices)
    for place, options in enumerate(choices):
        for option in options[1:]:
            # tensors of one kind (cosine and sine) are cut in one way
            alike = [_shape(leaf) == _shape(leaves[place]) for leaf in leaves]
            yield tuple(
                option if same and option in other else other[0] for same, other in zip(alike, choices, strict=True)
            )


def _shape(leaf: Any) -> Any:
    return tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else None


def _dim_of_part(leaf: Any, layout: Layout) -> int | None:
    """The dim of an output that has the length of a rank's part, or None."""
    if not isinstance(leaf, torch.Tensor):
        return None
    dims = [dim for dim in range(leaf.dim()) if leaf.shape[dim] == layout.local]
    return dims[0] if len(dims) == 1 else next((dim for dim in dims if dim == 1), None)


def _batch_of(part: torch.Tensor, dim: int) -> int:
    """How many samples stand beside the sequence in dim `dim`: the other one of the first two dims."""
    return part.shape[1 - dim] if dim < 2 <= part.dim() else 1


def _whole(leaf: Any) -> Any:
    return leaf.whole() if isinstance(leaf, SequenceShard) else leaf


def _padded(local: torch.Tensor, dim: int, length: int) -> torch.Tensor:
    """`local` with its last entry along `dim` repeated until there are `length` of them."""
    missing = length - local.shape[dim]
    if missing == 0:
        return local
    if local.shape[dim] == 0:  # zeros that hang together with it: every rank takes part in its backward pass
        return torch.cat([local.sum(dim, keepdim=True).to(local.dtype)] * missing, dim)
    last = local.narrow(dim, local.shape[dim] - 1, 1)
    return torch.cat([local, *[last] * missing], dim)


def _far(one: torch.Tensor, other: torch.Tensor, tolerance: float) -> bool:
    """Whether two tensors differ by more than rounding, measured on the largest value."""
    if one.shape != other.shape:
        return True
    if not one.is_floating_point():
        return not torch.equal(one, other)
    if one.numel() == 0:
        return False
    one, other = one.float().nan_to_num(), other.float().nan_to_num()
    return bool((one - other).abs().max() > tolerance * one.abs().max().clamp(min=1e-6))
