"""The LightningModules around a plain model: next-token prediction, and supervised training with any loss."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.nn import functional as F

from autolaunch.instantiate import build
from autolaunch.models.labels import NOT_TRAINED, ChecksFirstBatch, check_batch, next_tokens
from autolaunch.models.optimizer import end_of_training, optimizer_and_schedule
from autolaunch_strategies.config import ConfigError

if TYPE_CHECKING:
    from autolaunch.models.adapters import Adapted

TARGET_KEYS = ("labels", "label", "targets", "target", "y")
"""Under which of these keys a batch that is a dict keeps what the model should say."""


class OptimizedModule(LightningModule):
    """A module around `model` with the optimizer and the schedule of the config.

    Args:
        model: any module.
        optimizer_cfg: the fields of `autolaunch.config.schema.Optimizer`.
        scheduler_cfg: the fields of `autolaunch.config.schema.Scheduler`.
        total_steps: at which optimizer step training ends (-1: with the epochs of the Trainer).
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
        self.schedule_ends = total_steps
        """At which optimizer step its schedule ends if the config does not say it; -1 if nothing does."""

    def configure_optimizers(self) -> Any:
        self.schedule_ends = end_of_training(self.total_steps, self.trainer)
        names = trained_names(self)
        return optimizer_and_schedule(names, self.optimizer_cfg, self.scheduler_cfg, self.schedule_ends)


