"""Errors of torch about sharded tensors, told in the words of the plan: which module, and which line to change."""

from __future__ import annotations

import re
import sys
import weakref
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any

from torch import nn

from autolaunch_strategies.config import ConfigError
from autolaunch_strategies.plan.rules import Match, Rule
from autolaunch_strategies.torch_private.collectives import OF_THE_MACHINE

_ABOUT_SHARDING = re.compile(r"DTensor|[Ss]harding|[Ss]harded|[Rr]edistribut|placements")
_PLANS: weakref.WeakKeyDictionary[nn.Module, list[Match]] = weakref.WeakKeyDictionary()


class ShardingError(ConfigError, RuntimeError):
    """An operation that can't work on what the plan has sharded. Also a RuntimeError, as the one that torch raised."""


def remember_plan(model: nn.Module, matches: Iterable[Match]) -> None:
    """Have errors within `model` explained by the plan that was applied to it."""
    _PLANS[model] = list(matches)


def explained(error: Exception, frame: FrameType | None = None) -> ShardingError | None:
    """`error` in the words of the plan, or None if it is not about sharded tensors or happened outside of every plan.

    Args:
        frame: the innermost frame of the code that ran; by default the frames of the error's own traceback.
    """
    text = str(error).strip()
    if isinstance(error, (ConfigError, *OF_THE_MACHINE)) or not _PLANS or not _ABOUT_SHARDING.search(text):
        return None
    frames = _outwards(frame) if frame is not None else _of_traceback(error)
    name, module, matches = _innermost(frames)
    where = f"{name or 'the model'} ({type(module).__name__})" if module is not None else "the backward pass"
    rule, line = _line_to_write(name, matches)
    cause = "" if rule is None else f", because of {rule.source}: {rule.pattern}"
    return ShardingError(
        where,
        f"the plan has sharded a tensor here{cause}, and torch can't do this with it: {text.splitlines()[0]}",
        "tensors that stay sharded only between column-wise and row-wise layers",
        line,
    )


def raise_explained(error: Exception) -> None:
    """Raise `error` explained (see `explained`) if it can be; return otherwise. For use in an `except` clause."""
    explanation = explained(error, sys._getframe(1))
    if explanation is not None:
        raise explanation from error


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _of_traceback(error: BaseException) -> list[FrameType]:
    frames = []
    trace = error.__traceback__
    while trace is not None:
        frames.append(trace.tb_frame)
        trace = trace.tb_next
    return frames[::-1]


def _innermost(frames: Iterable[FrameType]) -> tuple[str, nn.Module | None, list[Match]]:
    known = {module: (name, matches) for model, matches in _PLANS.items() for name, module in model.named_modules()}
    for frame in frames:
        owner: Any = frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and owner in known:
            name, matches = known[owner]
            return name, owner, matches
    return "", None, next(iter(_PLANS.values()))


def _line_to_write(name: str, matches: list[Match]) -> tuple[Rule | None, str]:
    """The rule nearest to the module `name` whose outputs stay sharded, and the line that makes them whole."""
    leaving = [match for match in matches if any(_leaves_sharded(style) for style in match.rule.styles)]
    if not leaving:
        begins = [match for match in matches if any("Begin" in style.name for style in match.rule.styles)]
        if begins and name:
            return begins[0].rule, f"{name}: SequenceParallelDisable"
        return None, ""

    def shared(match: Match) -> int:
        parts, own = match.module.split("."), name.split(".") if name else []
        same = 0
        for mine, theirs in zip(own, parts, strict=False):
            if mine != theirs:
                break
            same += 1
        return same

    rule = max(leaving, key=shared).rule
    styles: list[Any] = []
    for style in rule.styles:
        if style.name == "ColWiseParallel":
            styles.append({"ColWiseParallel": {**(style.arguments or {}), "gather_output": True}})
        elif style.name == "ColwiseParallel":
            styles.append("ColwiseParallel(output_layouts=Replicate())")
        else:
            styles.append(style.to_yaml())
    shown = styles[0] if len(styles) == 1 else styles
    return rule, f"{rule.pattern}: {_yaml(shown)}"


def _leaves_sharded(style: Any) -> bool:
    if style.name == "ColwiseParallel":
        return True
    if style.name != "ColWiseParallel":
        return False
    return not (style.arguments.get("gather_output") or getattr(style.instance, "gather_output", False))


def _yaml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_yaml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_yaml(item) for item in value) + "]"
    return str(value).lower() if isinstance(value, bool) else str(value)
