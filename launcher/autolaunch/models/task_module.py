"""The LightningModule around a model of `transformers` that is trained for something else than the next token."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.nn import functional as F

from autolaunch.models.hf_tasks import MODEL_TASKS
from autolaunch.models.labels import NOT_TRAINED, ChecksFirstBatch
from autolaunch.models.language_model import MeanLossModule, mean_cross_entropy, no_router_loss
from autolaunch_strategies.config import ConfigError

_SAMPLES = ("sequence_classification", "image_classification")
"""Tasks of which each sample has one label, or one row of numbers."""


class TaskModule(MeanLossModule):
    """Trains `model` for one of `autolaunch.models.hf_tasks.MODEL_TASKS` but ``causal_lm``.

    Batches are dicts: what the model is called with, and its targets, which it is not given. The loss is computed here
    from its scores, in fp32, as the mean over all targets of an optimizer step, wherever they are; what is -100 (or, of
    positions, outside of the sequence) is no target.

    ===========================  =======================================================================
    task                         targets
    ===========================  =======================================================================
    masked_lm                    ``labels`` int64 [b, s]: the tokens at the positions that are asked for
    token_classification         ``labels`` int64 [b, s]
    seq2seq_lm                   ``labels`` int64 [b, t]: the answer; the decoder is given it one further
    sequence_classification,     ``labels`` int64 [b]; or floats: [b] or [b, n] for `regression`, [b, n] of 0 and
    image_classification         1 for `multi_label_classification` (``config.problem_type``, else by their type)
    question_answering           ``start_positions``, ``end_positions`` int64 [b]
    ===========================  =======================================================================

    Args:
        model: of the class for this task.
        task: its name.
        optimizer_cfg, scheduler_cfg, total_steps: see `LanguageModel`.

    Raises:
        ConfigError: a decoder of which it is not known what it begins with, or routers that have a loss of their own.
    """

    def __init__(
        self,
        model: nn.Module,
        task: str,
        optimizer_cfg: Mapping[str, Any],
        scheduler_cfg: Mapping[str, Any],
        total_steps: int,
    ) -> None:
        super().__init__(model, optimizer_cfg, scheduler_cfg, total_steps)
        self.task, self.targets = task, MODEL_TASKS[task].targets
        self.inputs = tuple(inspect.signature(model.forward).parameters)
        if task == "seq2seq_lm" and getattr(model.config, "decoder_start_token_id", None) is None:
            raise ConfigError(
                f"model.task={task}",
                f"the config of {type(model).__name__} does not say what its decoder begins with",
                "the id of a token",
                "model.config.decoder_start_token_id=0",
            )
        if task == "seq2seq_lm" and getattr(model.config, "output_router_logits", False):
            raise no_router_loss(model)

    def configure_callbacks(self) -> list[Callback]:
        return [ChecksFirstBatch(self.check)]

    def check(self, batch: Any) -> None:
        """Look at one batch.

        Raises:
            ConfigError: keys that the model or the task does not know or lacks; targets of another shape or type.
        """
        if not isinstance(batch, Mapping) or any(name not in batch for name in self.targets):
            kind = f"a dict of {', '.join(map(str, batch))}" if isinstance(batch, Mapping) else type(batch).__name__
            raise ConfigError(
                "data", f"a batch is {kind}, with which model.task={self.task} can't be trained", self._allowed()
            )
        for name in batch:
            if name not in (*self.inputs, *self.targets):
                raise ConfigError(f"data: {name}", f"{type(self.model).__name__} takes no {name}", self._allowed())
        if self.task not in _SAMPLES:
            for name in self.targets:
                if batch[name].dtype != torch.int64:
                    raise ConfigError(f"data: {name}", f"its type is {_name(batch[name].dtype)}", "int64")
            return
        labels, kind, width = batch["labels"], self._problem(batch["labels"]), self._num_labels
        single = kind == "single_label_classification"
        shapes = ["[b]"] if single else ["[b]", "[b, 1]"] if width == 1 else [f"[b, {width}]"]
        fits = labels.ndim == 1 if single or (width == 1 and labels.ndim == 1) else labels.shape[1:] == (width,)
        if not fits or (single and labels.is_floating_point()):
            raise ConfigError(
                "data: labels",
                f"{_name(labels.dtype)} {list(labels.shape)}, with which {kind} can't be trained",
                f"{'int64' if single else 'floats'} {' or '.join(shapes)} (model.num_labels={width})",
            )
        if single and bool(((labels >= width) | ((labels < 0) & (labels != NOT_TRAINED))).any()):
            raise ConfigError(
                "data: labels",
                f"from {int(labels.min())} to {int(labels.max())}, but there are {width} classes",
                f"0 to {width - 1}, or {NOT_TRAINED} for none",
                f"model.num_labels={int(labels.max()) + 1}",
            )

    def _allowed(self) -> str:
        inputs = [name for name in self.inputs if name not in (*self.targets, "kwargs", "args")]
        return f"a dict of {', '.join(self.targets)}, and what the model takes: {', '.join(inputs)}"

    @property
    def _num_labels(self) -> int:
        return self.model.config.num_labels  # type: ignore[union-attr,return-value]  # torch: a tensor or a module

    def _problem(self, labels: Tensor) -> str:
        """What the labels of samples mean, as `transformers` tells it."""
        declared = getattr(self.model.config, "problem_type", None)
        if declared is not None:
            return str(declared)
        if self._num_labels == 1:
            return "regression"
        return "multi_label_classification" if labels.is_floating_point() else "single_label_classification"

    def forward(self, **inputs: Any) -> Any:
        """What the model returns."""
        return self.model(**inputs)

    def _run(self, batch: Mapping[str, Any]) -> Any:
        inputs = {name: value for name, value in batch.items() if name not in self.targets}
        if self.task == "seq2seq_lm" and "decoder_input_ids" not in inputs and "labels" in batch:
            inputs["decoder_input_ids"] = self._shifted(batch["labels"])
        return self(**inputs)

    def _shifted(self, labels: Tensor) -> Tensor:
        """What a decoder is given before each token of an answer."""
        config: Any = self.model.config
        prepare: Any = getattr(self.model, "prepare_decoder_input_ids_from_labels", None)
        if prepare is not None:  # some families end what is given with another token
            return prepare(labels=labels)
        known = labels.masked_fill(labels == NOT_TRAINED, config.pad_token_id or 0)
        return torch.cat([torch.full_like(known[:, :1], config.decoder_start_token_id), known[:, :-1]], dim=1)

    def num_items_in_batch(self, batch: Mapping[str, Any]) -> Tensor:
        """Over how many targets the loss of `batch` is the mean: a 0-dim tensor."""
        if self.task == "question_answering":
            length = batch["input_ids"].shape[1]
            return torch.stack([_inside(batch[name], length) for name in self.targets]).ne(NOT_TRAINED).sum()
        labels = batch["labels"]
        if self.task in _SAMPLES and self._problem(labels) != "single_label_classification":
            return torch.tensor(len(labels), device=labels.device)
        return (labels != NOT_TRAINED).sum()

    def _loss(self, batch: Mapping[str, Any]) -> Tensor:
        output = self._run(batch)
        if self.task == "question_answering":
            scores = torch.cat([output.start_logits, output.end_logits])
            return mean_cross_entropy(scores, torch.cat([_inside(batch[t], scores.shape[1]) for t in self.targets]))
        logits, labels = output.logits, batch["labels"]
        kind = self._problem(labels) if self.task in _SAMPLES else "single_label_classification"
        if kind == "regression":
            return F.mse_loss(logits.float(), labels.float().view_as(logits))
        if kind == "multi_label_classification":
            return F.binary_cross_entropy_with_logits(logits.float(), labels.float())
        return mean_cross_entropy(logits.flatten(0, -2), labels.flatten())

    def predict_step(self, batch: Mapping[str, Any], batch_idx: int) -> Tensor:
        """The likeliest class of each sample or position; of several labels their probabilities, else the numbers.

        Of questions, where the answer begins and where it ends, int64 [b, 2].
        """
        output = self._run(batch)
        if self.task == "question_answering":
            return torch.stack([output.start_logits.argmax(-1), output.end_logits.argmax(-1)], dim=1)
        kind = self._problem(batch["labels"]) if self.task in _SAMPLES and "labels" in batch else None
        if kind == "regression":
            return output.logits
        return output.logits.sigmoid() if kind == "multi_label_classification" else output.logits.argmax(-1)


def _inside(positions: Tensor, length: int) -> Tensor:
    """Positions of answers, `NOT_TRAINED` where they are not in the sequence."""
    return positions.masked_fill((positions < 0) | (positions >= length), NOT_TRAINED)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
