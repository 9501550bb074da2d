"""Routers that learn to use all experts alike without a loss for it: their biases follow the load."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn

from autolaunch_strategies.apply.registry import applied_to
from autolaunch_strategies.config import ConfigError
from autolaunch_strategies.experts.find import Mixture, countable_mixtures
from autolaunch_strategies.training.optimizers import after_steps


class ExpertBias(pl.Callback):
    """Moves the bias by which a router chooses its experts after each step: ``bias += rate sign(mean - tokens)``.

    As for DeepSeek-V3 (arXiv 2412.19437, 2.1.2), which has no auxiliary loss. `transformers` uses such a bias and never
    changes it. The tokens are those of the whole step: of all ranks and all batches of it, each once, be it computed
    again or not. Needs a `MeshStrategy`.

    Args:
        rate: by how much a bias moves in a step.
        name: of the bias, a buffer [experts] of a router beside its experts.

    Raises:
        ConfigError: the rate is not positive.
    """

    def __init__(self, rate: float = 0.001, name: str = "e_score_correction_bias") -> None:
        if rate <= 0:
            raise ConfigError(
                f"ExpertBias: rate={rate}", "out of range", "more than 0", "callbacks.expert_bias.rate=0.001"
            )
        self.rate, self.name = rate, name
        self._counted: dict[str, torch.Tensor] = {}
        self._routers: dict[str, nn.Module] = {}
        self._end: Callable[[], None] | None = None
        self._follows: bool | None = None
        """Whether tokens of this rank's routers were counted; None before the first step."""
        self._is_checked = False

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Find the routers, while the model is whole unless a Trainer before this one has parallelised it.

        Raises:
            ConfigError: nothing in the model has such a bias, or nothing is counted.
        """
        if stage != "fit":
            return
        strategy: Any = trainer.strategy
        if not hasattr(strategy, "expert_tokens"):
            raise ConfigError(
                "ExpertBias", f"{type(strategy).__name__} does not count the tokens of experts", "MeshStrategy"
            )
        if strategy.parallel.compile and strategy.parallel.ep == 1:
            raise ConfigError(
                "callbacks=expert_bias with compile",
                "tokens of experts are counted only while Python runs, and with ep=1 mixtures are compiled, too",
                "compile=false, or ep above 1",
                "compile=false",
            )
        applied = applied_to(pl_module)
        known = None if applied is None or applied.expert_load is None else applied.expert_load.mixtures
        self._routers = dict(self._found(pl_module, countable_mixtures(pl_module) if known is None else known))
        if not self._routers and (applied is None or applied.pipeline is None):  # other stages may have some
            raise ConfigError(
                "callbacks=expert_bias",
                f"no mixture of experts in the model has a router with a buffer {self.name!r}",
                "models whose routers have such a bias (deepseek_v3, glm4_moe, ...), or its name in `name`",
            )

    def _found(self, model: nn.Module, mixtures: list[Mixture]) -> Iterator[tuple[str, nn.Module]]:
        """Names of mixtures -> the module beside them that has the bias."""
        for mixture in mixtures:
            around = model.get_submodule(mixture.place.rpartition(".")[0])
            for module in around.modules():
                bias = module._buffers.get(self.name)
                if bias is not None and bias.shape == (mixture.experts,):
                    yield mixture.name, module
                    break

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Watch the optimizer, which exists now; of several the first."""
        strategy: Any = trainer.strategy
        self._counted.clear()
        strategy.expert_tokens(self._counted)  # those of an earlier training
        self._follows, self._is_checked = None, False
        self._end = after_steps(trainer.optimizers[0], partial(self._update, strategy))

    @torch.no_grad()
    def _update(self, strategy: Any) -> None:
        tokens_of = strategy.expert_tokens(self._counted)
        if not self._is_checked:
            counts = [tokens for name, tokens in tokens_of.items() if name in self._routers]
            self._follows = self._follows or any(bool(tokens.any()) for tokens in counts)
        for name, tokens in tokens_of.items():
            if name not in self._routers:
                continue
            bias = getattr(self._routers[name], self.name)
            bias.add_((self.rate * (tokens.mean() - tokens).sign()).to(bias.dtype))

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """After the first step, check that it moves something.

        Raises:
            ConfigError: no tokens were counted, on any rank.
        """
        if self._is_checked or self._follows is None:
            return
        self._is_checked = True
        if not trainer.strategy.reduce_boolean_decision(self._follows, all=False):
            raise ConfigError(
                "callbacks=expert_bias",
                f"a step was made, and no tokens of experts were counted whose router has a buffer {self.name!r}",
                "a model whose experts are in training mode, and that nothing but a MeshStrategy has parallelised",
            )

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Watch no longer."""
        if self._end is not None:
            self._end()
        self._end = None
