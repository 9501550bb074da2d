"""The LightningModules around a plain model: next-token prediction, and supervised training with any loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F

from autolaunch.instantiate import build
from autolaunch.models.optimizer import optimizer_and_schedule
from autolaunch_strategies.config import ConfigError

if TYPE_CHECKING:
    from autolaunch.models.adapters import Adapted

TARGET_KEYS = ("labels", "label", "targets", "target", "y")
"""Under which of these keys a batch that is a dict keeps what the model should say."""


class LanguageModel(LightningModule):
    """Trains `model` to predict the next token.

    Batches are ``{input_ids: [b, s], labels: [b, s]}``, int64; labels are shifted already, -100 is ignored.

    Args:
        model: takes `input_ids` and returns logits [b, s, vocab], or an object with `logits`.
        optimizer_cfg: the fields of `autolaunch.config.schema.Optimizer`.
        scheduler_cfg: the fields of `autolaunch.config.schema.Scheduler`.
        total_steps: at which optimizer step training ends (-1: no limit).
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer_cfg: Mapping[str, Any],
        scheduler_cfg: Mapping[str, Any],
        total_steps: int,
    ) -> None:
        super().__init__()
        self.model = model
        self.adapted: Adapted | None = None
        self.optimizer_cfg, self.scheduler_cfg, self.total_steps = optimizer_cfg, scheduler_cfg, total_steps

    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits [b, s, vocab] of the tokens after each of `input_ids` [b, s]."""
        output = self.model(input_ids)
        return output if isinstance(output, Tensor) else output.logits

    def _loss(self, batch: Mapping[str, Tensor]) -> Tensor:
        logits = self(batch["input_ids"])
        return F.cross_entropy(logits.flatten(0, 1).float(), batch["labels"].flatten())

    def training_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> Tensor:
        loss = self._loss(batch)
        self.log("loss", loss, prog_bar=False)
        return loss

    def validation_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch), batch_size=len(batch["input_ids"]), sync_dist=True)

    def test_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> None:
        self.log("test_loss", self._loss(batch), batch_size=len(batch["input_ids"]), sync_dist=True)

    def predict_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> Tensor:
        """The likeliest next token at every position, [b, s] int64."""
        return self(batch["input_ids"]).argmax(dim=-1)

    def configure_optimizers(self) -> Any:
        return optimizer_and_schedule(self.parameters(), self.optimizer_cfg, self.scheduler_cfg, self.total_steps)


class SupervisedModule(LightningModule):
    """Trains any `model` on pairs of input and target.

    Batches are ``(input, ..., target)``, or dicts in which one of `TARGET_KEYS` is the target and the rest are keyword
    arguments of the model. With ``loss="output"`` the model gets the whole batch and returns its loss, or an object or
    a dict with `loss`.

    Args:
        model: any module.
        loss: `cross_entropy` (over the last dim of an output [b, classes] or [b, s, classes]), `mse`, `output`, or a
            dict with the `_target_` of a loss class, or of a function with ``_partial_: true``.
        optimizer_cfg: the fields of `autolaunch.config.schema.Optimizer`.
        scheduler_cfg: the fields of `autolaunch.config.schema.Scheduler`.
        total_steps: at which optimizer step training ends (-1: no limit).

    Raises:
        ConfigError: no such loss.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: str | Mapping[str, Any],
        optimizer_cfg: Mapping[str, Any],
        scheduler_cfg: Mapping[str, Any],
        total_steps: int,
    ) -> None:
        super().__init__()
        self.model = model
        self.loss = build_loss(loss)
        self.adapted: Adapted | None = None
        self.optimizer_cfg, self.scheduler_cfg, self.total_steps = optimizer_cfg, scheduler_cfg, total_steps

    def _run(self, batch: Any, with_target: bool = True) -> tuple[Any, Any]:
        """(output of the model, target or None)."""
        if isinstance(batch, Mapping):
            key = next((key for key in TARGET_KEYS if key in batch), None)
            rest = batch if self.loss is None else {name: value for name, value in batch.items() if name != key}
            target = batch[key] if key else None
            if target is None and self.loss is not None and with_target:
                raise ConfigError(
                    "data",
                    f"a batch with the keys {', '.join(batch)} has no target",
                    f"one of {', '.join(TARGET_KEYS)}",
                )
            return self.model(**rest), target
        if not isinstance(batch, Tensor) and len(batch) == 1:
            batch = batch[0]
        if isinstance(batch, Tensor):
            if self.loss is not None and with_target:
                raise ConfigError("data", "a batch that is one tensor has no target", "(input, target), or a dict")
            return self.model(batch), None
        return (self.model(*batch) if self.loss is None else self.model(*batch[:-1])), batch[-1]

    def _step(self, batch: Any) -> Tensor:
        output, target = self._run(batch)
        if self.loss is not None:
            return self.loss(output, target)
        if isinstance(output, Mapping):
            return output["loss"]
        return output if isinstance(output, Tensor) else output.loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self._step(batch)
        self.log("loss", loss, prog_bar=False, batch_size=_batch_size(batch))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self._step(batch), batch_size=_batch_size(batch), sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self._step(batch), batch_size=_batch_size(batch), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        """What the model returns; the target of the batch, if it has one, is not used."""
        return self._run(batch, with_target=False)[0]

    def configure_optimizers(self) -> Any:
        return optimizer_and_schedule(self.parameters(), self.optimizer_cfg, self.scheduler_cfg, self.total_steps)


def build_loss(loss: str | Mapping[str, Any]) -> Callable[[Any, Any], Tensor] | None:
    """The loss of (output, target) by its name or `_target_`; None for `output`, where the model returns it.

    Raises:
        ConfigError: no such loss, or a `_target_` that cannot be called so.
    """
    if isinstance(loss, Mapping) and "_target_" in loss:
        return build(loss, "model.loss")
    if loss == "cross_entropy":
        return cross_entropy
    if loss == "mse":
        return mse
    if loss == "output":
        return None
    raise ConfigError(
        f"model.loss={loss}",
        "no such loss",
        "cross_entropy, mse, output, or {_target_: ...}",
        "model.loss=cross_entropy",
    )


def cross_entropy(output: Any, target: Tensor) -> Tensor:
    """Mean cross entropy in fp32 of scores [b, classes] or [b, s, classes] and class indices [b] or [b, s]."""
    scores = output if isinstance(output, Tensor) else output.logits
    if target.is_floating_point():  # probabilities, of the shape of the scores
        return F.cross_entropy(scores.flatten(0, -2).float(), target.flatten(0, -2).float())
    return F.cross_entropy(scores.flatten(0, -2).float(), target.flatten())


def mse(output: Tensor, target: Tensor) -> Tensor:
    """Mean squared error in fp32 of two tensors of one shape."""
    if output.shape != target.shape:
        # Broadcasting [b, 1] against [b] would compare every sample with every other.
        raise ValueError(f"model.loss=mse: output {list(output.shape)} and target {list(target.shape)} differ in shape")
    return F.mse_loss(output.float(), target.float())


def _batch_size(batch: Any) -> int:
    values = batch.values() if isinstance(batch, Mapping) else [batch] if isinstance(batch, Tensor) else batch
    return next((len(value) for value in values if isinstance(value, torch.Tensor) and value.ndim), 1)
