"""One forward pass of a model without memory or data, written down: which linear layer's output feeds which.

Parameters are stood in for by fake tensors that have shapes only, so the model may be on meta or real, and of any size.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from autolaunch_strategies.config import ConfigError
from autolaunch_strategies.model.example_inputs import ExampleInputs, example_inputs
from autolaunch_strategies.torch_private.tracing import fake_tensors, storage_key, writes_to

Names = frozenset[str]
Result = TypeVar("Result")
_NONE: Names = frozenset()
_KNOWN_TO_WORK = frozenset(
    {
        "_fused_rms_norm", "_log_softmax", "_safe_softmax", "_softmax", "_to_copy", "_unsafe_view", "addmm", "amax",
        "amin", "argmax", "baddbmm", "bernoulli", "bernoulli_", "bmm", "cat", "clone", "copy_", "device", "embedding",
        "empty_like", "full_like", "index", "index_select", "logsumexp", "max", "mean", "min", "mm", "native_dropout",
        "native_layer_norm", "new_empty", "new_zeros", "ones_like", "rand_like", "repeat", "repeat_interleave",
        "select", "split", "split_with_sizes", "stack", "std", "sum", "var", "var_mean", "zeros_like",
    }
)  # fmt: skip
"""Operators, next to elementwise ones, views and attention, that sharded tensors go through rightly and well."""
_MOST_PLACEHOLDERS = 8


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

    def consumers(self, name: str) -> Names:
        """The linear layers that `name` feeds."""
        return frozenset(other for other, sources in self.sources.items() if name in sources)


def is_linear(module: nn.Module) -> bool:
    """A linear layer that styles know: torch's, or `transformers`' Conv1D."""
    return isinstance(module, nn.Linear) or (type(module).__name__ == "Conv1D" and hasattr(module, "nf"))


def features(module: nn.Module) -> tuple[int, int]:
    """(inputs, outputs) of a linear layer."""
    weight: Any = module.weight
    return (weight.shape[1], weight.shape[0]) if isinstance(module, nn.Linear) else (weight.shape[0], weight.shape[1])


def trace(model: nn.Module, example: Any = None) -> Trace:
    """Run `model` once on shapes alone. It is left as it was.

    Args:
        example: inputs that the user names.

    Raises:
        ConfigError: no inputs are known with which it runs.
    """
    tried = []
    for inputs in example_inputs(model, example):
        try:
            return _trace_with(model, inputs)
        except Exception as error:  # whatever a model's forward may raise: other inputs may do
            first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
            tried.append(f"{inputs.origin}: {first_line[:160]}")
    raise ConfigError(
        "mp",
        f"no plan can be derived for {type(model).__name__}: its forward does not run on any inputs that were tried"
        + "".join(f"\n    {line}" for line in tried),
        "a model whose forward runs on `example_input_array` (an attribute of the module), or a plan of your own",
        "mp.base=none and mp.plan",
    )


def _trace_with(model: nn.Module, inputs: ExampleInputs) -> Trace:
    def attempt(placeholders: Mapping[str, str]) -> Trace:
        recorder = _Recorder(model, inputs)
        try:
            recorder.run()
        except Exception as error:
            raise Untraceable(recorder.inside, error) from error
        recorder.trace.untraceable = dict(placeholders)
        return recorder.trace

    return stepping_over(model, attempt)


class Untraceable(Exception):
    """A forward pass on shapes alone failed: `error`, inside of which module."""

    def __init__(self, inside: str, error: Exception) -> None:
        super().__init__(inside)
        self.inside, self.error = inside, error


def stepping_over(model: nn.Module, attempt: Callable[[Mapping[str, str]], Result]) -> Result:
    """What `attempt` returns, with every part of `model` that looks at values replaced by its first input.

    Such as a mixture of experts that asks which expert has tokens.

    Args:
        attempt: runs the model once, is told what is replaced and why, and raises `Untraceable`.
    """
    placeholders: dict[str, str] = {}
    first_error: Exception | None = None
    while True:
        try:
            with _attributes_kept(model), _with_placeholders(model, placeholders):
                return attempt(placeholders)
        except Untraceable as failure:
            first_error = first_error or failure.error
            within = failure.inside
            kind = type(model.get_submodule(within))
            of_torch = kind.__module__.startswith("torch.nn.")  # then it is what it was given that is wrong
            if (
                not within
                or of_torch
                or within in placeholders
                or len(set(placeholders.values())) == _MOST_PLACEHOLDERS
            ):
                raise first_error from None
            first_line = (str(failure.error).strip() or type(failure.error).__name__).splitlines()[0]
            placeholders |= {name: first_line for name, module in model.named_modules() if type(module) is kind}


@contextmanager
def _attributes_kept(model: nn.Module) -> Iterator[None]:
    """Put back afterwards what modules keep of a call (a cached mask): it would be a tensor without values."""
    kinds = (dict, OrderedDict, list, set)
    before = [(module.__dict__, dict(module.__dict__)) for module in model.modules()]
    contents = [(item, item.copy()) for _, own in before for item in own.values() if type(item) in kinds]
    try:
        yield
    finally:
        for now, then in (*before, *contents):
            now.clear()
            if isinstance(now, list):
                now.extend(then)
            else:
                now.update(then)


@contextmanager
def _with_placeholders(model: nn.Module, names: Mapping[str, str]) -> Iterator[None]:
    modules = [model.get_submodule(name) for name in names]
    before = [module.__dict__.get("forward") for module in modules]
    for module in modules:
        module.forward = _first_input
    try:
        yield
    finally:
        for module, forward in zip(modules, before, strict=True):
            if forward is None:
                del module.forward
            else:
                module.forward = forward


class _Recorder(TorchDispatchMode):
    def __init__(self, model: nn.Module, inputs: ExampleInputs) -> None:
        super().__init__()
        self.model, self.inputs = model, inputs
        self.trace = Trace(inputs)
        self.stack: list[str] = []
        self.origins: dict[int, Names] = {}  # memory -> the linear layers whose output is in it
        self.alive: list[torch.Tensor] = []  # keeps the keys of memory unique
        self.quiet = False

    @property
    def inside(self) -> str:
        """The innermost module that is running (empty: the model itself)."""
        return self.stack[-1] if self.stack else ""

    def run(self) -> None:
        with ExitStack() as stack:
            stack.enter_context(fake_tensors())
            tensors = [*self.model.named_parameters(), *self.model.named_buffers()]
            state = {name: _like(tensor) for name, tensor in tensors}
            args, kwargs = tree_map(
                lambda leaf: _like(leaf) if isinstance(leaf, torch.Tensor) else leaf,
                (self.inputs.args, dict(self.inputs.kwargs)),
            )
            first = next(leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, torch.Tensor))
            self.trace.batch = first.shape[0]
            stack.enter_context(self._hooks())
            stack.enter_context(_random_state_kept())
            stack.enter_context(self)
            torch.func.functional_call(self.model, state, args, kwargs)

    @contextmanager
    def _hooks(self) -> Iterator[None]:
        handles = []
        try:
            for name, module in self.model.named_modules():
                if not name:
                    continue
                handles.append(module.register_forward_pre_hook(self._begins(name), with_kwargs=True))
                handles.append(module.register_forward_hook(self._ends(name), with_kwargs=True))
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _begins(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            given = first_changed(args, kwargs)
            if name in self.trace.calls:
                self.trace.calls[name].times += 1
            else:
                integer = given is not None and not given.is_floating_point()
                self.trace.calls[name] = Call(name, len(self.trace.calls), given, None, integer)
            if is_linear(module):
                self.trace.sources[name] = self.trace.sources.get(name, _NONE) | self._of(given)
            self.stack.append(name)

        return hook

    def _ends(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            self.stack.pop()
            made = first_tensor(output)
            if made is None:
                return
            self.alive.append(made)
            if is_linear(module):
                self.origins[storage_key(made)] = frozenset({name})
            call = self.trace.calls[name]
            call.output = made if call.output is None else call.output
            self.trace.reaching[name] = self.trace.reaching.get(name, _NONE) | self._of(made)

        return hook

    def _of(self, tensor: torch.Tensor | None) -> Names:
        return _NONE if tensor is None else self.origins.get(storage_key(tensor), _NONE)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        given = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, torch.Tensor)]
        origin = _NONE.union(*(self._of(tensor) for tensor in given))
        changed = [leaf for leaf in tree_flatten(output)[0] if isinstance(leaf, torch.Tensor)]
        if names := writes_to(func):
            by_name = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
            changed += [
                leaf for name in names for leaf in tree_flatten(by_name.get(name))[0] if isinstance(leaf, torch.Tensor)
            ]
        self.alive += changed
        for tensor in changed:
            self.origins[storage_key(tensor)] = origin | self._of(tensor)
        if origin and not _known_to_work(func) and not is_linear(self.model.get_submodule(self.inside)):
            for name in origin:
                self.trace.operators.setdefault(name, set()).add(func.overloadpacket.__name__)
        if len(given) == 1 and len(origin) == 1 and len(changed) == 1:
            parts = _split_of_last_dim(given[0].shape, changed[0].shape)
            if parts:
                self.trace.splits.setdefault(next(iter(origin)), set()).add(parts)
        return output


def _known_to_work(operator: Any) -> bool:
    name = operator.overloadpacket.__name__
    return (
        name in _KNOWN_TO_WORK
        or getattr(operator, "is_view", False)
        or torch.Tag.pointwise in operator.tags
        or name.startswith("_scaled_dot_product")
    )


def first_tensor(value: Any) -> torch.Tensor | None:
    """The tensor in a module's output that styles change: as `styles.base.change_first_output`."""
    if isinstance(value, torch.Tensor):
        return value
    values = value.values() if isinstance(value, Mapping) else value if isinstance(value, tuple | list) else ()
    return next((item for item in values if isinstance(item, torch.Tensor)), None)


def first_changed(args: Any, kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """The tensor among a module's arguments that styles change: as `styles.base.change_first_input`."""
    positional = next((value for value in args if isinstance(value, torch.Tensor)), None)
    if positional is not None:
        return positional
    tensors = [value for value in kwargs.values() if isinstance(value, torch.Tensor)]
    return next((value for value in tensors if value.is_floating_point()), tensors[0] if tensors else None)


def _first_input(*args: Any, **kwargs: Any) -> Any:
    given = first_changed(args, kwargs)
    assert given is not None, "a module without tensors among its arguments"
    return given.clone()


def _like(tensor: torch.Tensor) -> torch.Tensor:
    fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    return fake.requires_grad_(tensor.requires_grad)


def _split_of_last_dim(before: torch.Size, after: torch.Size) -> tuple[int, ...]:
    """(heads, size) if a view takes [..., heads * size] to [..., heads, size], with two parts or more; else ()."""
    prefix = len(before) - 1
    if len(after) < len(before) + 1 or before[:-1] != after[:prefix]:
        return ()
    parts = tuple(after[prefix:])
    return parts if torch.Size(parts).numel() == before[-1] else ()


@contextmanager
def _random_state_kept() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        yield
