"""The profile of a model, put together from what its passes showed.

One pass shows which blocks run the same operators; two more, with two and with three sequences, what a block of each
kind and the rest cost: the difference is what one sequence costs, and what does not depend on the batch (tables of
positions, copies of weights) drops out of it.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import nn

from autolaunch_strategies.config import ConfigError
from autolaunch_strategies.experts.auxiliary import router_losses
from autolaunch_strategies.experts.find import Mixture, find_mixtures
from autolaunch_strategies.model.linear_weights import linear_weights
from autolaunch_strategies.planner.first_look import FirstLook
from autolaunch_strategies.planner.measured_pass import MeasuredPass, Span
from autolaunch_strategies.planner.operators import Tally
from autolaunch_strategies.planner.profile import Attention, BackwardPass, Compiled, MatMul, ModelProfile, Part
from autolaunch_strategies.planner.subject import ParameterSharding, Subject


@dataclass
class Assembly:
    """What passes showed, put together."""

    subject: Subject
    sharding: ParameterSharding
    look: FirstLook
    """With one sequence."""
    two: MeasuredPass
    """With two sequences."""
    three: MeasuredPass
    """With three sequences."""
    positions: int
    """Of a sequence."""
    replaced: Mapping[str, str]
    """Parts that can't run on shapes alone, and why."""

    def __post_init__(self) -> None:
        self.mixtures: list[Mixture] = []
        self.without_experts = ""
        """Why ep can share out no experts."""
        try:
            self.mixtures = find_mixtures(self.subject.model)
        except ConfigError as error:
            self.without_experts = error.problem
        self.listed = any(mixture.caller is not None for mixture in self.mixtures)
        """Whether experts are modules of a list."""
        if self.listed:
            self.mixtures = []
            self.without_experts = (
                "its experts are modules of a list, and how many rows they get is seen in a run alone"
            )
        if not self.mixtures:
            self.without_experts = self.without_experts or "it has no mixture of experts"

    def profile(self, name: str) -> ModelProfile:
        """The profile, called `name`."""
        look, two, three = self.look, self.two, self.three
        of_blocks = self._block_parameters()
        before_names, shared = self._parameters_before(of_blocks)
        firsts = list(dict.fromkeys(look.kind_of.values()))
        inside = {self.subject.prefix + item for item in itertools.chain(before_names, *of_blocks.values())}
        after_names = [item.removeprefix(self.subject.prefix) for item in self._parameters if item not in inside]
        before = self._part("before", look.before, two.before, three.before, before_names)
        kinds = tuple(self._block(first, of_blocks[first]) for first in firsts)
        after = self._part("after", look.after, two.after, three.after, after_names)
        after = _with_loss(after, two.loss.tally, three.loss.tally)
        if firsts:  # scores are what the loss begins with
            missing = self._kept_by_nobody()
            after = dataclasses.replace(
                after,
                saved_bytes=after.saved_bytes + missing[0],
                sharded_saved_bytes=after.sharded_saved_bytes + missing[1],
                peak_bytes=0,
                sharded_peak_bytes=0,
                late_bytes=0,
                sharded_late_bytes=0,
            )
        # An embedding that is sharded by the vocabulary costs an exchange in the forward pass alone, a head in the
        # backward pass: half of what one exchange in both costs.
        before = dataclasses.replace(
            before,
            has_backward=before.trained > 0,
            exchange_bytes=before.exchange_bytes / 2,
            output_bytes=kinds[0].output_bytes if kinds else 0,
        )
        element_bytes = three.element_bytes
        head_inputs = [item.rows * item.inner * element_bytes for item in after.matmuls if item.divided == "columns"]
        if head_inputs and not after.exchanges:
            after = dataclasses.replace(
                after, exchanges=len(head_inputs), exchange_bytes=sum(head_inputs) / len(head_inputs) / 2
            )
        begins = [item.after.begin if firsts else item.before.begin for item in (two, three)]
        loss, forward_loss = (
            _peak(
                [(begin, item.loss.begin, end) for begin, item, end in zip(begins, (two, three), ends, strict=True)],
                (two, three),
                _minus(three.loss.kept, two.loss.kept),
            )
            for ends in zip(*((item.loss.end, item.loss.backward_begin) for item in (two, three)), strict=True)
        )
        counts = [count for span in two.kinds.values() for count in span.tally.heads]
        heads = math.gcd(*counts) if counts else None
        return ModelProfile(
            name=name,
            positions=self.positions,
            before=before,
            kinds=kinds,
            blocks=tuple(firsts.index(look.kind_of[block]) for block in look.order),
            block_names=tuple(look.order),
            after=after,
            loss_bytes=loss[0],
            sharded_loss_bytes=loss[1],
            forward_loss_bytes=forward_loss[0],
            sharded_forward_loss_bytes=forward_loss[1],
            shared_parameters=shared,
            element_bytes=element_bytes,
            mp_sizes=self._mp_sizes(),
            heads=heads,
            refused=self._refused(heads),
        )

    # --- parameters ---

    def _block_parameters(self) -> dict[str, list[str]]:
        """Block that runs -> its parameters, by their names in the model."""
        return {
            name: [f"{name}.{own}" for own, _ in self.subject.blocks[name].named_parameters()]
            for name in self.look.order
        }

    def _parameters_before(self, of_blocks: Mapping[str, list[str]]) -> tuple[list[str], int]:
        """(parameters of what runs before the blocks, elements of those that what runs after them uses, too)."""
        inside = {parameter for names in of_blocks.values() for parameter in names}
        two, names, shared = self.two, [], 0
        for name, parameter in self.subject.model.named_parameters():
            users = two.tape.used.get(name, ())
            if name in inside or not any(user is two.before.tally for user in users):
                continue
            names.append(name)
            shared += parameter.numel() if any(user is two.after.tally for user in users) else 0
        return names, shared

    @cached_property
    def _parameters(self) -> dict[str, nn.Parameter]:
        """Name in the root -> parameter; going through a large model takes milliseconds each time."""
        return dict(self.subject.root.named_parameters())

    @cached_property
    def _linear(self) -> frozenset[str]:
        """Parameters of the model that linear layers alone hold."""
        return frozenset(name.removeprefix(self.subject.prefix) for name in linear_weights(self.subject.root))

    def _counts(self, names: Sequence[str]) -> tuple[int, int]:
        """(elements of parameters, of which sharded)."""
        held = self._parameters
        items = {name: held.get(self.subject.prefix + name, held.get(name)) for name in names}
        known = {name: 0 if item is None else item.numel() for name, item in items.items()}
        return sum(known.values()), sum(size for name, size in known.items() if name in self.sharding.dims)

    # --- parts ---

    def _block(self, first: str, names: Sequence[str]) -> Part:
        two, three = self.two.kinds[first], self.three.kinds[first]
        part = self._part(type(self.subject.blocks[first]).__name__, self.look.blocks[first], two, three, names)
        selective = _minus(three.tally.selective, two.tally.selective)
        twice = self._kept_twice(first)
        replaced = tuple(self._replaced_products(first))
        return dataclasses.replace(
            part,
            has_backward=part.trained > 0 or self.look.is_behind_trained[first],
            matmuls=(*part.matmuls, *replaced),
            waits=bool(replaced) or any(item.one_by_one for item in part.matmuls),
            saved_bytes=part.saved_bytes - twice[0],
            sharded_saved_bytes=part.sharded_saved_bytes - twice[1],
            compiled=self._compiled(first),
            selective_bytes=selective[0] + three.input - two.input,
            sharded_selective_bytes=selective[1],
            output_bytes=three.output - two.output,
        )

    def _compiled(self, first: str) -> Compiled:
        """What is other of a block of this kind if it is compiled."""
        two, three = self.two.kinds[first], self.three.kinds[first]
        saved, moved = _minus(three.compiled, two.compiled), _minus(three.kernels.moved, two.kernels.moved)
        twice = (0.0, 0.0)
        if self._is_kept_behind(self.look.order.index(first)):
            twice = _minus(three.compiled_output, two.compiled_output)
        return Compiled(
            moved_bytes=moved[0],
            sharded_moved_bytes=moved[1],
            kernels=two.kernels.count,
            saved_bytes=saved[0] - twice[0],
            sharded_saved_bytes=saved[1] - twice[1],
            expert_moved_bytes=three.kernels.moved[2] - two.kernels.moved[2],
            expert_saved_bytes=three.compiled[2] - two.compiled[2],
            backward=BackwardPass(
                *_minus(three.backward_kernels.moved, two.backward_kernels.moved),
                kernels=two.backward_kernels.count,
                expert_moved_bytes=three.backward_kernels.moved[2] - two.backward_kernels.moved[2],
            ),
        )

    def _kept_twice(self, first: str) -> tuple[float, float]:
        """What a block of this kind returns and keeps itself, if what follows the first of them keeps it as well."""
        if not self._is_kept_behind(self.look.order.index(first)):
            return 0.0, 0.0
        return _minus(self.three.kinds[first].saved_output, self.two.kinds[first].saved_output)

    def _kept_by_nobody(self) -> tuple[float, float]:
        """What was taken to be kept by whoever follows a block, where that one does not."""
        size = sharded = 0.0
        for place, name in enumerate(self.look.order):
            if not self._is_kept_behind(place):
                twice, calls = self._kept_twice(self.look.kind_of[name]), self.look.calls.count(name)
                size, sharded = size + twice[0] / calls, sharded + twice[1] / calls  # others of its calls are followed
        return size, sharded

    def _is_kept_behind(self, place: int) -> bool:
        """Whether what follows block number `place` keeps what that returns."""
        if place + 1 == len(self.look.order):
            return self.two.after.saved_input
        return self.two.kinds[self.look.kind_of[self.look.order[place + 1]]].saved_input

    def _part(self, name: str, one: Tally, two: Span, three: Span, names: Sequence[str]) -> Part:
        parameters, sharded_parameters = self._counts(names)
        less, more = two.tally, three.tally
        moved = _minus(more.moved, less.moved)
        saved = _minus(more.saved_bytes(), less.saved_bytes())
        stretches = [(two.begin, two.begin, two.end), (three.begin, three.begin, three.end)]
        peak, late = (
            _peak(stretches, (self.two, self.three), _minus(three.kept, two.kept), puts_off)
            for puts_off in (False, True)
        )
        matmuls, attention = _calls(one, less)
        trained = {own for own, parameter in self._parameters.items() if parameter.requires_grad}
        trained_here = self._counts([own for own in names if {own, self.subject.prefix + own} & trained])[0]
        return Part(
            name=name,
            parameters=parameters,
            trained=trained_here / parameters if parameters else 1.0,
            sharded_parameters=sharded_parameters,
            linear_parameters=self._counts([name for name in names if name in self._linear])[0],
            matmuls=matmuls,
            attention=attention,
            moved_bytes=moved[0],
            sharded_moved_bytes=moved[1],
            kernels=less.kernels[0],
            sharded_kernels=less.kernels[1],
            saved_bytes=saved[0],
            sharded_saved_bytes=saved[1],
            gathered_saved_bytes=more.gathered_bytes() - less.gathered_bytes(),
            whole_saved_bytes=more.whole_bytes() - less.whole_bytes(),
            peak_bytes=peak[0],
            sharded_peak_bytes=peak[1],
            late_bytes=late[0] - peak[0],
            sharded_late_bytes=max(0.0, late[1] - peak[1]),
            exchanges=less.exchanges,
            exchange_bytes=(more.exchanged - less.exchanged) / less.exchanges if less.exchanges else 0.0,
            expert_moved_bytes=more.routed_moved - less.routed_moved,
            expert_saved_bytes=float(sum(more.routed_saved.values()) - sum(less.routed_saved.values())),
            backward=_backward(less, more),
            **self._experts(names, less.casts),
        )

    def _experts(self, names: Sequence[str], casts: Collection[str]) -> dict[str, Any]:
        """Fields of `Part` for the mixtures that have the parameters `names`, of which `casts` are copied."""
        owners = {f"{item.name}.{own}": item for item in self.mixtures for own, _ in item.module.named_parameters()}
        here = [name for name in names if name in owners]
        if not here:
            return {}
        of_experts = [name for name in here if name not in self.sharding.dims]
        mixtures = {owners[name].name: owners[name].experts for name in here}
        return {
            "experts": math.gcd(*mixtures.values()),
            "mixtures": len(mixtures),
            "expert_parameters": self._counts(of_experts)[0],
            "cast_expert_parameters": self._counts([name for name in of_experts if name in casts])[0],
        }

    def _replaced_products(self, block: str) -> Iterator[MatMul]:
        """Products of the parts of a block that can't run on shapes alone, such as experts that ask who has tokens.

        An approximation: every matrix [.., out, in] is taken to meet all positions once, or the share of them that
        the attributes of the part tell (experts per token among all). Their saved bytes are not known.
        """
        for name in self.replaced:
            if name != block and not name.startswith(f"{block}."):
                continue
            module = self.subject.model.get_submodule(name)
            holders = (module, getattr(module, "config", None))
            chosen = _first_number(holders, ("top_k", "num_experts_per_tok", "num_experts_per_token"))
            of = _first_number(holders, ("num_experts", "num_local_experts", "n_routed_experts"))
            share = chosen / of if chosen and of else 1.0
            for parameter in module.parameters():
                if parameter.dim() >= 2:
                    columns, inner = parameter.shape[-2:]
                    yield MatMul(self.positions, inner, columns, parameter.shape[:-2].numel() * share)

    # --- what fits ---

    def _mp_sizes(self) -> tuple[int, ...]:
        sizes = set(self.two.tape.head_counts)
        prefixes = tuple(f"{block}." for block in self.look.order)
        for name, parameter in self.subject.model.named_parameters():
            dim = self.sharding.dims.get(name)
            if dim is not None and parameter.dim() > 1 and name.startswith(prefixes):
                sizes.add(parameter.shape[dim])
        return tuple(sorted(sizes))

    def _refused(self, heads: int | None) -> dict[str, str]:
        refused = {}
        if self.without_experts:
            refused["ep"] = self.without_experts
        if self.sharding.refused:
            refused["mp"] = self.sharding.refused
        if self.sharding.sequences_refused:
            refused["sequence_parallel"] = self.sharding.sequences_refused
        if self.replaced:
            name, why = next(iter(self.replaced.items()))
            refused["compile"] = f"what {name} does can't be followed on shapes alone ({why})"
        elif self.listed:
            refused["compile"] = "which rows the experts of its list get is known only while Python runs"
        if names := router_losses(self.subject.root):
            refused["schedules"] = f"{names[0] or 'the model'} adds the loss of its routers (output_router_logits)"
        if not self.look.order:
            refused["pp"] = "it has no repeated blocks, so nothing says where to cut"
            refused["cp"] = "it has no repeated blocks whose sequences could be sharded"
        elif heads is None:
            refused["cp"] = "none of its blocks calls scaled_dot_product_attention, so positions can't be sharded"
        return refused


