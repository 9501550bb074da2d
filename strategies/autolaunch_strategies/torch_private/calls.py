"""Calls of modules and their hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

INTERCEPTING = ("_compiled_call_impl", "forward")
"""Attributes of a module that say what a call of it does."""


def intercept_calls(module: nn.Module, handler: Callable[..., Any] | None) -> None:
    """Let `module(...)` call `handler(...)` instead, on this one object; None ends it.

    `run_call` is then what the call would have done.
    """
    if handler is None:
        module.__dict__.pop("_compiled_call_impl", None)
    else:
        module.__dict__["_compiled_call_impl"] = handler


def intercepted(module: nn.Module) -> Callable[..., Any] | None:
    """What stands in the place where `intercept_calls` puts its handler (`module.compile()` uses it, too)."""
    return module.__dict__.get("_compiled_call_impl")


def run_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """What `module(...)` does, hooks included, even if its calls are intercepted."""
    return module._call_impl(*args, **kwargs)


@contextmanager
def no_weak_references(module: nn.Module) -> Iterator[None]:
    """Within it recurrent layers of `module` have no weak references to their weights: those can be swapped."""
    layers = [part for part in module.modules() if isinstance(part, nn.RNNBase)]
    for layer in layers:
        layer._flat_weight_refs = []
    try:
        yield
    finally:
        for layer in layers:
            layer._init_flat_weights()


@contextmanager
def forward_restored(module: nn.Module) -> Iterator[None]:
    """Afterwards `module.forward` is what it was before."""
    own = module.__dict__.get("forward")
    try:
        yield
    finally:
        if own is None:
            module.__dict__.pop("forward", None)
        else:
            module.forward = own


def with_forward_hooks(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Those of some modules of which someone is shown what they return."""
    return [module for module in modules if module._forward_hooks]


def has_hooks(module: nn.Module) -> bool:
    """Whether someone is shown, or changes, what `module` is called with or returns."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""Attributes of modules with what is called around their calls."""


def has_forward_hooks(module: nn.Module, besides: int = 0) -> bool:
    """Whether someone is shown what `module` returns, not counting `besides` hooks."""
    return len(module._forward_hooks) > besides


def show_output(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
    """Show the forward hooks of `module` an output as if it had been called; what they return does not count."""
    for key, hook in list(module._forward_hooks.items()):
        if key in module._forward_hooks_with_kwargs:
            hook(module, args, kwargs, output)
        else:
            hook(module, args, output)


def is_compiled(module: nn.Module) -> bool:
    """Whether `torch.compile(module)` made this module."""
    from torch._dynamo import OptimizedModule

    return isinstance(module, OptimizedModule)


def change_forward_hooks(module: nn.Module, change: Callable[[Callable], Callable | None]) -> None:
    """Put what `change` returns in the place of each hook on the output of `module`; None leaves it."""
    for key, hook in module._forward_hooks.items():
        changed = change(hook)
        if changed is not None:
            module._forward_hooks[key] = changed
