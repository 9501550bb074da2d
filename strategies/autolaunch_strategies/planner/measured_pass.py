"""One pass with a batch, forward and backward: one block of each kind by itself, and everything around the blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from autolaunch_strategies.planner.compiled import JointPass, Kernels
from autolaunch_strategies.planner.first_look import FirstLook
from autolaunch_strategies.planner.model_call import ModelCall
from autolaunch_strategies.planner.operators import Tally, Tape
from autolaunch_strategies.torch_private.backward import run_backward, run_backward_of
from autolaunch_strategies.torch_private.calls import run_call
from autolaunch_strategies.torch_private.tracing import storage_key
from autolaunch_strategies.tracing.tensors import tensors_in


@dataclass(frozen=True)
class Returned:
    """A tensor that a call of a block returns."""

    memory: int
    """What tells apart those of one call that are in the same memory."""
    size: int
    kept: tuple[int, int]
    """What the block keeps of it for its backward pass: (bytes, of which sharded)."""
    kept_compiled: tuple[int, int]
    """The same if it is compiled."""


@dataclass
class Span:
    """What a part cost, and its stretch of the tape's events."""

    tally: Tally = field(default_factory=Tally)
    begin: int = 0
    backward_begin: int = 0
    """Of the loss, after which nothing begins again: where its backward pass does."""
    end: int = 0
    kept: tuple[int, int] = (0, 0)
    """(bytes that were made in it and are kept for its backward pass, of which sharded)."""
    outputs: dict[tuple[int, int], Returned] = field(default_factory=dict)
    """(number of the call, place among what it returns) -> the tensor there."""
    output: int = 0
    """Bytes of those that anything behind it reads."""
    input: int = 0
    saved_input: bool = False
    """Whether what goes from block to block is kept by it."""
    saved_output: tuple[int, int] = (0, 0)
    """Of what it keeps, what it returns: that is kept by who gets it, too, if that one keeps its input."""
    compiled: tuple[int, int, int] = (0, 0, 0)
    """(bytes that it keeps for its backward pass if it is compiled, of which sharded, of which made by experts)."""
    compiled_output: tuple[int, int] = (0, 0)
    """Of these, what it returns, as `saved_output`."""
    kernels: Kernels = field(default_factory=lambda: Kernels(0, (0, 0, 0)))
    """Those of its forward pass if it is compiled."""
    backward_kernels: Kernels = field(default_factory=lambda: Kernels(0, (0, 0, 0)))


