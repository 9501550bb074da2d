"""Muon for the matrices of a model, AdamW for everything else, as one optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from autolaunch_strategies.training.optimizers import adapt_optimizer


class Muon(torch.optim.Optimizer):
    """torch's Muon (K. Jordan and others, 2024) for matrices and torch's AdamW for the rest, in one set of groups.

    Muon orthogonalises the whole update of a matrix. Where matrices are sharded, each rank gathers them for the step:
    the numbers are those of one device, at the price of their memory.

    Args:
        params: parameters or groups of them. Groups with ``muon: False`` go to AdamW, as embeddings and output layers
            should; so does what has not two dims, in any group.
        lr: of both: by default an update of Muon is as large as one of AdamW (`adjust_lr_fn`).
        weight_decay: of both.
        momentum, nesterov, ns_steps, adjust_lr_fn: of Muon.
        betas, eps: of AdamW.
        muon: of groups that do not say.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = "match_rms_adamw",
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        muon: bool = True,
    ) -> None:
        nothing = [nn.Parameter(torch.zeros(1, 1))]  # torch makes no optimizer of nothing
        matrices = torch.optim.Muon(
            nothing, lr, weight_decay, momentum, nesterov, ns_steps=ns_steps, adjust_lr_fn=adjust_lr_fn
        )
        rest = torch.optim.AdamW(nothing, lr, (betas[0], betas[1]), eps, weight_decay)
        self._parts = {True: matrices, False: rest}
        groups: list[dict[str, Any]] = []
        for item in params:
            group = dict(item) if isinstance(item, dict) else {"params": [item]}
            members, takes = list(group["params"]), group.get("muon", muon)
            chosen = [parameter for parameter in members if takes and parameter.ndim == 2]
            others = [parameter for parameter in members if not (takes and parameter.ndim == 2)]
            groups += [
                {**self._parts[kind].defaults, **group, "params": part, "muon": kind}
                | ({"eps": matrices.defaults["eps"]} if kind else {})
                for kind, part in ((True, chosen), (False, others))
                if part
            ]
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of both."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for kind, part in self._parts.items():
            part.state, part.param_groups = self.state, [group for group in self.param_groups if group["muon"] is kind]
            adapt_optimizer(part)
            part.step()
        return loss
