"""One forward pass of a model on shapes alone, written down: which linear layer's output feeds which."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from autolaunch_strategies.config import ConfigError
from autolaunch_strategies.config.errors import first_line
from autolaunch_strategies.model.example_inputs import ExampleInputs
from autolaunch_strategies.plan.layers import is_linear
from autolaunch_strategies.tracing.inputs import Steps, with_inputs_that_run
from autolaunch_strategies.tracing.recorder import Observer, Operation, Recorder, Untraceable
from autolaunch_strategies.tracing.shapes import fake_inputs, fake_state, on_shapes_alone
from autolaunch_strategies.tracing.step import Step
from autolaunch_strategies.tracing.tensors import Labels, first_input, first_output, tensors_in
from autolaunch_strategies.tracing.unreadable import stepping_over

Names = frozenset[str]
_NONE: Names = frozenset()
_KNOWN_TO_WORK = frozenset(
    {
        "_fused_rms_norm", "_log_softmax", "_safe_softmax", "_softmax", "_to_copy", "_unsafe_view", "addmm", "amax",
        "amin", "argmax", "baddbmm", "bernoulli", "bernoulli_", "bmm", "cat", "clone", "copy_", "document_attention",
        "embedding",
        "empty_like", "full_like", "index", "index_select", "logsumexp", "max", "mean", "min", "mm", "native_dropout",
        "native_layer_norm", "new_empty", "new_zeros", "ones_like", "rand_like", "repeat", "repeat_interleave",
        "select", "split", "split_with_sizes", "stack", "std", "sum", "var", "var_mean", "zeros_like",
    }
)  # fmt: skip
"""Operators, next to elementwise ones, views and attention, that sharded tensors go through rightly and well."""


@dataclass
class Call:
    """A module's first call: its place in the order of calls, and the first tensors that go in and come out."""

    name: str
    order: int
    input: torch.Tensor | None
    output: torch.Tensor | None = None
    integer_input: bool = False
    times: int = 1

    @property
    def shapes(self) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
        """(shape of the input, shape of the output)."""
        first, last = (None if tensor is None else tuple(tensor.shape) for tensor in (self.input, self.output))
        return first, last


@dataclass
class Trace:
    """What one forward pass shows.

    A layer *feeds* another if its output gets there through anything but a further linear layer.
    """

    example: ExampleInputs
    calls: dict[str, Call] = field(default_factory=dict)
    """By name of the module, in the order in which they begin."""
    sources: dict[str, Names] = field(default_factory=dict)
    """Linear layer -> linear layers that feed it."""
    reaching: dict[str, Names] = field(default_factory=dict)
    """Module -> linear layers that feed its (first) output."""
    splits: dict[str, set[tuple[int, ...]]] = field(default_factory=dict)
    """Linear layer -> how the last dim of its output is viewed as several, such as (heads, size of a head)."""
    operators: dict[str, set[str]] = field(default_factory=dict)
    """Linear layer -> operators that its output goes through before the next linear layer and that are not known to
    work on sharded tensors."""
    untraceable: dict[str, str] = field(default_factory=dict)
    """Modules whose own forward can't run without data, and why."""
    batch: int = 0
    cut_short: str = ""
    """Why the rest could not be followed, if it ends before the model does."""

    def consumers(self, name: str) -> Names:
        """The linear layers that `name` feeds."""
        return frozenset(other for other, sources in self.sources.items() if name in sources)


def trace(model: nn.Module, example: Any = None, steps: Steps | None = None) -> Trace:
    """Run `model` once on shapes alone. It is left as it was.

    Args:
        example: inputs that the user names.
        steps: what a module around the model does with it, or with parts of it.

    Raises:
        ConfigError: no inputs are known with which it runs.
    """
    return with_inputs_that_run(
        model,
        example,
        lambda inputs: stepping_over(model, lambda placeholders: _trace_with(model, inputs, placeholders)),
        lambda problem: ConfigError(
            "mp",
            f"no plan can be derived for {type(model).__name__}: {problem}",
            "a model whose forward runs on `example_input_array` (an attribute of the module), or a plan of your own",
            "mp.base=none and mp.plan",
        ),
        steps,
        lambda step: _trace_of_step(model, step),
    )


