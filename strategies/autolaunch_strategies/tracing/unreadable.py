"""Parts of a model that look at values, which a forward pass on shapes alone does not have: they are stepped over."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from autolaunch_strategies.config.errors import first_line
from autolaunch_strategies.torch_private.calls import forward_restored
from autolaunch_strategies.torch_private.tracing import reads_values
from autolaunch_strategies.tracing.recorder import Untraceable
from autolaunch_strategies.tracing.state import attributes_kept
from autolaunch_strategies.tracing.tensors import first_input

Result = TypeVar("Result")
_MOST_PLACEHOLDERS = 8


def stepping_over(model: nn.Module, attempt: Callable[[Mapping[str, str]], Result]) -> Result:
    """What `attempt` returns, with every part of `model` that looks at values replaced by its first input.

    Such as a mixture of experts that asks which expert has tokens. The model is left as it was.

    Args:
        attempt: runs the model once, is given what is replaced and why, and raises `Untraceable`.

    Raises:
        Exception: what the model's forward raises, where that is not within a part that can be stepped over.
    """
    placeholders: dict[str, str] = {}
    first_error: Exception | None = None
    while True:
        try:
            with attributes_kept(model), _with_placeholders(model, placeholders):
                return attempt(placeholders)
        except Untraceable as failure:
            first_error = first_error or failure.error
            within = failure.inside
            kind = type(model.get_submodule(within))
            of_torch = kind.__module__.startswith("torch.nn.")  # then it is its input that is wrong
            if (
                not within
                or of_torch
                or within in placeholders
                or len(set(placeholders.values())) == _MOST_PLACEHOLDERS
            ):
                raise first_error from None
            reason = first_line(failure.error)
            placeholders |= {name: reason for name, module in model.named_modules() if type(module) is kind}


def reason_of(error: Exception) -> str:
    """Why a forward pass on shapes alone failed, in one line: of one that looks at values, the line that does."""
    if not reads_values(error):
        return first_line(error)
    line = own_line(error)
    if not line:
        return f"it looks at values of tensors ({first_line(error)}), of which only the shapes are known"
    return f"{line} looks at values of a tensor, of which only the shape is known"


def own_line(error: Exception) -> str:
    """The last line of a model's own code on the way to an error, and where it stands; empty if there is none."""
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_known(frame.filename)]
    return f"`{own[-1].line}` ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else ""


def _is_known(file: str) -> bool:
    """Whether a file is of torch or of this package, and not of the model."""
    return file.startswith("<") or any(Path(file).is_relative_to(home) for home in _HOMES)


_HOMES = (Path(__file__).parents[1], Path(torch.__file__).parent)


@contextmanager
def _with_placeholders(model: nn.Module, names: Mapping[str, str]) -> Iterator[None]:
    with ExitStack() as stack:
        for module in map(model.get_submodule, names):
            stack.enter_context(forward_restored(module))
            module.forward = _first_input
        yield


def _first_input(*args: Any, **kwargs: Any) -> Any:
    tensor = first_input(args, kwargs)
    assert tensor is not None, "a module without tensors among its arguments"
    return tensor.clone()
