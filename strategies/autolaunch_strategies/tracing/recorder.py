"""A model's forward pass on shapes alone, shown to observers module by module and operator by operator."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from autolaunch_strategies.torch_private.calls import intercept_calls, run_call
from autolaunch_strategies.torch_private.fake_results import ASKS_DEVICE
from autolaunch_strategies.torch_private.tracing import has_no_values, writes_to
from autolaunch_strategies.tracing.tensors import Labels
from autolaunch_strategies.tracing.values import ASKS_VALUE, SAY_THAT_SOMETHING_IS_WRONG, healthy_value


class Untraceable(Exception):
    """A forward pass on shapes alone failed: `error`, inside of which module (empty: the model itself)."""

    def __init__(self, inside: str, error: Exception) -> None:
        super().__init__(inside)
        self.inside, self.error = inside, error


@dataclass(slots=True)
class Operation:
    """One operator that has run."""

    operator: Any
    """The `OpOverload`."""
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    output: Any
    inputs: list[torch.Tensor]
    """The tensors among its arguments, in order."""
    outputs: list[torch.Tensor]
    """The tensors that it returned."""
    written: list[torch.Tensor]
    """Those of its arguments that it changed in place."""
    module: nn.Module
    """The innermost module that is running."""

    @property
    def name(self) -> str:
        """Of the operator, without its overload."""
        return self.operator.overloadpacket.__name__


class Observer:
    """Is shown what runs. Does nothing by itself."""

    def module_begins(self, name: str, module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        """A module is called; the outermost one is not shown."""

    def module_ends(self, name: str, module: nn.Module, output: Any) -> None:
        """The call of a module ends."""

    def operator(self, operation: Operation) -> None:
        """An operator has run, in the forward pass or in a backward pass."""


class Recorder(TorchDispatchMode):
    """Shows observers what runs of `model` within `watching`.

    Questions about tensors (`prim` operators: their device, their type) are more than half of all calls, and not shown.

    Args:
        fakes: `OpOverloadPacket` -> what computes its output in its place.
        answers: values that the code of `model` itself asks for are those of where nothing is wrong, as in a step that
            logs its loss; else it can't be run. Those that its parts ask for decide what is computed.
    """

    def __init__(
        self,
        model: nn.Module,
        observers: Sequence[Observer],
        fakes: Mapping[Any, Callable[..., Any]] | None = None,
        answers: bool = False,
    ) -> None:
        super().__init__()
        self._truths = Labels[str]() if answers else None
        self.model, self.observers, self.fakes = model, observers, fakes or {}
        self._running: list[tuple[str, nn.Module]] = [("", model)]

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within it every module of the model and every operator are shown, those behind `call` included."""
        with ExitStack() as stack:
            for name, module in self.model.named_modules():
                if name:
                    # One hook of each kind: `pipeline.record` counts on it.
                    begins = module.register_forward_pre_hook(self._begins(name), with_kwargs=True)
                    ends = module.register_forward_hook(self._ends(name))
                    stack.callback(begins.remove)
                    stack.callback(ends.remove)
            stack.enter_context(self)
            yield

    def call(self, state: Mapping[str, torch.Tensor], args: Any, kwargs: Mapping[str, Any]) -> Any:
        """What the model returns with `state` in place of its parameters and buffers.

        Raises:
            Untraceable: it failed, and where.
        """
        return self.run(lambda: torch.func.functional_call(self.model, dict(state), args, dict(kwargs)))

    def run(self, function: Callable[[], Any]) -> Any:
        """What `function` returns, which calls the model or parts of it on fake tensors.

        Raises:
            Untraceable: it failed, and where.
        """
        try:
            return function()
        except Exception as error:
            raise Untraceable(self._running[-1][0], error) from error

    def _begins(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._running.append((name, module))
            for observer in self.observers:
                observer.module_begins(name, module, args, kwargs)

        return hook

    def _ends(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            self._running.pop()
            for observer in self.observers:
                observer.module_ends(name, module, output)

        return hook

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is ASKS_DEVICE and has_no_values(args[0]):
            return args[0].device
        kwargs = kwargs or {}
        if self._truths is not None and func.overloadpacket is ASKS_VALUE and len(self._running) == 1:
            return healthy_value(args[0], bool(self._truths.of(args[0])))
        output = self.fakes.get(func.overloadpacket, func)(*args, **kwargs)
        if func.namespace == "prim":
            return output
        written: list[torch.Tensor] = []
        if names := writes_to(func):
            by_name = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
            written = _tensors_among(by_name.get(name) for name in names)
        inputs, outputs = _tensors_among((*args, *kwargs.values())), _tensors_among((output,))
        operation = Operation(func, args, kwargs, output, inputs, outputs, written, self._running[-1][1])
        if self._truths is not None and func.overloadpacket in SAY_THAT_SOMETHING_IS_WRONG:
            for tensor in outputs:
                self._truths.add(tensor, frozenset({"wrong"}))
        for observer in self.observers:
            observer.operator(operation)
        return output


def _tensors_among(values: Iterable[Any]) -> list[torch.Tensor]:
    """As `tensors_in`, for operators: they know lists only, and flattening anything takes as long as the operator."""
    tensors: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        elif isinstance(value, list | tuple):
            tensors += _tensors_among(value)
    return tensors


@contextmanager
def parts_intercepted(
    parts: Mapping[str, nn.Module], handler: Callable[[str, nn.Module, Any, Mapping[str, Any]], Any]
) -> Iterator[None]:
    """Within it calls of `parts` return what `handler(name, module, args, kwargs)` returns.

    While it runs, calls of other parts are what they always are. `run_call(module, ...)` is what the call would be.
    """
    handling = False

    def intercept(name: str, module: nn.Module) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal handling
            if handling:
                return run_call(module, *args, **kwargs)
            handling = True
            try:
                return handler(name, module, args, kwargs)
            finally:
                handling = False

        return call

    try:
        for name, module in parts.items():
            intercept_calls(module, intercept(name, module))
        yield
    finally:
        for module in parts.values():
            intercept_calls(module, None)