def _trace_of_step(model: nn.Module, step: Step) -> Trace:
    """Whatever of `model` a step calls, until it does what can't be done without values."""
    try:
        return stepping_over(model, lambda placeholders: _run_step(model, step, placeholders, in_part=False))
    except Exception:
        return _run_step(model, step, {}, in_part=True)


def _run_step(model: nn.Module, step: Step, placeholders: Mapping[str, str], in_part: bool) -> Trace:
    with step.on_shapes() as run:
        dataflow = _Dataflow(Trace(ExampleInputs(step.origin), untraceable=dict(placeholders)))
        recorder = Recorder(model, [dataflow])
        with recorder.watching():
            try:
                recorder.run(run)
            except Untraceable as failure:
                is_behind = not failure.inside and dataflow.trace.sources  # what is done with what the model returns
                if not (is_behind or in_part) or not dataflow.trace.calls:
                    raise failure.error if in_part else failure from None
                dataflow.trace.cut_short = first_line(failure.error)
        first = next((call.input for call in dataflow.trace.calls.values() if call.input is not None), None)
        dataflow.trace.batch = 0 if first is None or not first.dim() else first.shape[0]
    if not dataflow.trace.calls:
        raise LookupError("it calls none of its parts")
    return dataflow.trace


def _trace_with(model: nn.Module, inputs: ExampleInputs, placeholders: Mapping[str, str]) -> Trace:
    with on_shapes_alone():
        state = fake_state(model)
        args, kwargs = fake_inputs(inputs.args, inputs.kwargs)
        batch = tensors_in((args, kwargs))[0].shape[0]
        dataflow = _Dataflow(Trace(inputs, untraceable=dict(placeholders), batch=batch))
        recorder = Recorder(model, [dataflow])
        with recorder.watching():
            recorder.call(state, args, kwargs)
    return dataflow.trace


class _Dataflow(Observer):
    """Follows the outputs of linear layers."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.origins = Labels[str]()
        """The linear layers whose outputs are in a tensor."""

    def module_begins(self, name: str, module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        tensor = first_input(args, kwargs)
        if name in self.trace.calls:
            self.trace.calls[name].times += 1
        else:
            integer = tensor is not None and not tensor.is_floating_point()
            self.trace.calls[name] = Call(name, len(self.trace.calls), tensor, None, integer)
        if is_linear(module):
            self.trace.sources[name] = self.trace.sources.get(name, _NONE) | self._origins_of(tensor)

    def module_ends(self, name: str, module: nn.Module, output: Any) -> None:
        tensor = first_output(output)
        if tensor is None:
            return
        if is_linear(module):
            self.origins.put(tensor, {name})
        call = self.trace.calls[name]
        call.output = tensor if call.output is None else call.output
        self.trace.reaching[name] = self.trace.reaching.get(name, _NONE) | self._origins_of(tensor)

    def operator(self, operation: Operation) -> None:
        origins = self.origins.of(*operation.inputs)
        changed = [*operation.outputs, *operation.written]
        for tensor in changed:
            self.origins.add(tensor, origins)
        if origins and not _known_to_work(operation.operator) and not is_linear(operation.module):
            for name in origins:
                self.trace.operators.setdefault(name, set()).add(operation.name)
        if len(operation.inputs) == len(origins) == len(changed) == 1:
            parts = _split_of_last_dim(operation.inputs[0].shape, changed[0].shape)
            if parts:
                self.trace.splits.setdefault(next(iter(origins)), set()).add(parts)

    def _origins_of(self, tensor: torch.Tensor | None) -> Names:
        return _NONE if tensor is None else self.origins.of(tensor)


def _known_to_work(operator: Any) -> bool:
    name = operator.overloadpacket.__name__
    return (
        name in _KNOWN_TO_WORK
        or getattr(operator, "is_view", False)
        or torch.Tag.pointwise in operator.tags
        or name.startswith("_scaled_dot_product")
    )


def _split_of_last_dim(before: torch.Size, after: torch.Size) -> tuple[int, ...]:
    """(heads, size) if a view takes [..., heads * size] to [..., heads, size], with two parts or more; else ()."""
    prefix = len(before) - 1
    if len(after) < len(before) + 1 or before[:-1] != after[:prefix]:
        return ()
    parts = tuple(after[prefix:])
    return parts if torch.Size(parts).numel() == before[-1] else ()