def _first_number(holders: Sequence[Any], names: Sequence[str]) -> int | None:
    values = (getattr(holder, name, None) for holder in holders for name in names)
    return next((value for value in values if isinstance(value, int) and value > 0), None)


def _calls(one: Tally, two: Tally) -> tuple[tuple[MatMul, ...], Attention | None]:
    """(products, equal ones counted; the kind of fused attention, other kinds as products).

    Args:
        one: of one sequence.
        two: of the same with two sequences: what mp shards may depend on that, since heads that are joined with a
            batch of one are a dim of their own.
    """
    products: dict[MatMul, float] = {}
    alike = len(one.matmuls) == len(two.matmuls)
    for place, item in enumerate(one.matmuls):
        like = two.matmuls[place] if alike else dataclasses.replace(item, left_gradient=True, right_gradient=True)
        key = dataclasses.replace(like, rows=item.rows, inner=item.inner, columns=item.columns, count=1)
        products[key] = products.get(key, 0) + item.count
    calls: dict[Attention, int] = {}
    flags = two.attention if len(two.attention) == len(one.attention) else one.attention
    for (call, _), (_, sharded) in zip(one.attention, flags, strict=True):
        kind = dataclasses.replace(call, count=1, divided=sharded)
        calls[kind] = calls.get(kind, 0) + call.count
    attention: Attention | None = None
    for call, count in calls.items():
        if attention is None:
            attention = dataclasses.replace(call, count=count)
            continue
        rows = call.positions / 2 if call.causal else call.positions
        which = "count" if any(sharded for _, sharded in one.attention) else ""
        for shape in ((call.head_dim, int(rows)), (int(rows), call.head_dim)):
            key = MatMul(call.positions, *shape, 1, which)
            products[key] = products.get(key, 0) + call.heads * count
    return tuple(dataclasses.replace(key, count=count) for key, count in products.items()), attention