class MeasuredPass:
    """What one pass with one batch costs.

    Args:
        args, kwargs: what the model is called with.

    Raises:
        Untraceable: it can't run on shapes alone.
    """

    def __init__(self, model_call: ModelCall, look: FirstLook, args: Any, kwargs: Mapping[str, Any]) -> None:
        self.tape = Tape()
        self.before, self.after, self.loss = Span(), Span(), Span()
        self.kinds: dict[str, Span] = {}
        """Name of the first block of a kind -> its costs."""
        self.element_bytes = 4
        """Of what a block returns."""
        self._look = look
        self._count = 0
        self._turns: dict[str, int] = {}
        self._outputs: dict[tuple[str, int], tuple[TreeSpec, list[Any]]] = {}
        """(first block of a kind, number of its call) -> what it returned."""
        self._last_output: set[int] = set()
        """Memory of what stands for the last block's output."""
        self._run(model_call, args, kwargs)
        for name, span in self.kinds.items():
            places = self.tape.reads.get(name, set())
            goes_on = {
                (turn, item.memory): item
                for (turn, place), item in span.outputs.items()
                if place in places or not places
            }
            of_last = [item for (turn, _), item in goes_on.items() if turn == self._turns[name]]
            span.output = sum(item.size for item in of_last)
            span.saved_output = _total(item.kept for item in goes_on.values())
            span.compiled_output = _total(item.kept_compiled for item in of_last)

    def _run(self, model_call: ModelCall, args: Any, kwargs: Mapping[str, Any]) -> None:
        tape = self.tape
        unused = [name for name, first in self._look.kind_of.items() if name != first]
        with model_call.on(tape, args, kwargs, self._block, unused) as call:
            tape.tally = self.before.tally
            with torch.autograd.graph.saved_tensors_hooks(tape.pack, _as_it_is):
                output = call()
                tape.are_read(tensors_in(output))
                tape.watched.clear()
                self.after.end = self.loss.begin = len(tape.events)
                self.after.saved_input = any(key in self.after.tally.saved for key in self._last_output)
                around = self.after if self._look.calls else self.before
                around.end, around.kept = self.after.end, around.tally.saved_bytes()
                tape.tally = self.loss.tally
                loss = default_loss(output) if model_call.loss is None else model_call.loss(output)
                of_loss = self.loss.tally.saved_bytes()
                self.loss.kept = of_loss[0] + around.kept[0], of_loss[1] + around.kept[1]
            del output
            self.loss.backward_begin = len(tape.events)
            if loss is not None and loss.requires_grad:
                tape.backward = True
                run_backward(loss)
            self.loss.end = len(tape.events)
        self.before.kept = self.before.tally.saved_bytes()

    def _block(self, name: str, module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Run the block if it is the first of its kind; what stands for its output."""
        if not self._count:
            self.before.end = len(self.tape.events)
        self._count += 1
        is_last = self._count == len(self._look.calls)
        turn = self._turns[name] = self._turns.get(name, -1) + 1
        first = self._look.kind_of[name]
        leaves, spec = tree_flatten((args, kwargs))
        self.tape.are_read(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
        if name == first:
            self._outputs[name, turn] = self._run_block(name, module, leaves, spec, turn)
        if is_last:
            self.tape.tally = self.after.tally
            self.after.begin = len(self.tape.events)
        output = self._stand_in(leaves, *self._outputs[first, turn], is_first=self._count == 1)
        if is_last:
            self._last_output.update(storage_key(tensor) for tensor in tensors_in(output))
        for place, leaf in enumerate(tree_flatten(output)[0]):
            if isinstance(leaf, torch.Tensor):
                self.tape.watched[storage_key(leaf)] = (first, place)
        return output

    def _run_block(
        self, name: str, module: nn.Module, leaves: list[Any], spec: TreeSpec, turn: int
    ) -> tuple[TreeSpec, list[Any]]:
        """Forward and backward of one block by itself; what it returned, as shapes."""
        tape, span, shared = self.tape, self.kinds.setdefault(name, Span()), self._look.shared.get(name, set())
        outer, tape.tally = tape.tally, span.tally
        with tape.unheard():
            own = [
                leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, torch.Tensor) else leaf
                for leaf in leaves
            ]
        tensors = {place: leaf for place, leaf in enumerate(own) if isinstance(leaf, torch.Tensor)}
        inputs = {storage_key(leaf): leaf.untyped_storage().nbytes() for leaf in tensors.values()}
        stream = {
            storage_key(leaf): inputs[storage_key(leaf)] for place, leaf in tensors.items() if place not in shared
        }
        span.begin = len(tape.events)
        tape.joint = joint = JointPass()
        for place, leaf in tensors.items():
            if place not in shared and (number := tape.value_of(leaf)) is not None:
                joint.begins_with(number, *tape.bytes_of(leaf))
        args, kwargs = tree_unflatten(own, spec)
        output = run_call(module, *args, **kwargs)
        outputs, output_spec = tree_flatten(output)
        results = [leaf for leaf in outputs if isinstance(leaf, torch.Tensor)]
        kept = [value for key, value in span.tally.saved.items() if key not in inputs]
        span.kept = sum(size for size, _ in kept), sum(size for size, sharded in kept if sharded)
        for key in inputs.keys() - stream.keys() & span.tally.saved.keys():
            # Tables of positions and masks that many blocks read are kept once: with what made them.
            if key in span.tally.saved:
                outer.saved.setdefault(key, span.tally.saved.pop(key))
        span.saved_input = any(key in span.tally.saved for key in stream)
        for key in stream.keys() & span.tally.saved.keys():
            self.before.tally.saved.pop(key, None)  # once is enough
        span.input = sum(stream.values())
        returns = {
            place: (storage_key(leaf), leaf.untyped_storage().nbytes(), tape.value_of(leaf))
            for place, leaf in enumerate(outputs)
            if isinstance(leaf, torch.Tensor)
        }
        saved = {key: value for key, value in span.tally.saved.items() if key not in inputs}
        if results:
            self.element_bytes = results[0].element_size()
        shapes = [
            (leaf.shape, leaf.stride(), leaf.dtype, leaf.requires_grad, tape.dim_of(leaf))
            if isinstance(leaf, torch.Tensor)
            else leaf
            for leaf in outputs
        ]
        differentiable = [leaf for leaf in results if leaf.requires_grad]
        returned = {number for _, _, number in returns.values() if number is not None}
        del output, outputs, results
        if differentiable:
            tape.backward = True
            run_backward_of(differentiable, [torch.empty_like(leaf) for leaf in differentiable])
            tape.backward = tape.in_experts = False
        del differentiable
        for leaf in (*tensors.values(), *module.parameters()):
            leaf.grad = None
        span.end = len(tape.events)
        span.tally.settle()
        tape.tally, tape.joint = outer, None
        kept_compiled = joint.kept()
        span.compiled = _sums(kept_compiled.values())
        span.kernels = joint.kernels(kept_compiled, returned)
        span.backward_kernels = joint.backward_kernels(kept_compiled)
        for place, (key, size, number) in returns.items():
            kept_bytes, is_sharded = saved.get(key, (0, False))
            compiled = _sums(value for other, value in kept_compiled.items() if other == number)
            span.outputs[turn, place] = Returned(key, size, (kept_bytes, kept_bytes * is_sharded), compiled[:2])
        return output_spec, shapes

    def _stand_in(self, leaves: list[Any], spec: TreeSpec, shapes: list[Any], is_first: bool) -> Any:
        """Tensors like those that a block returns, dependent on what it was called with."""

        def behind() -> None:
            """What runs next of the backward pass is that of what ran before the blocks."""
            if is_first:
                self.tape.tally = self.before.tally

        with self.tape.unheard():
            outputs = [
                torch.empty_strided(item[0], item[1], dtype=item[2]) if isinstance(item, tuple) else item
                for item in shapes
            ]
            for tensor, item in zip(outputs, shapes, strict=True):
                if isinstance(item, tuple) and item[4] is not None:
                    self.tape.shard(tensor, item[4])
            inputs = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
            places = [place for place, item in enumerate(shapes) if isinstance(item, tuple) and item[3]]
            if places and inputs:
                bridged = _Bridge.apply([outputs[place] for place in places], behind, *inputs)
                for place, tensor in zip(places, bridged, strict=True):
                    outputs[place] = tensor
            elif places:
                for place in places:
                    outputs[place].requires_grad_()
        return tree_unflatten(outputs, spec)


class _Bridge(torch.autograd.Function):
    """Stands for a block between what lies around it: its outputs depend on its inputs, at no cost."""

    @staticmethod
    def forward(context: Any, outputs: list[torch.Tensor], behind: Callable[[], None], *inputs: torch.Tensor) -> Any:
        context.behind = behind
        context.like = [(tensor.shape, tensor.dtype) for tensor in inputs]
        return tuple(outputs)

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        context.behind()
        return (None, None, *(torch.empty(shape, dtype=dtype) for shape, dtype in context.like))


def _sums(values: Iterable[tuple[int, bool, bool]]) -> tuple[int, int, int]:
    """(bytes of all values, of the sharded ones, of those of experts)."""
    values = list(values)
    return (
        sum(size for size, _, _ in values),
        sum(size for size, sharded, _ in values if sharded),
        sum(size for size, _, routed in values if routed),
    )


def _total(sizes: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """(bytes of all of them, of which sharded)."""
    sizes = list(sizes)
    return sum(size for size, _ in sizes), sum(sharded for _, sharded in sizes)


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def default_loss(output: Any) -> torch.Tensor | None:
    """The loss that an output brings; else cross entropy in fp32 of scores [b, c] or [b, s, c]; else a mean square.

    None if there is nothing to differentiate.
    """
    if isinstance(getattr(output, "loss", None), torch.Tensor):
        return output.loss
    if isinstance(output, Mapping) and isinstance(output.get("loss"), torch.Tensor):
        return output["loss"]
    scores = getattr(output, "logits", None)
    if not isinstance(scores, torch.Tensor):
        scores = next((tensor for tensor in tensors_in(output) if tensor.requires_grad), None)
    if scores is None or not scores.requires_grad:
        return None
    if scores.dim() == 0:
        return scores
    if scores.dim() in (2, 3) and scores.shape[-1] > 1:
        target = torch.zeros(scores.shape[:-1].numel(), dtype=torch.int64, device=scores.device)
        return nn.functional.cross_entropy(scores.flatten(0, -2).float(), target)
    return scores.float().square().mean()
