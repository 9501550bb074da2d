"""Modules that run on this rank's part of a sequence, within models whose own code sees whole sequences.

The call of such a module is intercepted: of its arguments, tensors with one sequence dim are cut to the positions of
this rank; those with two (masks) and those with none stay whole. What it returns says the shape of the whole and holds
this rank's part (`SequenceShard`).

Which dims are those of the sequence, and that the module gives the same result when its sequence is sharded, is tried
out at the first call of each kind, on a short sequence: run whole and run sharded, it must return the same. No
parameter is zero in that (`trial_parameters`). And as what differs may be small beside the rest, and rounding large,
its operators have to say the same: on a sequence that is whole to them, none may need what another rank holds.

Where it does not, a block is opened: its own code sees whole sequences, as that between blocks does, so that positions
meet in operators that gather what they need, and the modules in it are tried in turn. What can't run so, either, or
would gather again and again, runs whole on every rank.
"""

from __future__ import annotations

import hashlib
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_flatten, tree_unflatten

from autolaunch_strategies.config import ConfigError, ContextParallel
from autolaunch_strategies.context.arguments import Form, flattened
from autolaunch_strategies.context.experts_on_parts import experts_on_parts
from autolaunch_strategies.context.held_positions import Rows, held_of_part
from autolaunch_strategies.context.interception import AttentionCalls
from autolaunch_strategies.context.opened import OpenedForward
from autolaunch_strategies.context.shown import show_whole
from autolaunch_strategies.context.transformers_attention import is_cache
from autolaunch_strategies.context.trial_parameters import no_small_parameters
from autolaunch_strategies.mesh.layout import Layout, Peers
from autolaunch_strategies.model.random_positions import holding
from autolaunch_strategies.sharded_sequence.collectives import TRAFFIC
from autolaunch_strategies.sharded_sequence.shard import Positions, SequenceShard, cut, repeated_to
from autolaunch_strategies.tensor.views import plain
from autolaunch_strategies.torch_private.calls import (
    INTERCEPTING,
    forward_restored,
    has_hooks,
    intercept_calls,
    intercepted,
    run_call,
)
from autolaunch_strategies.torch_private.collectives import OF_THE_MACHINE
from autolaunch_strategies.torch_private.fsdp import end_left_forward, gathered_once
from autolaunch_strategies.torch_private.modes import is_active, without_torch_functions
from autolaunch_strategies.torch_private.random_state import saved_random_state, seed_torch
from autolaunch_strategies.torch_private.tracing import has_no_values
from autolaunch_strategies.tracing.state import attributes_kept, trial, values_kept

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


class Whole(Enum):
    """How a kind of call runs that gives something else on parts of a sequence."""

    OPENED = "its code sees whole sequences, of which each rank holds a part"
    REPEATED = "it runs on whole sequences, on every rank"


@dataclass
class Sequences:
    """What all sharded modules of a model share."""

    peers: Peers
    calls: AttentionCalls
    config: ContextParallel
    device: torch.device
    together: dist.ProcessGroup | None
    """Ranks that are given the same data, so call the same modules alike, and agree on what a trial has shown."""
    ranks_along_mp: int = 1
    inside: bool = False
    """Whether a module runs that is sharded, or found not to be shardable: those within it run as they are called."""
    trying: bool = False
    """Whether a module runs for a trial only."""
    modes: dict[nn.Module, bool] = field(default_factory=dict)
    """In a trial which of the modules that it runs are in training otherwise."""
    rows: Rows = field(default_factory=Rows)
    """Of the batch of the module that runs on a part."""
    has_sharded: bool = False
    """Whether any module has run on a part."""
    inner: dict[nn.Module, ShardedModule] = field(default_factory=dict)
    """Modules within blocks that have been opened."""
    opened: list[SequenceShard] = field(default_factory=list)
    """What comes into and out of opened modules that run now."""
    _cut: dict[tuple[int, int, Any], tuple[weakref.ref[torch.Tensor], int, torch.Tensor]] = field(default_factory=dict)

    def cut(self, leaf: torch.Tensor, dim: int, layout: Layout, padded: bool) -> torch.Tensor:
        """This rank's part of a whole plain tensor. Tables that every block gets are cut once."""
        with without_torch_functions():
            needs_gradient = leaf.requires_grad and torch.is_grad_enabled()
            # What inference mode makes has no version, and training can't go on with it.
            if needs_gradient or leaf.is_inference() or torch.is_inference_mode_enabled():
                return self._cut_now(leaf, dim, layout, padded)
            version = leaf._version
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