class MeanLossModule(OptimizedModule):
    """Trains `model` on the mean of a loss over what its batches count.

    Whoever derives from it says the loss of a batch (`_loss`) and over how many items it is the mean
    (`num_items_in_batch`). The loss of an optimizer step is that over all items, however they are spread over ranks and
    microbatches.

    Args: see `OptimizedModule`.
    """

    def num_items_in_batch(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Over how many items the loss of `batch` is the mean: a 0-dim tensor."""
        raise NotImplementedError  # said by who derives from it

    def _loss(self, batch: Mapping[str, Tensor]) -> Tensor:
        raise NotImplementedError  # said by who derives from it

    def training_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> Tensor:
        loss = self._loss(batch)
        self.log("loss", loss, prog_bar=False, logger=False)  # loggers get that of the whole step (`StepMetrics`)
        return loss

    def validation_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> None:
        self._log_mean("val_loss", batch)

    def test_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> None:
        self._log_mean("test_loss", batch)

    def _log_mean(self, name: str, batch: Mapping[str, Tensor]) -> None:
        # Lightning adds up value x batch_size and batch_size over batches and ranks: a mean over all items.
        loss = self._loss(batch)
        self.log(name, loss, batch_size=int(self.num_items_in_batch(batch)), sync_dist=True)


class LanguageModel(MeanLossModule):
    """Trains `model` to predict the next token.

    Batches are ``{input_ids, labels}`` and optionally ``position_ids``, ``attention_mask``, each int64 [b, s]. A label
    of -100 is not trained on. `position_ids` restart at 0 with each packed document, `attention_mask` is 0 for padding
    at the end of a row. The model is given those of the two that it takes, and `position_ids` without the mask: models
    of `transformers` keep documents apart only then, and nothing that is trained on sees the padding behind it.

    The loss is the mean over all labels of an optimizer step, however they are spread over ranks and microbatches (see
    `num_items_in_batch`); 0 where there are none.

    Args:
        model: takes `input_ids` and returns logits [b, s, vocab], or an object with `logits`.
        optimizer_cfg: the fields of `autolaunch.config.schema.Optimizer`.
        scheduler_cfg: the fields of `autolaunch.config.schema.Scheduler`.
        total_steps: at which optimizer step training ends (-1: with the epochs of the Trainer).
        labels: `next` if label t is the token after input t, `same` if it is the token at t, as `transformers` has it.
            A first batch that contradicts it is refused.
        documents_meet: why packed documents would see each other in the model, so that a first batch of such is
            refused; empty if they would not.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer_cfg: Mapping[str, Any],
        scheduler_cfg: Mapping[str, Any],
        total_steps: int,
        labels: str = "same",
        documents_meet: str = "",
    ) -> None:
        super().__init__(model, optimizer_cfg, scheduler_cfg, total_steps)
        self.labels, self._documents_meet = labels, documents_meet
        parameters = inspect.signature(model.forward).parameters
        self.model_inputs = tuple(name for name in ("position_ids", "attention_mask") if name in parameters)
        """What of a batch the model takes beside `input_ids`; of these the first that the batch has."""
        self._routers_learn = any(getattr(config, "output_router_logits", False) for config in _configs(model))
        """Whether the model has a loss of its routers beside that of the next token."""

    def configure_callbacks(self) -> list[Callback]:
        check = partial(check_batch, labels=self.labels, inputs=self.model_inputs, documents_meet=self._documents_meet)
        return [ChecksFirstBatch(check)]

    def forward(self, input_ids: Tensor, **inputs: Tensor) -> Tensor:
        """Logits [b, s, vocab] of the tokens after each of `input_ids` [b, s]."""
        return _logits_of(self.model(input_ids, **inputs))

    def num_items_in_batch(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Over how many labels the loss of `batch` is the mean: a 0-dim tensor."""
        return (next_tokens(batch, self.labels) != NOT_TRAINED).sum()

    def _on(self, batch: Mapping[str, Tensor], call: Callable[..., Any]) -> Any:
        name = next((name for name in self.model_inputs if name in batch), None)
        return call(batch["input_ids"], **({} if name is None else {name: batch[name]}))

    def _logits(self, batch: Mapping[str, Tensor]) -> Tensor:
        return self._on(batch, self)

    def _loss(self, batch: Mapping[str, Tensor]) -> Tensor:
        # What `forward` returns has no place for what routers say.
        output = self._on(batch, self.model) if self._routers_learn else self._logits(batch)
        targets = next_tokens(batch, self.labels)
        loss = mean_cross_entropy(_logits_of(output).flatten(0, 1), targets.flatten())
        return loss + router_loss(self.model, output) if self._routers_learn else loss

    def predict_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> Tensor:
        """The likeliest next token at every position, [b, s] int64."""
        return self._logits(batch).argmax(dim=-1)

    def next_logits(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """Logits [b, vocab] of the token behind one of `positions` [b] in each row of `input_ids` [b, s]."""
        return self(input_ids)[torch.arange(len(positions)), positions]


def _logits_of(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output.logits


def _configs(model: nn.Module) -> list[Any]:
    """The config of a model of `transformers`, and that of its text where images have one of their own."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else None
    return [config, text]


def router_loss(model: nn.Module, output: Any) -> Tensor:
    """What models of `transformers` with `output_router_logits` add to a loss if they compute it themselves.

    Raises:
        ConfigError: this one does not show it.
    """
    loss = getattr(output, "aux_loss", None)
    spellings = ("router_aux_loss_coef", "aux_loss_coef")  # the second is JetMoe's
    weights = [getattr(owner, name, None) for owner in (model, *_configs(model)) for name in spellings]
    weight = next((weight for weight in weights if weight is not None), None)
    if not isinstance(loss, Tensor) or weight is None:
        raise no_router_loss(model)
    return weight * loss


def no_router_loss(model: nn.Module) -> ConfigError:
    """What is said of a model whose routers can't be trained by their own loss here."""
    return ConfigError(
        "model.config.output_router_logits=true",
        f"the loss of the routers of {type(model).__name__} is not known here, so it would not be trained on",
        "false, or a LightningModule of your own that computes it",
        "model.config.output_router_logits=false",
    )


def trained_names(module: LightningModule) -> list[tuple[str, nn.Parameter]]:
    """The parameters of a module around `model` by the model's own names, tied ones under each of theirs."""
    named = module.named_parameters(remove_duplicate=False)
    return [(name.removeprefix("model."), parameter) for name, parameter in named]


class SupervisedModule(OptimizedModule):
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
        total_steps: at which optimizer step training ends (-1: with the epochs of the Trainer).

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
        super().__init__(model, optimizer_cfg, scheduler_cfg, total_steps)
        self.loss = build_loss(loss)

    def _run(self, batch: Any, with_target: bool = True) -> tuple[Any, Any]:
        """(output of the model, target or None)."""
        if isinstance(batch, Mapping):
            key, target = _target_key(batch), _target(batch)
            rest = batch if self.loss is None else {name: value for name, value in batch.items() if name != key}
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

    @property
    def num_items_in_batch(self) -> Callable[[Any], Tensor] | None:
        """Over how many targets the loss of a batch is the mean; None where it is taken for one over samples."""
        return self._count_classes if self.loss is cross_entropy or type(self.loss) in _OVER_CLASSES else None

    def _count_classes(self, batch: Any) -> Tensor:
        target = _target(batch)
        if target is None or target.is_floating_point():
            return torch.tensor(_batch_size(batch))
        return (target != NOT_TRAINED).sum() if self.loss is cross_entropy else _count_of(self.loss, target)

    def _log_mean(self, name: str, batch: Any) -> None:
        count = _batch_size(batch) if self.num_items_in_batch is None else self._count_classes(batch).item()
        # Lightning adds up value x batch_size and batch_size, which classes with weights make no whole number.
        self.log(name, self._step(batch), batch_size=count, sync_dist=True)  # type: ignore[arg-type]

    def _step(self, batch: Any) -> Tensor:
        output, target = self._run(batch)
        if type(self.loss) in _OVER_CLASSES:
            return _mean_over_classes(self.loss, output, target)
        if self.loss is not None:
            return self.loss(output, target)
        if isinstance(output, Mapping):
            return output["loss"]
        return output if isinstance(output, Tensor) else output.loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self._step(batch)
        self.log("loss", loss, prog_bar=False, logger=False, batch_size=_batch_size(batch))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._log_mean("val_loss", batch)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self._log_mean("test_loss", batch)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        """What the model returns; the target of the batch, if it has one, is not used."""
        return self._run(batch, with_target=False)[0]


def _target_key(batch: Mapping[str, Any]) -> str | None:
    return next((key for key in TARGET_KEYS if key in batch), None)


def _target(batch: Any) -> Any:
    """What the model should say of a batch that has several parts; None if a dict has no such key."""
    if not isinstance(batch, Mapping):
        return batch[-1]
    key = _target_key(batch)
    return None if key is None else batch[key]


def build_loss(loss: str | Mapping[str, Any]) -> Callable[[Any, Any], Tensor] | None:
    """The loss of (output, target) by its name or `_target_`; None for `output`, where the model returns it.

    Raises:
        ConfigError: no such loss, one that is no mean, or a `_target_` that cannot be called so.
    """
    if isinstance(loss, Mapping) and "_target_" in loss:
        if loss.get("reduction") == "sum":
            raise ConfigError(
                "model.loss.reduction=sum",
                "what is trained on is the mean over a batch, however it is shared out; a sum over the samples of a "
                "rank is another loss on every mesh",
                "mean",
                "model.loss.reduction=mean",
            )
        over_classes = _CLASSES_OF.get(loss["_target_"])
        if over_classes is not None and loss.get("_partial_"):
            loss = {**loss, "_target_": f"torch.nn.{over_classes.__name__}", "_partial_": False}
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
    """Mean cross entropy in fp32 of scores [b, classes] or [b, s, classes] and class indices [b] or [b, s].

    Indices of -100 do not count; 0 where none does.
    """
    scores = output if isinstance(output, Tensor) else output.logits
    if target.is_floating_point():  # probabilities, of the shape of the scores
        return F.cross_entropy(scores.flatten(0, -2).float(), target.flatten(0, -2).float())
    return mean_cross_entropy(scores.flatten(0, -2), target.flatten())


def mean_cross_entropy(scores: Tensor, target: Tensor) -> Tensor:
    """Mean cross entropy in fp32 of scores [n, classes] and class indices [n] over those that count, 0 without any."""
    # torch's own mean is nan without any, and so would be the gradients of the whole step.
    total = F.cross_entropy(scores.float(), target, reduction="sum")
    return total / (target != NOT_TRAINED).sum().clamp(min=1)


_CLASSES_OF: dict[str, type[nn.Module]] = {
    "torch.nn.functional.cross_entropy": nn.CrossEntropyLoss,
    "torch.nn.functional.nll_loss": nn.NLLLoss,
}
"""Of functions of torch the class that computes the same."""
_OVER_CLASSES = tuple(_CLASSES_OF.values())
"""Losses of torch that are means over the targets that they do not ignore, by the weights of their classes."""


def _count_of(loss: Any, target: Tensor) -> Tensor:
    """Over how many targets one of `_OVER_CLASSES` is the mean: with weights of classes, the sum of theirs."""
    counted = target != loss.ignore_index
    return counted.sum() if loss.weight is None else loss.weight[target[counted]].sum()


def _mean_over_classes(loss: Any, output: Any, target: Tensor) -> Tensor:
    """What one of `_OVER_CLASSES` says, but 0 where no target counts."""
    if target.is_floating_point():  # probabilities: a mean over samples
        return loss(output, target)
    summed = copy.copy(loss)
    summed.reduction = "sum"
    count = _count_of(loss, target)
    return summed(output, target) / torch.where(count > 0, count, 1)


def mse(output: Tensor, target: Tensor) -> Tensor:
    """Mean squared error in fp32 of two tensors of one shape."""
    if output.shape != target.shape:
        # Broadcasting [b, 1] against [b] would compare every sample with every other.
        raise ValueError(f"model.loss=mse: output {list(output.shape)} and target {list(target.shape)} differ in shape")
    return F.mse_loss(output.float(), target.float())


def _batch_size(batch: Any) -> int:
    values = batch.values() if isinstance(batch, Mapping) else [batch] if isinstance(batch, Tensor) else batch
    return next((len(value) for value in values if isinstance(value, torch.Tensor) and value.ndim), 1)
