"""A method of a module on shapes alone that calls its parts: what they are called with is seen, whatever it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from autolaunch_strategies.tracing.shapes import fake_like, fake_state, on_shapes_alone
from autolaunch_strategies.tracing.state import attributes_kept


@dataclass(frozen=True)
class Step:
    """What can be done once with a module (a LightningModule), and in words where that comes from."""

    origin: str
    root: nn.Module
    run: Callable[..., Any]
    """Does it, given `arguments` without values; whatever else it reaches is what `around` leaves there."""
    arguments: Callable[[], tuple[tuple[Any, ...], Mapping[str, Any]]]
    """By position, by name. May raise whatever keeps them from being known."""
    around: Callable[[], AbstractContextManager[Any]] = nullcontext

    @contextmanager
    def on_shapes(self) -> Iterator[Callable[[], Any]]:
        """Gives what does it on fake tensors, the parameters of `root` included. Nothing is left changed."""
        from lightning_utilities.core.apply_func import apply_to_collection

        given = self.arguments()
        with on_shapes_alone(), attributes_kept(self.root):
            # Batches are of more types than calls: dataclasses, or mappings such as `transformers`' BatchEncoding.
            args, kwargs = apply_to_collection(given, torch.Tensor, fake_like)
            state = fake_state(self.root)

            def run() -> Any:
                with self.as_forward():  # parameters can be replaced in calls only
                    return torch.func.functional_call(self.root, state, args, kwargs)

            yield run

    @contextmanager
    def as_forward(self) -> Iterator[None]:
        """Within it a call of `root` runs the step, in which calls of `root` are what they always are."""
        attributes = self.root.__dict__
        own = attributes.get("forward")

        def run(*args: Any, **kwargs: Any) -> Any:
            restore()
            try:
                with self.around():
                    return self.run(*args, **kwargs)
            finally:
                attributes["forward"] = run

        def restore() -> None:
            attributes.pop("forward", None)
            if own is not None:
                attributes["forward"] = own

        attributes["forward"] = run
        try:
            yield
        finally:
            restore()


class NotCalled(LookupError):
    """A step calls other modules than the one that was asked for: `parts` of it, or nothing of it."""

    def __init__(self, parts: Sequence[str]) -> None:
        super().__init__(parts)
        self.parts = parts

    def __str__(self) -> str:
        if not self.parts:
            return "it does not call it"
        return f"it does not call it, but parts of it by themselves ({', '.join(self.parts)})"


@dataclass
class Calls:
    """What a step calls, each with what it is called with first."""

    first: dict[nn.Module, tuple[Any, Mapping[str, Any]]] = field(default_factory=dict)
    outermost: list[str] = field(default_factory=list)
    """Modules with parameters that no other one calls, by name ("" for the root), each once."""
    error: Exception | None = None
    """What the step raised."""

    def arguments(self, module: nn.Module) -> tuple[Any, dict[str, Any]]:
        """What it calls `module` with first: tensors on meta.

        Raises:
            NotCalled: it calls other modules only.
            Exception: what it raised before it called the module.
        """
        if module in self.first:
            args, kwargs = tree_map(_on_meta, self.first[module])
            return args, dict(kwargs)
        parts = [name for name, part in module.named_modules() if name and part in self.first]
        if self.error is not None and not parts:
            raise self.error
        raise NotCalled(_outermost(parts))


def calls_in(step: Step) -> Calls:
    """What `step` calls; what it raises behind a call does not matter: a loss that looks at values, a logger.

    Nothing is left changed.
    """
    calls = Calls()
    running = -1  # the root, which the step itself is

    def begins(name: str, has_parameters: bool) -> Callable[..., None]:
        def hook(part: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
            nonlocal running
            if running >= 0:
                calls.first.setdefault(part, (args, kwargs))
            if running == 0 and has_parameters and name not in calls.outermost:
                calls.outermost.append(name)
            running += has_parameters

        return hook

    def ends(*_: Any) -> None:
        nonlocal running
        running -= 1

    with step.on_shapes() as run, ExitStack() as hooks:
        for name, part in step.root.named_modules():
            has_parameters = part is step.root or next(part.parameters(), None) is not None
            begin = begins(name, has_parameters)
            hooks.callback(part.register_forward_pre_hook(begin, with_kwargs=True, prepend=True).remove)
            if has_parameters:
                hooks.callback(part.register_forward_hook(ends, always_call=True).remove)
        try:
            run()
        except Exception as error:
            calls.error = error
    return calls


def arguments_in(step: Step, module: nn.Module) -> tuple[Any, dict[str, Any]]:
    """What `step` calls `module` with first: tensors on meta. Nothing is left changed.

    Raises:
        NotCalled: it calls other modules only.
        Exception: what it raised before it called the module.
    """
    return calls_in(step).arguments(module)


def _outermost(names: Sequence[str]) -> list[str]:
    return [name for name in names if not any(name.startswith(f"{other}.") for other in names)]


def _on_meta(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    meta = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")
    return meta.requires_grad_(leaf.requires_grad)
