"""``model.task``: what a model of `transformers` is trained to do, and which of its classes does it. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ModelTask:
    """One value of ``model.task``."""

    auto_class: str
    """The class of `transformers` that knows which model class does it."""
    has_new_head: bool = False
    """Whether the head is one that the files of a pretrained model lack: it begins random then."""
    has_classes: bool = False
    """Whether the head has `model.num_labels` outputs."""
    adapter_type: str | None = None
    """What PEFT calls it."""
    targets: tuple[str, ...] = ("labels",)
    """Keys of a batch that the model is not given."""


MODEL_TASKS: dict[str, ModelTask] = {
    "causal_lm": ModelTask("AutoModelForCausalLM", adapter_type="CAUSAL_LM"),
    "masked_lm": ModelTask("AutoModelForMaskedLM"),
    "seq2seq_lm": ModelTask("AutoModelForSeq2SeqLM", adapter_type="SEQ_2_SEQ_LM"),
    "sequence_classification": ModelTask("AutoModelForSequenceClassification", True, True, "SEQ_CLS"),
    "token_classification": ModelTask("AutoModelForTokenClassification", True, True, "TOKEN_CLS"),
    "question_answering": ModelTask(
        "AutoModelForQuestionAnswering", True, adapter_type="QUESTION_ANS", targets=("start_positions", "end_positions")
    ),
    "image_classification": ModelTask("AutoModelForImageClassification", True, True),
}


def task_of(model_cfg: Mapping[str, Any]) -> str | None:
    """The task of a group `model`; None of a model that is none of `transformers`."""
    if model_cfg.get("name") != "hf" or "_target_" in model_cfg:
        return None
    return model_cfg.get("task") or "causal_lm"
