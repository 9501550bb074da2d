"""The loss by which routers learn to use all experts alike, of all tokens of a batch and not of one rank's.

Models of `transformers` compute E * sum_i C_i/R * S_i/R, with R tokens of which C_i chose expert i, and S_i the sum of
its probabilities. It is no mean over tokens, so that the mean of it over ranks is another number. From sums over all
ranks each of them gets the number of the whole batch.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from autolaunch_strategies.data_parallel.loader import Counted
from autolaunch_strategies.sharded_sequence.collectives import sum_over
from autolaunch_strategies.tensor.views import plain

FUNCTION = "load_balancing_loss_func"
"""What files of models call it."""

_ARGUMENTS = ["gate_logits", "num_experts", "top_k", "attention_mask"]

_GROUPS: list[tuple[dist.ProcessGroup, Counted]] = []
"""The ranks with other tokens of the batch, and whether this one's count, of the models that run now; the innermost
last."""


def balanced_models(model: nn.Module) -> tuple[dict[str, nn.Module], dict[str, nn.Module]]:
    """(those in `model` that compute this loss, those that compute another): the outermost, by name."""
    known: dict[str, nn.Module] = {}
    others: dict[str, nn.Module] = {}
    within: set[nn.Module] = set()
    for name, module in model.named_modules():
        function = getattr(_file_of(module), FUNCTION, None)
        if module in within or function is None:
            continue
        within.update(module.modules())
        is_known = list(inspect.signature(function).parameters) == _ARGUMENTS
        (known if is_known else others)[name] = module
    return known, others


def router_losses(model: nn.Module) -> list[str]:
    """The names of those in `model` that add such a loss to theirs: no mean over samples, nor over microbatches."""
    both: dict[str, nn.Module] = {}
    for models in balanced_models(model):
        both.update(models)
    configs: dict[str, Any] = {name: getattr(module, "config", None) for name, module in both.items()}
    return [name for name, config in configs.items() if getattr(config, "output_router_logits", False)]


def balance_whole_batch(modules: Iterable[nn.Module], group: dist.ProcessGroup, counted: Counted) -> None:
    """Let models compute the loss of their routers of the tokens of all ranks of `group` whose batch counts."""
    for module in modules:
        file: Any = _file_of(module)
        if not hasattr(getattr(file, FUNCTION), "of_one_rank"):
            setattr(file, FUNCTION, _of_all_ranks(getattr(file, FUNCTION)))
        module.forward = functools.wraps(module.forward)(functools.partial(_among, (group, counted), module.forward))


def _file_of(module: nn.Module) -> ModuleType | None:
    """Where its class stands; None of one that a script ran in, which is no module."""
    return sys.modules.get(type(module).__module__)


def _among(group: tuple[dist.ProcessGroup, Counted], forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    _GROUPS.append(group)
    try:
        return forward(*args, **kwargs)
    finally:
        _GROUPS.pop()


def _of_all_ranks(of_one_rank: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(of_one_rank)
    def loss(gate_logits: Any, num_experts: Any = None, top_k: Any = 2, attention_mask: Any = None) -> Any:
        if not _GROUPS or not isinstance(gate_logits, tuple) or isinstance(gate_logits[0], FakeTensor):
            return of_one_rank(gate_logits, num_experts, top_k, attention_mask)
        group, counted = _GROUPS[-1]
        layers, mask = [plain(logits) for logits in gate_logits], plain(attention_mask)
        if not counted():
            layers, mask = [logits[:0] for logits in layers], None
        counts, probabilities, rows = _sums(layers, top_k, mask)
        sums = torch.cat([counts, rows.reshape(1)])
        dist.all_reduce(sums, group=group)
        shares, total = sums[:-1] / sums[-1], sums[-1]
        balance = shares * (sum_over(probabilities, group) / total)
        return balance.sum() * num_experts

    loss.of_one_rank = of_one_rank  # type: ignore[attr-defined]  # tells that it stands there already
    return loss


def _sums(
    layers: list[torch.Tensor], top_k: int, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(how often each expert was chosen, [E]; the sum of its probabilities, [E]; tokens, 0-dim), of all layers."""
    experts, device = layers[0].shape[-1], layers[0].device
    counts = torch.zeros(experts, device=device)
    probabilities, rows = torch.zeros(experts, device=device), torch.zeros((), device=device)
    for logits in layers:
        weights = logits.to(device).softmax(dim=-1)
        chosen = weights.topk(top_k, dim=-1).indices
        counted = torch.ones(len(weights), device=device) if mask is None else mask.reshape(-1).to(device).float()
        counts = counts.scatter_add(0, chosen.flatten(), counted.repeat_interleave(top_k))
        probabilities = probabilities + (weights.float() * counted.unsqueeze(-1)).sum(dim=0)
        rows = rows + counted.sum()
    return counts, probabilities, rows
