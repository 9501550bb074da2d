"""Hooks of a LightningModule that run on every stage, and log what they log on the last one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden

from autolaunch_strategies.lightning.replacement import itself
from autolaunch_strategies.pipeline.failure import StageFailedError

_LOOPS = ("train", "validation", "test", "predict")


COLLECTING_HOOKS = tuple(f"on_{loop}_{moment}_end" for loop in _LOOPS for moment in ("batch", "epoch"))
"""Hooks that read what steps left behind, which is complete on the last stage only."""


OTHER_HOOKS = (
    *(f"on_{loop}_{moment}start" for loop in _LOOPS[:3] for moment in ("", "epoch_", "batch_")),
    "on_before_backward",
    "on_after_backward",
    "on_before_zero_grad",
    "on_before_optimizer_step",
    "configure_gradient_clipping",
)
"""Further hooks that may log and in which no step runs."""


def gradients_are_read(module: pl.LightningModule) -> bool:
    """Whether anything may look at the gradients of the step before when lightning is about to set them to zero."""
    hooks = ("optimizer_zero_grad", "on_before_zero_grad")
    if any(is_overridden(hook, module, parent=pl.LightningModule) for hook in hooks):
        return True
    callbacks: Any = module.trainer.callbacks  # type: ignore[attr-defined]  # set by a connector, not by the class
    return any(_acts(callback, "on_before_zero_grad") for callback in callbacks)


def _acts(callback: pl.Callback, hook: str) -> bool:
    """Whether a callback has this hook; a `LambdaCallback` keeps those that it was given on itself."""
    return hook in vars(callback) or is_overridden(hook, callback, parent=pl.Callback)


class Relay(Protocol):
    """What a hook needs to log on every rank what it logs on the last stage; see `relay.StageRelay`."""

    is_last: bool
    device: torch.device

    @property
    def is_recording(self) -> bool: ...
    def recording(self) -> AbstractContextManager[None]: ...
    def share(self, extra: Mapping[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]: ...
    def share_metrics(self) -> None: ...
    def fail(self, error: BaseException, where: str) -> None: ...
    def anywhere(self, condition: bool) -> bool: ...
    def warn_once(self, key: str, message: str) -> None: ...


class Hook:
    """A hook of the module: runs on every rank; its logs, and whether it raised, are those of the last stage."""

    def __init__(self, relay: Relay, name: str, method: Callable[..., Any], was_on_instance: bool) -> None:
        functools.update_wrapper(self, method)  # lightning looks at signatures, and whether hooks are overridden
        self.relay, self.name, self.method, self.was_on_instance = relay, name, method, was_on_instance

    def __reduce__(self) -> tuple[Any, ...]:
        return itself, (self.method,)  # a copy of the module has the hook itself

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        relay, error, returned = self.relay, None, None
        if relay.is_recording:  # called by a step
            return self.method(*args, **kwargs)
        if self.name.endswith("_epoch_end"):
            relay.share_metrics()
        with relay.recording():
            try:
                returned = self.method(*args, **kwargs)
            except Exception as raised:
                error = raised
        collecting = self.name in COLLECTING_HOOKS
        failed_somewhere = not collecting and relay.anywhere(error is not None)
        if relay.is_last and error is not None:
            relay.fail(error, self.name)
            raise error
        skip = torch.ones((), device=relay.device)
        extra = relay.share({"skip": skip} if _is_skip(returned) else {})
        if error is not None and not collecting:
            raise error
        if failed_somewhere:
            raise StageFailedError(f"{self.name} failed on another pipeline stage")
        if error is not None:
            relay.warn_once(
                self.name,
                f"{self.name} raised {type(error).__name__} ({error}) on this pipeline stage, on which steps do not"
                " finish and collect nothing. It succeeded on the last stage, whose logs count.",
            )
        if "skip" in extra:
            return -1
        return None if _is_skip(returned) else returned


def _is_skip(returned: Any) -> bool:
    """Whether a hook's answer skips the rest of the epoch: all stages have to do so together."""
    return isinstance(returned, int) and returned == -1