def _with_loss(part: Part, two: Tally, three: Tally) -> Part:
    """What runs after the blocks, with the loss."""
    moved = _minus(three.moved, two.moved)
    saved = _minus(three.saved_bytes(), two.saved_bytes())
    return dataclasses.replace(
        part,
        matmuls=part.matmuls + tuple(dataclasses.replace(item, count=item.count / 2) for item in two.matmuls),
        saved_bytes=part.saved_bytes + saved[0],
        sharded_saved_bytes=part.sharded_saved_bytes + saved[1],
        moved_bytes=part.moved_bytes + moved[0],
        sharded_moved_bytes=part.sharded_moved_bytes + moved[1],
        kernels=part.kernels + two.kernels[0],
        sharded_kernels=part.sharded_kernels + two.kernels[1],
        backward=_backward(two, three),  # what runs behind the blocks is charged to the loss there
    )


def _backward(two: Tally, three: Tally) -> BackwardPass:
    moved, sharded_moved = _minus(three.backward_moved, two.backward_moved)
    kernels, sharded_kernels = two.backward_kernels
    of_experts = three.backward_routed_moved - two.backward_routed_moved
    return BackwardPass(moved, sharded_moved, kernels, sharded_kernels, of_experts)


def _minus(left: Sequence[float], right: Sequence[float]) -> tuple[float, float]:
    return left[0] - right[0], left[1] - right[1]


