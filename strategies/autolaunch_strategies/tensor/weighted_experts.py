"""Whether what experts make of a token is multiplied by its weights, and nothing else is done with these.

Ranks that share experts call a module's own forward with weights of one, and multiply and add up themselves. That is
another result where a module multiplies before a nonlinearity, normalises weights, or adds something without a weight
(a bias, the tokens). It is tried out before anything is applied, with made-up numbers in place of parameters: the
model's own may be on meta, and a bias of zeros would hide what it is there for.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import nn

from autolaunch_strategies.torch_private.modes import outside_of_modes
from autolaunch_strategies.torch_private.random_state import seed_torch
from autolaunch_strategies.tracing.state import attributes_kept, trial

_EXPERTS = 2
_INDEX = [[0, 1], [1, 0], [1, 0]]
_WEIGHTS = [[0.37, 0.21], [0.53, 0.84], [0.15, 0.62]]
"""Two experts for each of three tokens; no weights of a token add up to one."""
_PERIOD = 99991
"""Made-up parameters repeat themselves after so many numbers, a prime: drawing takes longer than copying."""

_KNOWN: weakref.WeakKeyDictionary[nn.Module, dict[Hashable, bool | None]] = weakref.WeakKeyDictionary()


def are_only_multiplied(module: nn.Module, model: nn.Module) -> bool | None:
    """Whether the results of experts are multiplied by weights and added up; None where `module` can't be tried out.

    Args:
        module: with `num_experts` and parameters [experts, ...] alone, called with hidden [T, D], index [T, K] and
            weights [T, K] in any order; may be on meta, and stays as it is.
        model: that it is a part of. Modules of one kind are tried out once.
    """
    known = _KNOWN.setdefault(model, {})
    kind = _kind(module)
    if kind not in known:
        known[kind] = _tried(module)
    return known[kind]


def _kind(module: nn.Module) -> Hashable:
    simple = (bool, int, float, str)
    attributes = (
        (key, value if isinstance(value, simple) else id(value))
        for key, value in vars(module).items()
        if not key.startswith("_")
    )
    parts = tuple((key, type(part)) for key, part in module.named_modules() if part is not module)
    return type(module), tuple(parameter.shape for parameter in module.parameters()), tuple(attributes), parts


def _tried(module: nn.Module) -> bool | None:
    shapes = [tuple(parameter.shape) for parameter in module.parameters(recurse=False)]
    if not all(parameter.is_floating_point() for parameter in module.parameters(recurse=False)):
        return None
    answers = set()
    with outside_of_modes(), torch.no_grad(), trial(torch.device("cpu")), attributes_kept(module):
        seed_torch(0, torch.device("cpu"))  # all ranks find the same
        twin = _twin(module)
        for width in dict.fromkeys(size for shape in shapes if len(shape) > 2 for size in shape[1:]):
            for place in (1, 2, 0):
                answers.add(_tried_with(functools.partial(type(module).forward, twin), width, place))
    return True if True in answers else False if False in answers else None


def _tried_with(forward: Any, width: int, place: int) -> bool | None:
    """For tokens of one width, with the index as the argument at one place; None if that is not how it is called."""
    hidden, index, weights = (
        _made_up((len(_INDEX), width)),
        torch.tensor(_INDEX),
        torch.tensor(_WEIGHTS, dtype=torch.float32),
    )

    def called(rows: torch.Tensor, numbers: torch.Tensor, shares: torch.Tensor) -> Any:
        arguments = [rows, shares]
        arguments.insert(place, numbers)
        return forward(*arguments)

    try:
        found = called(hidden.clone(), index, weights.clone())
        one = called(hidden.repeat_interleave(2, dim=0), index.view(-1, 1), torch.ones_like(weights).view(-1, 1))
    except Exception:  # whatever code says to tokens of the wrong width, or to a CPU
        return None
    if not (isinstance(found, torch.Tensor) and isinstance(one, torch.Tensor) and found.shape == hidden.shape):
        return None
    expected = (one.view(*index.shape, width) * weights.unsqueeze(-1)).sum(dim=1)
    largest = expected.abs().max().item()
    if not largest or not math.isfinite(largest):
        return None
    return torch.allclose(found, expected, rtol=1e-3, atol=1e-4 * largest)


def _twin(module: nn.Module) -> nn.Module:
    """What runs as `module` does in evaluation, with two experts, numbers of its own and without hooks."""
    twin = _stripped(module)
    twin.__dict__["num_experts"] = _EXPERTS
    twin.__dict__["_parameters"] = {
        key: _made_up((_EXPERTS, *parameter.shape[1:])) for key, parameter in module.named_parameters(recurse=False)
    }
    return twin


def _stripped(module: nn.Module) -> nn.Module:
    twin: nn.Module = object.__new__(type(module))
    twin.__dict__.update(vars(module), training=False, _forward_hooks=OrderedDict(), _forward_pre_hooks=OrderedDict())
    twin.__dict__["_buffers"] = {
        key: buffer if buffer is None else _flat(buffer) for key, buffer in module._buffers.items()
    }
    twin.__dict__["_modules"] = {
        key: part if part is None else _stripped(part) for key, part in module._modules.items()
    }
    return twin


def _flat(buffer: torch.Tensor) -> torch.Tensor:
    make = torch.ones if buffer.is_floating_point() else torch.zeros
    return make(tuple(buffer.shape), dtype=buffer.dtype, device="cpu")


def _made_up(shape: Sequence[int]) -> torch.Tensor:
    """Numbers of which a product with ones like them is about as large as they."""
    count = math.prod(shape)
    drawn = torch.randn(min(count, _PERIOD), device="cpu", dtype=torch.float32)
    numbers = drawn.repeat(-(-count // max(len(drawn), 1)))[:count].view(tuple(shape))
    return numbers / math.sqrt(max(shape[1:])) if len(shape) > 2 else numbers
