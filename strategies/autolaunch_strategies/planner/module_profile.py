"""The profile of any module, from forward and backward passes on shapes alone.

The model may be on meta and of any size. One whole forward pass shows which blocks run the same operators; then one
block of each kind, and what lies around the blocks, runs forward and backward, with two and with three sequences: the
difference is what one sequence costs, and what does not depend on the batch (tables of positions, copies of weights)
drops out of it.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map, tree_unflatten

from autolaunch_strategies.config import ConfigError, ModelParallel, PipelineParallel
from autolaunch_strategies.model.blocks import find_blocks
from autolaunch_strategies.model.example_inputs import BATCH, POSITIONS, ExampleInputs, example_inputs
from autolaunch_strategies.pipeline.cut import pipelined_part
from autolaunch_strategies.plan.choose import plan_for, planned_part
from autolaunch_strategies.plan.rules import Match
from autolaunch_strategies.plan.trace import Untraceable, is_linear, stepping_over
from autolaunch_strategies.planner.device_functions import functions_of
from autolaunch_strategies.planner.operators import Tally, Tape
from autolaunch_strategies.planner.profile import Attention, MatMul, ModelProfile, Part
from autolaunch_strategies.tensor.model_parallel import matched
from autolaunch_strategies.torch_private.calls import intercept_calls, run_call
from autolaunch_strategies.torch_private.tracing import fake_tensors, storage_key

Loss = Callable[[Any], torch.Tensor]

PRECISIONS: dict[str, tuple[torch.dtype | None, torch.dtype | None]] = {
    "32-true": (None, None),
    "64-true": (torch.float64, None),
    "bf16-true": (torch.bfloat16, None),
    "16-true": (torch.float16, None),
    "bf16-mixed": (None, torch.bfloat16),
    "16-mixed": (None, torch.float16),
}
"""Lightning's names -> (type of parameters, None for their own; type of autocast)."""
_DTYPES = {None: None, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def profile_module(
    module: nn.Module,
    positions: int | None = None,
    *,
    example: Any = None,
    loss: Loss | None = None,
    own_plan: Mapping[str, Any] | None = None,
    precision: str = "32-true",
    param_dtype: str | None = None,
    device_type: str = "cuda",
    name: str | None = None,
) -> ModelProfile:
    """What one training step of `module` costs per sequence. The module is left as it was, and may be on meta.

    Args:
        module: any module, or a LightningModule around one.
        positions: tokens of a sequence; None: as in the example.
        example: inputs for one call (as lightning's `example_input_array`, which is the default); others are found by
            the kind of the first layers. The batch is the first dim of every tensor that has it.
        loss: of what the model returns; by default its own `loss`, or cross entropy in fp32 over the last dim, as the
            launcher's modules compute it.
        own_plan: the mp plan that comes with the model.
        precision: as lightning names it.
        param_dtype: of gathered parameters, as `dp.param_dtype`.
        device_type: where it will run (cuda or cpu): kernels of attention and autocast differ.
        name: what the profile is called; by default the class of the model.

    Returns:
        the profile. What mp divides is followed through the operators by DTensor's rules for one axis; parts of a
        model that can't run on shapes alone (see `_replaced_products`) count with their matrix products only.

    Raises:
        ConfigError: no inputs are known with which the model runs, or an unknown precision.
    """
    if precision not in PRECISIONS:
        raise ConfigError(f"precision={precision}", "no such precision", ", ".join(PRECISIONS))
    subject = _Subject.of(module)
    division = _division(subject, own_plan, example)
    settings = _Settings(precision, _DTYPES[param_dtype], device_type, loss)
    tried = []
    given = example if example is not None else getattr(module, "example_input_array", None)
    for inputs in example_inputs(subject.model, given):
        try:
            passes = stepping_over(
                subject.model, lambda placeholders, inputs=inputs: _passes(  # type: ignore[misc]
                    subject, division, settings, inputs, positions, placeholders
                )
            )  # fmt: skip
        except Exception as error:  # whatever a model's forward may raise: other inputs may do
            first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
            tried.append(f"{inputs.origin}: {first_line[:160]}")
            continue
        return _Assembly(subject, division, passes).profile(name or type(subject.model).__name__)
    raise ConfigError(
        "model",
        f"{type(subject.model).__name__} can't be profiled: its forward does not run on any inputs that were tried"
        + "".join(f"\n    {line}" for line in tried),
        "`example_input_array` as an attribute of the module: inputs with which its forward runs",
    )


# --- what is profiled ---------------------------------------------------------------------------------------------


@dataclass
class _Subject:
    """The module, the part of it that runs, and its blocks."""

    root: nn.Module
    model: nn.Module
    prefix: str
    """Of the model's names in the root."""
    blocks: dict[str, nn.Module]
    """Name in the model -> block, in the order of definition."""
    tied: dict[str, str]
    """Every name of a parameter in the model -> the first one."""

    @classmethod
    def of(cls, root: nn.Module) -> _Subject:
        found = find_blocks(root)
        part = ""
        if isinstance(root, pl.LightningModule):
            part = planned_part(root)[1].rstrip(".")
            if len(found):
                part = pipelined_part(root, found, PipelineParallel())
        model, prefix = root.get_submodule(part), f"{part}." if part else ""
        blocks = {
            block.name.removeprefix(prefix): block.module
            for block in found
            if not prefix or block.name.startswith(prefix)
        }
        first = {id(parameter): name for name, parameter in model.named_parameters()}
        tied = {name: first[id(parameter)] for name, parameter in model.named_parameters(remove_duplicate=False)}
        return cls(root, model, prefix, blocks, tied)


@dataclass(frozen=True)
class _Settings:
    precision: str
    param_dtype: torch.dtype | None
    device_type: str
    loss: Loss | None

    @property
    def autocast(self) -> torch.dtype | None:
        return PRECISIONS[self.precision][1]

    @property
    def parameter_dtype(self) -> torch.dtype | None:
        return self.param_dtype or PRECISIONS[self.precision][0]


@dataclass
class _Division:
    """Which parameters mp divides."""

    dims: dict[str, int] = field(default_factory=dict)
    """Parameter of the model -> divided dim."""
    refused: str = ""


def _division(subject: _Subject, own_plan: Mapping[str, Any] | None, example: Any) -> _Division:
    """By the plan that the engine would apply: for two ranks, or the least number that it works for."""
    model, prefix = planned_part(subject.root)
    given = example if example is not None else getattr(subject.root, "example_input_array", None)
    refused = ""
    for ranks in (2, 3, 5, 7):
        try:
            rules = plan_for(model, ModelParallel(), own_plan, ranks, given)
        except ConfigError as error:
            refused = refused or str(error)
            continue
        matches, _ = matched(model, rules, prefix)
        dims = _divided_parameters(model, matches)
        inner = subject.prefix.removeprefix(prefix)
        found = {name.removeprefix(inner): dim for name, dim in dims.items() if name.startswith(inner)}
        if found:
            return _Division(found)
    return _Division({}, refused or "the plan divides none of its parameters")


def _divided_parameters(model: nn.Module, matches: Sequence[Match]) -> dict[str, int]:
    """Parameter -> the dim along which styles divide it."""
    found: dict[str, int] = {}
    for match in matches:
        module = model.get_submodule(match.module)
        for spec in match.rule.styles:
            column = spec.name == "ColWiseParallel"
            if not column and spec.name != "RowWiseParallel":
                continue
            turned = not isinstance(module, nn.Linear) and is_linear(module)  # [inputs, outputs]
            for own, parameter in module._parameters.items():
                if parameter is None or (match.only is not None and own != match.only):
                    continue
                place = f"{match.module}.{own}" if match.module else own
                if isinstance(module, nn.Embedding):
                    dim = 1 if column else 0
                elif parameter.dim() < 2:
                    if not column:
                        continue
                    dim = 0
                else:
                    dim = int(column == turned)
                found.setdefault(place, int(spec.arguments.get("shard_dim") or dim) if column else dim)
    return found


# --- passes -------------------------------------------------------------------------------------------------------


@dataclass
class _Span:
    """What a part cost, and its stretch of the tape's events."""

    tally: Tally
    begin: int = 0
    end: int = 0
    kept: tuple[int, int] = (0, 0)
    """(bytes that were made in it and are kept for its backward pass, of which divided)."""
    output: int = 0
    input: int = 0
    saved_input: bool = False
    """Whether what it is given from block to block is kept."""
    saved_output: tuple[int, int] = (0, 0)
    """Of what it keeps, what it returns: that is kept by who gets it, too, if that one keeps its input."""


@dataclass
class _Pass:
    """What one pass with one batch shows."""

    tape: Tape
    before: _Span
    after: _Span
    loss: _Span
    kinds: dict[str, _Span]
    """Name of the first block of a kind -> its costs."""


@dataclass
class _Passes:
    order: list[str]
    """Blocks in order of execution."""
    kind_of: dict[str, str]
    """Block -> the first of its kind."""
    shown: _Runner
    """The first look, with one sequence."""
    two: _Pass
    three: _Pass
    positions: int
    element_bytes: int
    replaced: Mapping[str, str]
    """Parts that can't run on shapes alone, and why."""


def _passes(
    subject: _Subject,
    division: _Division,
    settings: _Settings,
    inputs: ExampleInputs,
    positions: int | None,
    placeholders: Mapping[str, str],
) -> _Passes:
    made = {batch: _inputs_for(inputs, batch, positions) for batch in (1, 2, 3)}
    shown = _Runner(subject, division, settings)
    shown.look(*made[1][:2])
    runs = []
    for batch in (2, 3):
        runner = _Runner(subject, division, settings)
        runs.append(runner.measure(*made[batch][:2], shown))
    return _Passes(
        list(shown.order), shown.kinds(), shown, runs[0], runs[1], made[1][2], runner.element_bytes, placeholders
    )


def _inputs_for(inputs: ExampleInputs, batch: int, positions: int | None) -> tuple[Any, Any, int]:
    """(args, kwargs, positions of a sequence) with another batch and length than the example's.

    Dims of the size of the example's batch come first; the second dim of tokens [b, s], and of features [b, s, h] that
    were made up, is the sequence.
    """
    leaves = [leaf for leaf in tree_flatten((inputs.args, dict(inputs.kwargs)))[0] if isinstance(leaf, torch.Tensor)]
    sized = [leaf for leaf in leaves if leaf.dim() > 0]
    before = sized[0].shape[0] if sized else BATCH
    made_up = inputs.origin != "example_input_array"
    lengths = [
        leaf.shape[1]
        for leaf in sized
        if (leaf.dim() == 2 and not leaf.is_floating_point())
        or (leaf.dim() == 3 and made_up and leaf.shape[1] == POSITIONS)
    ]
    length = lengths[0] if lengths else None

    def changed(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.dim() == 0:
            return leaf
        shape = list(leaf.shape)
        if shape[0] == before:
            shape[0] = batch
        if positions and length and leaf.dim() > 1:
            shape[1:] = [positions if size == length and place < 3 else size for place, size in enumerate(shape[1:], 1)]
        return torch.empty(shape, dtype=leaf.dtype, device="meta")

    args, kwargs = tree_map(changed, (inputs.args, dict(inputs.kwargs)))
    return args, kwargs, (positions or length or 1) if length else 1


class _Bridge(torch.autograd.Function):
    """Stands for a block between what lies around it: its outputs depend on its inputs, at no cost."""

    @staticmethod
    def forward(context: Any, outputs: list[torch.Tensor], *inputs: torch.Tensor) -> Any:
        context.like = [(tensor.shape, tensor.dtype) for tensor in inputs]
        return tuple(outputs)

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        return (None, *(torch.empty(shape, dtype=dtype) for shape, dtype in context.like))


class _Runner:
    """Runs the model with one batch."""

    def __init__(self, subject: _Subject, division: _Division, settings: _Settings) -> None:
        self.subject, self.division, self.settings = subject, division, settings
        self.tape = Tape()
        self.before, self.after, self.loss = (_Span(Tally()) for _ in range(3))
        self.order: dict[str, None] = {}
        self.calls: list[str] = []
        self.tallies: dict[str, Tally] = {}
        self.shared: dict[str, set[int]] = {}
        """Block -> the places of the tensors among its arguments that other blocks are given, too."""
        self.alive: list[Any] = []
        self.stack: list[str] = []
        self.running = False
        self.element_bytes = 4

    # --- a first look: which blocks run when, and which run the same ---

    def look(self, args: Any, kwargs: Any) -> None:
        """Run everything once, without gradients."""
        given_to: dict[str, dict[int, int]] = {}
        received: dict[int, set[str]] = {}

        def block(name: str, module: nn.Module) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                if self.running:
                    return run_call(module, *args, **kwargs)
                self.order.setdefault(name)
                if self.calls:  # it was not what follows the last block
                    self.before.tally.matmuls += self.after.tally.matmuls
                    self.after.tally.matmuls.clear()
                self.calls.append(name)
                self.running = True
                self.tape.tally = self.tallies.setdefault(name, Tally())
                leaves, spec = tree_flatten((args, kwargs))
                for place, leaf in enumerate(leaves):
                    if isinstance(leaf, torch.Tensor):
                        self.alive.append(leaf)  # so that its memory is not another's later
                        received.setdefault(storage_key(leaf), set()).add(name)
                        given_to.setdefault(name, {})[place] = storage_key(leaf)
                self.tape.tally.operators.append(
                    (str(spec), *(leaf.shape if isinstance(leaf, torch.Tensor) else repr(leaf)[:80] for leaf in leaves))
                )
                output = run_call(module, *args, **kwargs)
                self.tape.tally = self.after.tally
                self.running = False
                return output

            return call

        with self._running(args, kwargs, block) as call, torch.no_grad():
            self.tape.tally = self.before.tally
            call()
        self.shared = {
            name: {place for place, key in places.items() if len(received[key]) > 1}
            for name, places in given_to.items()
        }
        self.alive.clear()

    def kinds(self) -> dict[str, str]:
        """Block -> the first block that runs the same operators on the same shapes, of the same class."""
        first: dict[Any, str] = {}
        found = {}
        for name in self.order:
            module = self.subject.blocks[name]
            shapes = tuple((own, tuple(parameter.shape)) for own, parameter in module.named_parameters())
            divided = tuple(self.division.dims.get(f"{name}.{own}") for own, _ in shapes)
            operators = tuple(self.tallies[name].operators)
            found[name] = first.setdefault((type(module), shapes, divided, operators), name)
        return found

    # --- with gradients ---

    def measure(self, args: Any, kwargs: Any, shown: _Runner) -> _Pass:
        """Run one block of each kind, and everything around the blocks, forward and backward."""
        tape, kind_of, last = self.tape, shown.kinds(), len(shown.calls)
        spans: dict[str, _Span] = {}
        made: dict[tuple[str, int], tuple[TreeSpec, list[Any]]] = {}
        turns: dict[str, int] = {}
        returned: set[int] = set()  # by the last block

        def block(name: str, module: nn.Module) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                if self.running:
                    return run_call(module, *args, **kwargs)
                if not self.calls:
                    self.before.end = len(tape.events)
                self.calls.append(name)
                self.running = True
                turn = turns[name] = turns.get(name, -1) + 1
                first = kind_of[name]
                leaves, spec = tree_flatten((args, kwargs))
                if name == first:
                    span = spans.setdefault(name, _Span(Tally()))
                    made[name, turn] = self._run_block(module, leaves, spec, span, shown.shared.get(name, set()))
                if len(self.calls) == last:
                    tape.tally = self.after.tally
                    self.after.begin = len(tape.events)
                self.running = False
                output = self._placeholder(leaves, *made[first, turn])
                if len(self.calls) == last:
                    returned.update(
                        storage_key(leaf) for leaf in tree_flatten(output)[0] if isinstance(leaf, torch.Tensor)
                    )
                return output

            return call

        with self._running(args, kwargs, block) as call:
            tape.tally = self.before.tally
            with torch.autograd.graph.saved_tensors_hooks(tape.pack, _as_it_is):
                output = call()
                self.after.end = self.loss.begin = len(tape.events)
                self.after.saved_input = any(key in self.after.tally.saved for key in returned)
                around = self.after if last else self.before
                around.end, around.kept = self.after.end, around.tally.saved_bytes()
                tape.tally = self.loss.tally
                value = default_loss(output) if self.settings.loss is None else self.settings.loss(output)
                held = self.loss.tally.saved_bytes()
                self.loss.kept = held[0] + around.kept[0], held[1] + around.kept[1]
            del output
            if value is not None and value.requires_grad:
                tape.backward = True
                value.backward()
            self.loss.end = len(tape.events)
        self.before.kept = self.before.tally.saved_bytes()
        return _Pass(tape, self.before, self.after, self.loss, spans)

    def _run_block(
        self, module: nn.Module, leaves: list[Any], spec: TreeSpec, span: _Span, shared: set[int]
    ) -> tuple[TreeSpec, list[Any]]:
        """Forward and backward of one block by itself; what it returned, as shapes."""
        tape = self.tape
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
        given, kwargs = tree_unflatten(own, spec)
        output = run_call(module, *given, **kwargs)
        outputs, output_spec = tree_flatten(output)
        results = [leaf for leaf in outputs if isinstance(leaf, torch.Tensor)]
        made = [value for key, value in span.tally.saved.items() if key not in inputs]
        span.kept = sum(size for size, _ in made), sum(size for size, divided in made if divided)
        for key in inputs.keys() - stream.keys() & span.tally.saved.keys():
            # Tables of positions and masks that many blocks are given are kept once: with what made them.
            if key in span.tally.saved:
                outer.saved.setdefault(key, span.tally.saved.pop(key))
        span.saved_input = any(key in span.tally.saved for key in stream)
        for key in {storage_key(leaf) for leaf in results} & span.tally.saved.keys() - inputs.keys():
            size, divided = span.tally.saved[key]
            span.saved_output = span.saved_output[0] + size, span.saved_output[1] + size * divided
        for key in stream.keys() & span.tally.saved.keys():
            self.before.tally.saved.pop(key, None)  # once is enough
        span.input, span.output = sum(stream.values()), sum(leaf.untyped_storage().nbytes() for leaf in results)
        if results:
            self.element_bytes = results[0].element_size()
        shapes = [
            (leaf.shape, leaf.stride(), leaf.dtype, leaf.requires_grad, tape.dim_of(leaf))
            if isinstance(leaf, torch.Tensor)
            else leaf
            for leaf in outputs
        ]
        differentiable = [leaf for leaf in results if leaf.requires_grad]
        del output, outputs, results
        if differentiable:
            tape.backward = True
            torch.autograd.backward(differentiable, [torch.empty_like(leaf) for leaf in differentiable])
            tape.backward = False
        del differentiable
        for leaf in (*tensors.values(), *module.parameters()):
            leaf.grad = None
        span.end = len(tape.events)
        tape.tally = outer
        return output_spec, shapes

    def _placeholder(self, leaves: list[Any], spec: TreeSpec, shapes: list[Any]) -> Any:
        """Tensors like those that a block returns, dependent on what it was given."""
        with self.tape.unheard():
            outputs = [
                torch.empty_strided(item[0], item[1], dtype=item[2]) if isinstance(item, tuple) else item
                for item in shapes
            ]
            for tensor, item in zip(outputs, shapes, strict=True):
                if isinstance(item, tuple) and item[4] is not None:
                    self.tape.divide(tensor, item[4])
            inputs = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
            places = [place for place, item in enumerate(shapes) if isinstance(item, tuple) and item[3]]
            if places and inputs:
                bridged = _Bridge.apply([outputs[place] for place in places], *inputs)
                for place, tensor in zip(places, bridged, strict=True):
                    outputs[place] = tensor
            elif places:
                for place in places:
                    outputs[place].requires_grad_()
        return tree_unflatten(outputs, spec)

    @contextmanager
    def _running(
        self, args: Any, kwargs: Any, block: Callable[[str, nn.Module], Callable[..., Any]]
    ) -> Iterator[Callable[[], Any]]:
        """The call of the model on shapes alone, with its blocks intercepted."""
        model, settings = self.subject.model, self.settings
        handles: list[Any] = []
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(devices=[]))
            stack.enter_context(fake_tensors())
            self.state = self._state()
            dtype = PRECISIONS[settings.precision][0]
            given, named = tree_map(lambda leaf: _input(leaf, dtype), (args, dict(kwargs)))
            self.alive += [given, named]
            stack.callback(lambda: [handle.remove() for handle in handles])
            for name, module in model.named_modules():
                if name:
                    handles.append(module.register_forward_pre_hook(self._begins(name)))
                    handles.append(module.register_forward_hook(self._ends))
            for name, module in self.subject.blocks.items():
                intercept_calls(module, block(name, module))
                stack.callback(intercept_calls, module, None)
            stack.enter_context(_default_dtype(dtype))
            stack.enter_context(functions_of(settings.device_type, self.tape, settings.autocast))
            stack.enter_context(self.tape)

            def call() -> Any:
                try:
                    return torch.func.functional_call(model, self.state, given, named)
                except Exception as error:
                    raise Untraceable(self.stack[-1] if self.stack else "", error) from error

            yield call

    def _begins(self, name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            self.stack.append(name)

        return hook

    def _ends(self, *_: Any) -> None:
        self.stack.pop()

    def _state(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers of the model without memory, in the types of the run."""
        wanted, state = self.settings.parameter_dtype, {}
        kept = {id(buffer) for module in self.subject.model.modules() for name, buffer in module._buffers.items()
                if name in module._non_persistent_buffers_set}  # fmt: skip
        converts = PRECISIONS[self.settings.precision][0] is not None
        for name, tensor in itertools.chain(self.subject.model.named_parameters(), self.subject.model.named_buffers()):
            parameter = isinstance(tensor, nn.Parameter)
            change = tensor.is_floating_point() and wanted is not None
            change = change and (parameter or (converts and id(tensor) not in kept))
            fake = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=wanted if change else tensor.dtype, device="cpu"
            ).requires_grad_(tensor.requires_grad)
            state[name] = fake
            self.tape.add_state(name, fake, self.division.dims.get(name))
        return state


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
        tensors = [leaf for leaf in tree_flatten(output)[0] if isinstance(leaf, torch.Tensor)]
        scores = next((leaf for leaf in tensors if leaf.requires_grad), None)
    if scores is None or not scores.requires_grad:
        return None
    if scores.dim() == 0:
        return scores
    if scores.dim() in (2, 3) and scores.shape[-1] > 1:
        target = torch.zeros(scores.shape[:-1].numel(), dtype=torch.int64, device=scores.device)
        return nn.functional.cross_entropy(scores.flatten(0, -2).float(), target)
    return scores.float().square().mean()


def _input(leaf: Any, dtype: torch.dtype | None) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    kind = dtype if dtype is not None and leaf.is_floating_point() else leaf.dtype
    return torch.empty(leaf.shape, dtype=kind, device="cpu")


@contextmanager
def _default_dtype(dtype: torch.dtype | None) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


# --- the profile --------------------------------------------------------------------------------------------------


@dataclass
class _Assembly:
    """What passes showed, put together."""

    subject: _Subject
    division: _Division
    passes: _Passes

    def profile(self, name: str) -> ModelProfile:
        shown, two, three = self.passes.shown, self.passes.two, self.passes.three
        own = self._own_parameters()
        before_names, shared = self._outside(own)
        firsts = list(dict.fromkeys(self.passes.kind_of.values()))
        inside = {self.subject.prefix + item for item in itertools.chain(before_names, *own.values())}
        after_names = [
            item.removeprefix(self.subject.prefix) for item, _ in self.subject.root.named_parameters()
            if item not in inside
        ]  # fmt: skip
        before = self._part("before", shown.before.tally, two.before, three.before, before_names)
        kinds = tuple(self._block(first, own[first]) for first in firsts)
        after = self._part("after", shown.after.tally, two.after, three.after, after_names)
        after = _with_loss(after, two.loss.tally, three.loss.tally)
        if firsts:  # scores are what the loss begins with
            missing = self._kept_by_nobody()
            after = dataclasses.replace(
                after,
                saved_bytes=after.saved_bytes + missing[0],
                sharded_saved_bytes=after.sharded_saved_bytes + missing[1],
                peak_bytes=0,
                sharded_peak_bytes=0,
            )
        # An embedding that is divided by the vocabulary costs an exchange in the forward pass alone, a head in the
        # backward pass: half of what one exchange in both costs.
        before = dataclasses.replace(
            before, exchange_bytes=before.exchange_bytes / 2, output_bytes=kinds[0].output_bytes if kinds else 0
        )
        given = [
            item.rows * item.inner * self.passes.element_bytes for item in after.matmuls if item.divided == "columns"
        ]
        if given and not after.exchanges:
            after = dataclasses.replace(after, exchanges=len(given), exchange_bytes=sum(given) / len(given) / 2)
        begins = [item.after.begin if firsts else item.before.begin for item in (two, three)]
        loss = _peak(
            [(begin, item.loss.begin, item.loss.end) for begin, item in zip(begins, (two, three), strict=True)],
            (two, three),
            _minus(three.loss.kept, two.loss.kept),
        )
        counts = [count for span in two.kinds.values() for count in span.tally.heads]
        heads = math.gcd(*counts) if counts else None
        return ModelProfile(
            name=name,
            positions=self.passes.positions,
            before=before,
            kinds=kinds,
            blocks=tuple(firsts.index(self.passes.kind_of[block]) for block in self.passes.order),
            block_names=tuple(self.passes.order),
            after=after,
            loss_bytes=loss[0],
            sharded_loss_bytes=loss[1],
            shared_parameters=shared,
            element_bytes=self.passes.element_bytes,
            mp_sizes=self._mp_sizes(),
            heads=heads,
            refused=self._refused(heads),
        )

    # --- parameters ---

    def _own_parameters(self) -> dict[str, list[str]]:
        """Block that runs -> its parameters, by their names in the model."""
        return {
            name: [f"{name}.{own}" for own, _ in self.subject.blocks[name].named_parameters()]
            for name in self.passes.order
        }

    def _outside(self, own: Mapping[str, list[str]]) -> tuple[list[str], int]:
        """(parameters of what runs before the blocks, elements of those that what runs after them uses, too)."""
        inside = {parameter for names in own.values() for parameter in names}
        two, names, shared = self.passes.two, [], 0
        for name, parameter in self.subject.model.named_parameters():
            users = two.tape.used.get(name, ())
            if name in inside or not any(user is two.before.tally for user in users):
                continue
            names.append(name)
            shared += parameter.numel() if any(user is two.after.tally for user in users) else 0
        return names, shared

    def _counts(self, names: Sequence[str]) -> tuple[int, int]:
        """(elements of parameters, of which divided)."""
        sizes = {name: item.numel() for name, item in self.subject.root.named_parameters()}
        known = {name: sizes.get(self.subject.prefix + name, sizes.get(name, 0)) for name in names}
        return sum(known.values()), sum(size for name, size in known.items() if name in self.division.dims)

    # --- parts ---

    def _block(self, first: str, names: Sequence[str]) -> Part:
        two, three = self.passes.two.kinds[first], self.passes.three.kinds[first]
        part = self._part(
            type(self.subject.blocks[first]).__name__, self.passes.shown.tallies[first], two, three, names
        )
        selective = _minus(three.tally.selective, two.tally.selective)
        twice = self._kept_twice(first)
        return dataclasses.replace(
            part,
            matmuls=(*part.matmuls, *self._replaced_products(first)),
            saved_bytes=part.saved_bytes - twice[0],
            sharded_saved_bytes=part.sharded_saved_bytes - twice[1],
            selective_bytes=selective[0] + three.input - two.input,
            sharded_selective_bytes=selective[1],
            output_bytes=three.output - two.output,
        )

    def _kept_twice(self, first: str) -> tuple[float, float]:
        """What a block of this kind returns and keeps itself, if what follows the first of them keeps it as well."""
        if not self._is_kept_behind(self.passes.order.index(first)):
            return 0.0, 0.0
        return _minus(self.passes.three.kinds[first].saved_output, self.passes.two.kinds[first].saved_output)

    def _kept_by_nobody(self) -> tuple[float, float]:
        """What was taken to be kept by whoever follows a block, where that one does not."""
        whole = divided = 0.0
        for place, name in enumerate(self.passes.order):
            if not self._is_kept_behind(place):
                twice = self._kept_twice(self.passes.kind_of[name])
                whole, divided = whole + twice[0], divided + twice[1]
        return whole, divided

    def _is_kept_behind(self, place: int) -> bool:
        """Whether what follows block number `place` keeps what it is given."""
        if place + 1 == len(self.passes.order):
            return self.passes.two.after.saved_input
        return self.passes.two.kinds[self.passes.kind_of[self.passes.order[place + 1]]].saved_input

    def _part(self, name: str, shown: Tally, two: _Span, three: _Span, names: Sequence[str]) -> Part:
        parameters, sharded_parameters = self._counts(names)
        less, more = two.tally, three.tally
        moved = _minus(more.moved, less.moved)
        saved = _minus(more.saved_bytes(), less.saved_bytes())
        peak = _peak(
            [(two.begin, two.begin, two.end), (three.begin, three.begin, three.end)],
            (self.passes.two, self.passes.three),
            _minus(three.kept, two.kept),
        )
        matmuls, attention = _calls(shown, less)
        return Part(
            name=name,
            parameters=parameters,
            sharded_parameters=sharded_parameters,
            matmuls=matmuls,
            attention=attention,
            moved_bytes=moved[0],
            sharded_moved_bytes=moved[1],
            kernels=less.kernels[0],
            sharded_kernels=less.kernels[1],
            saved_bytes=saved[0],
            sharded_saved_bytes=saved[1],
            gathered_saved_bytes=more.gathered_bytes() - less.gathered_bytes(),
            peak_bytes=peak[0],
            sharded_peak_bytes=peak[1],
            exchanges=less.exchanges,
            exchange_bytes=(more.exchanged - less.exchanged) / less.exchanges if less.exchanges else 0.0,
        )

    def _replaced_products(self, block: str) -> Iterator[MatMul]:
        """Products of the parts of a block that can't run on shapes alone, such as experts that ask who has tokens.

        An approximation: every matrix [.., out, in] is taken to meet all positions once, or the share of them that
        the attributes of the part tell (experts per token among all). Their saved bytes are not known.
        """
        for name in self.passes.replaced:
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
                    yield MatMul(self.passes.positions, inner, columns, parameter.shape[:-2].numel() * share)

    # --- what fits ---

    def _mp_sizes(self) -> tuple[int, ...]:
        sizes = set(self.passes.two.tape.head_counts)
        modules = {f"{block}." for block in self.passes.order}
        for name, parameter in self.subject.model.named_parameters():
            dim = self.division.dims.get(name)
            if dim is not None and parameter.dim() > 1 and any(name.startswith(block) for block in modules):
                sizes.add(parameter.shape[dim])
        return tuple(sorted(sizes))

    def _refused(self, heads: int | None) -> dict[str, str]:
        found = {}
        if self.division.refused:
            found["mp"] = self.division.refused
        if not self.passes.order:
            found["pp"] = "it has no repeated blocks, so nothing says where to cut"
            found["cp"] = "it has no repeated blocks whose sequences could be divided"
        elif heads is None:
            found["cp"] = "none of its blocks calls scaled_dot_product_attention, so positions can't be divided"
        return found


def _first_number(holders: Sequence[Any], names: Sequence[str]) -> int | None:
    values = (getattr(holder, name, None) for holder in holders for name in names)
    return next((value for value in values if isinstance(value, int) and value > 0), None)


def _calls(tally: Tally, several: Tally) -> tuple[tuple[MatMul, ...], Attention | None]:
    """(products, equal ones counted; the kind of fused attention, other kinds as products).

    Args:
        tally: of one sequence.
        several: of the same with several sequences: what mp divides may depend on that, since heads that are joined
            with a batch of one are a dim of their own.
    """
    found: dict[MatMul, float] = {}
    alike = len(tally.matmuls) == len(several.matmuls)
    for place, item in enumerate(tally.matmuls):
        key = dataclasses.replace(item, count=1, divided=several.matmuls[place].divided if alike else item.divided)
        found[key] = found.get(key, 0) + item.count
    calls: dict[Attention, int] = {}
    for call, _ in tally.attention:
        key_ = dataclasses.replace(call, count=1)
        calls[key_] = calls.get(key_, 0) + call.count
    attention: Attention | None = None
    for call, count in calls.items():
        if attention is None:
            attention = dataclasses.replace(call, count=count)
            continue
        rows = call.positions / 2 if call.causal else call.positions
        which = "count" if any(divided for _, divided in tally.attention) else ""
        for shape in ((call.head_dim, int(rows)), (int(rows), call.head_dim)):
            key = MatMul(call.positions, *shape, 1, which)
            found[key] = found.get(key, 0) + call.heads * count
    return tuple(dataclasses.replace(key, count=count) for key, count in found.items()), attention


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
    )


def _minus(left: Sequence[float], right: Sequence[float]) -> tuple[float, float]:
    return left[0] - right[0], left[1] - right[1]


def _peak(
    stretches: Sequence[tuple[int, int, int]], passes: tuple[_Pass, _Pass], kept: tuple[float, float]
) -> tuple[float, float]:
    """(most bytes of one sequence that are alive at one moment beyond `kept`, the share of it that mp divides).

    Args:
        stretches: per pass (where to count from, from where the moment may be, end), as places in the tape's events.
    """
    (begin, after, end), (other_begin, other_after, other_end) = stretches
    two, three = passes[0].tape.events[begin:end], passes[1].tape.events[other_begin:other_end]
    aligned = len(two) == len(three) and after - begin == other_after - other_begin
    if aligned:
        changes = [(second[0] - first[0], second[1], second[2]) for first, second in zip(two, three, strict=True)]
    else:  # another order of events: then a third of what three sequences take
        changes = [(size // 3, divided, born) for size, divided, born in three]
    ahead = other_after - other_begin
    alive = sharded_alive = most = share = 0.0
    for place, (size, is_divided, born) in enumerate(changes):
        if born < other_begin:  # freed here, but not made here
            continue
        alive += size
        sharded_alive += size if is_divided else 0.0
        if place >= ahead and alive > most:
            most, share = alive, sharded_alive
    most = max(0.0, most - kept[0])
    return most, min(most, max(0.0, share - kept[1]))