Compared = tuple[Any, Any, int | None]
"""What a module returns for a part of the sequence, for the whole, and which dim of both is the sequence."""
_KNOWN = (torch.Tensor, bool, int, float, str, type(None))
"""What a call that leaves nothing behind is given."""
_MOST_CUT = 16
_TRIAL_LENGTH = 1024
"""Positions of the sequence on which a call is tried out: what meets over a larger distance only is not seen."""
_MOST_GATHERS = 16
"""How often the code of an opened module gathers in a forward pass: a loop over positions would do it for each."""


class ShardedModule:
    """One module whose calls run on this rank's part of the sequence."""

    def __init__(
        self,
        name: str,
        module: nn.Module,
        sequences: Sequences,
        is_block: bool,
        backend: str,
        outer: ShardedModule | None = None,
    ) -> None:
        """Take over the calls of `module`.

        Args:
            is_block: it holds attention: where it gives something else on parts, it is opened.
            backend: what computes attention in it.
            outer: the opened module within which this one is. Only sequences that are sharded already are sharded in
                it: its code sees some that the model left whole.
        """
        self.name, self.module, self.sequences, self.is_block = name, module, sequences, is_block
        self.backend, self.outer = backend, outer
        self.why_whole = ""
        """What a trial has found against running on parts."""
        self.gathered = 0
        """Bytes that its first call that was no trial got from other ranks, with all modules within it."""
        self.repeats: list[str] = []
        """What every rank has computed in that call of gathered tensors: functions, and modules within it."""
        self._opened: OpenedForward | None = None
        self._gathers_within = 0
        """How often the modules within this one have gathered."""
        own = intercepted(module)
        self._own: Callable[..., Any] = own or (lambda *args, **kwargs: run_call(module, *args, **kwargs))
        self._shardings: dict[Any, CallSharding | Whole] = {}
        self._draws: bool | None = None
        intercept_calls(module, self._called)

    def _called(self, *args: Any, **kwargs: Any) -> Any:
        calls = self.sequences.calls
        # Outside of steps everything is whole; and within a part, which may be computed again, everything is one.
        if self.sequences.inside or calls.within is not None or not is_active(calls):
            return self._own(*args, **kwargs)
        leaves, form = flattened(args, kwargs)
        if not torch.is_grad_enabled() and any(not isinstance(leaf, _KNOWN) for leaf in leaves):
            return self._whole(leaves, form)  # such as a cache of keys that text is generated with
        if any(is_cache(leaf) for leaf in leaves if not isinstance(leaf, _KNOWN)):
            self.why_whole = "it is given a cache of keys, to which every call adds"
            return self._whole(leaves, form)
        with without_torch_functions():  # shapes of the whole, as shards know them, without asking every mode
            anchor = self._anchor(leaves)
            kinds = () if anchor is None else tuple(_kind(leaf, anchor.size) for leaf in leaves)
        if anchor is None or not self._fits(anchor.size):
            return self._whole(leaves, form)
        layout = self.sequences.peers.layout(anchor.size)
        show_whole(self.module, self._shown, self._is_trial)
        key = form, kinds, layout.is_padded, self.sequences.modes.get(self.module, self.module.training)
        if key not in self._shardings:
            traffic = TRAFFIC.copy()
            self._shardings[key] = self._try(leaves, form, anchor, layout)
            TRAFFIC.restore(traffic)
        sharding = self._shardings[key]
        if isinstance(sharding, Whole):
            before = TRAFFIC.times
            output = self._on_whole(sharding, leaves, form, anchor)
            if self.outer is not None:
                self.outer._gathers_within += TRAFFIC.times - before
            return output
        self.sequences.has_sharded |= not self.sequences.trying
        with self._own_numbers(), holding(partial(self._held, layout)):
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

    def _on_whole(self, how: Whole, leaves: list[Any], form: Form, anchor: Anchor) -> Any:
        """What the module returns for whole sequences, of which it may hold a part."""
        before, TRAFFIC.repeated = TRAFFIC.copy(), frozenset()
        if how is Whole.REPEATED:
            output = self._whole(leaves, form)
            TRAFFIC.repeated = frozenset({self.name})
        else:
            self.sequences.has_sharded |= not self.sequences.trying
            output = self._opened_call(self._as_shards(leaves, anchor), form)
        if not self.gathered and not self.sequences.trying:
            self.gathered, self.repeats = TRAFFIC.received - before.received, sorted(TRAFFIC.repeated)
        TRAFFIC.repeated |= before.repeated
        return output

    def _as_shards(self, leaves: list[Any], anchor: Anchor) -> list[Any]:
        """The arguments with the one that tells the length as a shard; others are as they were handed."""
        leaves, leaf = list(leaves), leaves[anchor.leaf]
        if not isinstance(leaf, SequenceShard):
            leaves[anchor.leaf] = self._shard_of_whole(leaf, anchor.dim, self.sequences.peers.layout(anchor.size))
        return leaves

    def _shard_of_whole(self, leaf: torch.Tensor, dim: int, layout: Layout) -> SequenceShard:
        positions, group = Positions.of_layout(layout), self.sequences.peers.group
        return SequenceShard.of(cut(leaf, dim, positions, group), dim, positions, group)

    def _opened_call(self, leaves: list[Any], form: Form) -> Any:
        """What the module returns if its own code sees whole sequences; some arguments are this rank's part of one."""
        if self._opened is None:
            self._opened = OpenedForward(self.module, self._is_trial, self.sequences.opened)
            for name, part in _called_parts(self.module):
                if part not in self.sequences.inner:
                    self.sequences.inner[part] = ShardedModule(
                        f"{self.name}.{name}", part, self.sequences, False, self.backend, outer=self
                    )
        with self.sequences.calls.using(self.backend), torch.compiler.set_stance("force_eager"):
            return self._opened(self._own, leaves, form)

    def _on_part(self, leaves: list[Any], form: Form, sharding: CallSharding, layout: Layout) -> Any:
        """What the module returns for this rank's part; with padding, if there is any."""
        parts = [
            self._part(leaf, dim, layout) if isinstance(leaf, torch.Tensor) else leaf
            for leaf, dim in zip(leaves, sharding.argument_dims, strict=True)
        ]
        args, kwargs = form.arguments(parts)
        with without_torch_functions():
            pairs = zip(parts, sharding.argument_dims, strict=True)
            self.sequences.rows = next((Rows.of(part, dim) for part, dim in pairs if dim is not None), Rows())
        with self._within(layout):
            return self._own(*args, **kwargs)

    def _shown(self, part: torch.Tensor) -> torch.Tensor | None:
        """What a hook within the module is shown: the tensor of the whole sequence, if one has the part's length."""
        within = self.sequences.calls.within
        if isinstance(part, SequenceShard):
            return None
        if within is None:
            return next((shard for shard in self.sequences.opened if shard._local is part), None)
        dim = _dim_of_part(part, within.layout)
        if dim is None and part.dim() > 0 and part.shape[0] == self.sequences.rows.samples * within.layout.local:
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
                return repeated_to(leaf.local, dim, layout.local)
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
            if not isinstance(leaf, torch.Tensor) or self.outer is not None:
                continue
            if leaf.is_floating_point() and leaf.dim() == 3:
                return Anchor(place, 1, leaf.shape[1])
            if other is None and leaf.dim() >= (4 if leaf.is_floating_point() else 2):
                other = Anchor(place, 1, leaf.shape[1])
        return other

    def _fits(self, size: int) -> bool:
        """Whether a sequence of so many positions is sharded.

        Raises:
            ConfigError: a block would be trained on one that is not padded, as the config says.
        """
        ranks = self.sequences.peers.size
        if size < 2 * ranks:
            return False
        if size % (2 * ranks) == 0 or self.sequences.config.pad:
            return True
        if not self.is_block or not torch.is_grad_enabled():  # a prompt that grows has every length
            return False
        raise ConfigError(
            f"cp={ranks} with {self.name}",
            f"a sequence of {size} positions can't be cut into 2 x {ranks} parts of equal length",
            f"multiples of {2 * ranks}, such as {size // (2 * ranks) * 2 * ranks}, or padding",
            self.sequences.config.to_write("pad", "true"),
        )

    # --- trial ------------------------------------------------------------------------------------------------------

    def _try(self, leaves: list[Any], form: Form, anchor: Anchor, layout: Layout) -> CallSharding | Whole:
        """How this call is sharded, found by running a short one of its kind whole and sharded.

        Collective over `Sequences.together`.

        Raises:
            ConfigError: the module can't run sharded as the config says, and can with another one.
        """
        # The operators of these would say so, too, but not which layer it is. Of layers without parts only the kind
        # is known.
        statistics = [part for part in self.module.modules() if isinstance(part, nn.modules.batchnorm._NormBase)]
        if isinstance(self.module, _NEVER_BY_POSITION) and not self.is_block:
            return Whole.REPEATED
        peers = self.sequences.peers
        pairs = max(_TRIAL_LENGTH // (2 * peers.size), self.sequences.ranks_along_mp)
        padding = layout.local * peers.size - layout.size
        short_layout = peers.layout(min(layout.local, 2 * pairs) * peers.size - padding)
        refused: ConfigError | None = None
        # Replicas have other data, so a call may be new to one of them alone: the others must not notice.
        alone = gathered_once(self.module)
        with alone, torch.no_grad(), trial(self.sequences.device), self._trying():
            for cuts in () if statistics else _ways_to_cut(leaves, anchor):
                short = [
                    self._short(leaf, anchor.size, dim, short_layout) for leaf, dim in zip(leaves, cuts, strict=True)
                ]
                outputs, problem, refusal = self._whole_and_part(short, form, cuts, short_layout)
                self.why_whole, refused = self.why_whole or problem, refused or refusal
                if not self._agree(outputs is not None):  # one that failed would not gather with the others
                    continue
                assert outputs is not None
                dims = tuple(dim for _, _, dim in outputs)
                if not self._agree(self._are_same(outputs, self._tolerance(short), short_layout)):
                    self.why_whole = self.why_whole or "it returns something else when its sequence is sharded"
                    continue
                if self._agree(self._keeps_positions_apart(leaves, form, CallSharding(cuts, dims), layout)):
                    self.why_whole = ""
                    return CallSharding(cuts, dims)
                self.why_whole = self.why_whole or "positions meet in it outside of attention"
            if statistics:
                self.why_whole = f"{type(statistics[0]).__name__} takes its statistics from all positions"
            self.why_whole = self.why_whole or "another rank found that it returns something else"
            how = Whole.REPEATED
            may_open = self.is_block or self.outer is not None
            if may_open:
                fine, refusal = self._tries_opened(leaves, form, anchor, short_layout)
                how = Whole.OPENED if self._agree(fine) else how
                refused = refused and refusal
        if refused is not None and may_open:
            raise refused
        log.debug("cp: %s: %s, so %s", self.name, self.why_whole, how.value)
        return how

    def _tries_opened(
        self, leaves: list[Any], form: Form, anchor: Anchor, layout: Layout
    ) -> tuple[bool, ConfigError | None]:
        """(whether the module returns the same if it is opened, and gathers few times; what says how it could)."""
        cuts = tuple(anchor.dim if place == anchor.leaf else None for place in range(len(leaves)))
        short = [self._short(leaf, anchor.size, dim, layout) for leaf, dim in zip(leaves, cuts, strict=True)]
        try:
            theirs = tree_flatten(self._whole(short, form))[0]
            for place, leaf in enumerate(leaves):
                if isinstance(leaf, SequenceShard) and leaf.shape[leaf.sequence_dim] == anchor.size:
                    short[place] = self._shard_of_whole(short[place], leaf.sequence_dim, layout)
                elif isinstance(leaf, SequenceShard):
                    short[place] = leaf.detach()
            short = self._as_shards(short, Anchor(anchor.leaf, anchor.dim, layout.size))
            self._opened_call(short, form)  # so that the modules within it are tried
            before = TRAFFIC.times - self._gathers_within
            ours = tree_flatten(self._opened_call(short, form))[0]
            times = TRAFFIC.times - self._gathers_within - before
        except ConfigError as error:
            return False, error
        except OF_THE_MACHINE:
            raise
        except Exception as error:  # whatever a model raises that is handed another kind of tensor
            self._end_left_forward()
            log.debug("cp: %s can't be opened: %s", self.name, error, exc_info=True)
            return False, None
        tolerance = self._tolerance(short)
        same = len(ours) == len(theirs) and not any(
            isinstance(one, torch.Tensor) != isinstance(other, torch.Tensor)
            or (isinstance(one, torch.Tensor) and _far(plain(one), plain(other), tolerance))
            for one, other in zip(ours, theirs, strict=True)
        )
        if not same or times > _MOST_GATHERS:
            log.debug("cp: %s is not opened: equal %s, gathers %d times", self.name, same, times)
        return same and times <= _MOST_GATHERS, None

    def _end_left_forward(self) -> None:
        if isinstance(self.module, FSDPModule):
            end_left_forward(self.module)

    def _whole_and_part(
        self, short: list[Any], form: Form, cuts: tuple[int | None, ...], layout: Layout
    ) -> tuple[list[Compared] | None, str, ConfigError | None]:
        """(what the module returns for a part of a sequence and for the whole, "", None) if they can be compared.

        Or else why not, and what says it if that is something to be changed in the config. Each rank finds out by
        itself.
        """
        try:
            theirs = tree_flatten(self._whole(short, form))[0]
            ours = tree_flatten(self._on_part(short, form, CallSharding(cuts, ()), layout))[0]
        except ConfigError as error:
            self._end_left_forward()
            return None, error.problem, error
        except OF_THE_MACHINE:
            raise
        except Exception as error:  # whatever a model raises when shapes don't fit
            self._end_left_forward()
            first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
            return None, f"it does not run on a part of a sequence ({type(error).__name__}: {first_line})", None
        if len(ours) != len(theirs):
            return None, "it returns other things for a part of a sequence", None
        outputs: list[Compared] = []
        for one, other in zip(ours, theirs, strict=True):
            dim = None
            if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
                sizes = list(zip(one.shape, other.shape, strict=False))
                changed = [place for place, (ours_here, theirs_here) in enumerate(sizes) if ours_here != theirs_here]
                if one.dim() != other.dim() or len(changed) > 1 or (changed and one.shape[changed[0]] % layout.local):
                    shapes = f"{list(one.shape)} for a part, {list(other.shape)} for the whole"
                    return None, f"what it returns does not have the sequence as one of its dims ({shapes})", None
                dim = changed[0] if changed else None
            outputs.append((one, other, dim))
        if all(dim is None for _, _, dim in outputs):
            return None, "nothing that it returns has the sequence among its dims", None
        return outputs, "", None

    def _are_same(self, outputs: list[Compared], tolerance: float, layout: Layout) -> bool:
        """Whether parts, put together, are the whole. Collective: all are, also behind one that differs here alone."""
        far = [
            _far(plain(one if dim is None else self._shard(one, dim, layout)), plain(other), tolerance)
            for one, other, dim in outputs
            if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
        ]
        return not any(far)

    def _keeps_positions_apart(self, leaves: list[Any], form: Form, sharding: CallSharding, layout: Layout) -> bool:
        """Whether nothing but attention brings positions together in this very call. Collective.

        Its operators tell, on sequences that are whole to them and of which this rank holds a part: none gathers, and
        none meets a tensor of all positions that the module has made by itself.
        """
        shards = [
            self._held_of(leaf, dim, layout) if isinstance(leaf, torch.Tensor) else leaf
            for leaf, dim in zip(leaves, sharding.argument_dims, strict=True)
        ]
        before = TRAFFIC.copy()
        with ExitStack() as stack:
            stack.enter_context(self._in_its_modes())
            stack.enter_context(experts_on_parts(self.module))
            stack.enter_context(self.sequences.calls.using(self.backend))
            for part in self.module.modules():
                if part is not self.module and has_hooks(part):
                    stack.enter_context(_opened_for_shards(part))
            stack.enter_context(forward_restored(self.module))
            opened = OpenedForward(self.module, lambda: False, self.sequences.opened)
            try:
                results = tree_flatten(opened(self._own, shards, form))[0]
            except OF_THE_MACHINE:
                raise
            except Exception as error:  # whatever a model raises that is handed another kind of tensor
                self._end_left_forward()
                log.debug("cp: %s can't be opened: %s", self.name, error, exc_info=True)
                return False
        met = (TRAFFIC.times, TRAFFIC.sums, TRAFFIC.cuts) != (before.times, before.sums, before.cuts)
        return not met and all(
            dim is None or (isinstance(result, SequenceShard) and result.sequence_dim == dim)
            for result, dim in zip(results, sharding.output_dims, strict=True)
        )

    def _held_of(self, leaf: torch.Tensor, dim: int | None, layout: Layout) -> torch.Tensor:
        """An argument whose dim `dim` (None: none) is sharded, as what this rank holds of it."""
        leaf = leaf.detach()
        if isinstance(leaf, SequenceShard) and leaf.sequence_dim == dim:
            return leaf
        leaf = _whole(leaf)
        return leaf if dim is None else self._shard_of_whole(leaf, dim, layout)

    def _tolerance(self, leaves: list[Any]) -> float:
        """By how much results may differ, relative to the largest value: by the coarsest type that is computed in."""
        used = {leaf.dtype for leaf in [*leaves, *self.module.parameters()] if isinstance(leaf, torch.Tensor)}
        kind = self.sequences.device.type
        if torch.is_autocast_enabled(kind):
            used.add(torch.get_autocast_dtype(kind))
        return 5e-2 if any(dtype.is_floating_point and dtype.itemsize < 4 for dtype in used) else 1e-3

    def _short(self, leaf: Any, size: int, cut_dim: int | None, layout: Layout) -> Any:
        """An argument with the positions of `layout` instead of `size`, whole, with values of the real one."""
        peers = self.sequences.peers
        if not isinstance(leaf, torch.Tensor):
            return leaf
        leaf = leaf.detach()
        if isinstance(leaf, SequenceShard):
            dim = leaf.sequence_dim
            if leaf.shape[dim] != size:
                return leaf.whole()
            count = layout.valid(peers.rank)
            part = repeated_to(leaf.local.narrow(dim, 0, min(count, leaf.local.shape[dim])), dim, count)
            return SequenceShard.of(part, dim, Positions.of_layout(layout), peers.group).whole()
        dims = _sequence_dims(leaf, size) if cut_dim is None else [cut_dim]
        if cut_dim is None and len(dims) == 1:
            dims = []  # taken for one that has that length by chance
        for dim in dims:
            leaf = leaf.narrow(dim, 0, layout.size)
        return leaf

    def _agree(self, fine: bool) -> bool:
        """Whether all ranks pass True. Collective."""
        vote = torch.tensor(int(fine), device=self.sequences.device)
        dist.all_reduce(vote, dist.ReduceOp.MIN, group=self.sequences.together or self.sequences.peers.group)
        return fine and bool(vote)

    @contextmanager
    def _trying(self) -> Iterator[None]:
        """Within it the module runs for a trial: without dropout, unseen, and not compiled for it."""
        seen, was, self.sequences.trying = self.sequences.calls.seen, self.sequences.trying, True
        modes = {module: module.training for module in self.module.modules()}
        if not was:
            self.sequences.modes = modes
        for module in modes:
            module.training = False
        try:
            with no_small_parameters(self.module), torch.compiler.set_stance("force_eager"):
                yield
        finally:
            self.sequences.trying = was
            self.sequences.calls.seen = seen
            for module, mode in modes.items():
                module.training = mode
            if not was:
                self.sequences.modes = {}

    @contextmanager
    def _in_its_modes(self) -> Iterator[None]:
        """Within it what is tried runs as it is called: what it does in training only is seen, and not kept."""
        buffers = [buffer for buffer in self.module.buffers() if not has_no_values(buffer)]
        attributes = attributes_kept(self.module, ("_parameters", *INTERCEPTING))
        with values_kept(buffers), attributes:
            for module in self.module.modules():
                module.training = self.sequences.modes.get(module, module.training)
            yield

    def _held(self, layout: Layout, shape: Sequence[int]) -> dict[int, tuple[torch.Tensor, int]]:
        """What this rank holds of a tensor of the shape within the module, for numbers by position."""
        if self.sequences.calls.within is None:  # attention is being answered, which says itself what it holds
            return {}
        return held_of_part(shape, layout, self.sequences.peers.rank, self.sequences.rows)

    # --- random numbers ---------------------------------------------------------------------------------------------

    def _own_numbers(self) -> AbstractContextManager[None]:
        """Other random numbers than those of the other ranks, whose default generators stay in step with this one's."""
        return nullcontext() if not self.module.training or self._draws is False else self._drawing()

    @contextmanager
    def _drawing(self) -> Iterator[None]:
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
            torch.empty((), device=device).random_()  # the next module draws others; `rand(())` may be by position


@contextmanager
def _opened_for_shards(module: nn.Module) -> Iterator[None]:
    """Within it `module` can be called with sequence shards, whatever its hooks know."""
    own = intercepted(module)
    with forward_restored(module):
        opened = OpenedForward(module, lambda: False, [])

        def called(*args: Any, **kwargs: Any) -> Any:
            leaves, form = flattened(args, kwargs)
            return opened(own or partial(run_call, module), leaves, form)

        intercept_calls(module, called)
        try:
            yield
        finally:
            intercept_calls(module, own)


def _random_state(device: torch.device) -> bytes:
    states = [torch.get_rng_state()]
    if device.type != "cpu":
        states.append(torch.get_device_module(device).get_rng_state(device))
    return b"".join(state.numpy().tobytes() for state in states)


_NEVER_BY_POSITION = (nn.modules.conv._ConvNd, nn.RNNBase, nn.modules.batchnorm._NormBase, nn.GroupNorm)
"""Layers without parts whose positions meet."""


def mixes_positions(layer: nn.Module) -> bool:
    """Whether a layer without parts computes a position from others, too, as its class says."""
    kernel = layer.kernel_size if isinstance(layer, nn.modules.conv._ConvNd) else ()
    return isinstance(layer, _NEVER_BY_POSITION) and (not kernel or max(kernel) > 1)


def _called_parts(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The modules that the code of `module` may call: its children, and for a container those in it."""
    for name, child in module.named_children():
        if type(child).forward is nn.Module.forward:
            yield from _called_parts(child, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", child


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


def _whole(leaf: Any) -> Any:
    return leaf.whole() if isinstance(leaf, SequenceShard) else leaf


def _far(one: torch.Tensor, other: torch.Tensor, tolerance: float) -> bool:
    """Whether two tensors differ by more than rounding, measured on the largest value."""
    if one.shape != other.shape:
        return True
    if has_no_values(one):
        return False
    if not one.is_floating_point():
        return not torch.equal(one, other)
    if one.numel() == 0:
        return False
    one, other = one.float().nan_to_num(), other.float().nan_to_num()
    return bool((one - other).abs().max() > tolerance * one.abs().max().clamp(min=1e-6))