def _peak(
    stretches: Sequence[tuple[int, int, int]],
    passes: tuple[MeasuredPass, MeasuredPass],
    kept: tuple[float, float],
    puts_off: bool = False,
) -> tuple[float, float]:
    """(most bytes of one sequence that are alive at one moment beyond `kept`, the share of it that mp shards).

    Args:
        stretches: per pass (where to count from, from where the moment may be, end), as places in the tape's events.
        puts_off: whether what gradients of weights are made of stays.
    """
    (begin, after, end), (other_begin, other_after, other_end) = stretches
    two, three = passes[0].tape.events[begin:end], passes[1].tape.events[other_begin:other_end]
    aligned = len(two) == len(three) and after - begin == other_after - other_begin
    if aligned:
        changes = [(second[0] - first[0], second[1], second[2]) for first, second in zip(two, three, strict=True)]
    else:  # another order of events: then a third of what three sequences take
        changes = [(size // 3, sharded, born) for size, sharded, born in three]
    stays = passes[1].tape.for_weights if puts_off else ()
    ahead = other_after - other_begin
    alive = sharded_alive = most = share = 0.0
    for place, (size, is_sharded, born) in enumerate(changes):
        if born < other_begin or (born in stays and size < 0):  # freed here, but not made here; or not freed
            continue
        alive += size
        sharded_alive += size if is_sharded else 0.0
        if place >= ahead and alive > most:
            most, share = alive, sharded_alive
    most = max(0.0, most - kept[0])
    return most, min(most, max(0.0, share - kept[1]))
