"""data=classification and model.task: what goes together, what a label is, and what a batch has to be."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autolaunch.config.classification import task_errors
from autolaunch.data.labelled_rows import MULTI, REGRESSION, SINGLE, Labels, labelled
from autolaunch.data.rows import BadRow
from autolaunch.models.task_module import TaskModule
from autolaunch_strategies.config import ConfigError
from autolaunch_strategies.config.values import typed
from tests.support.messages import Told, assert_only_told

TASK = "model.task=sequence_classification"


def config(task: str | None, data: str, num_labels: int | None = None, **keys: Any) -> dict[str, Any]:
    """`task` None is model=llama; `data` with a dot is a data module of the user's own."""
    model = {"name": "llama"} if task is None else {"name": "hf", "task": task, "num_labels": num_labels}
    own = {"name": "custom", "_target_": data} if "." in data else {"name": data}
    return {"module": None, "model": model, "data": {**own, **keys}}


@pytest.mark.parametrize(
    ("job", "told"),
    [
        pytest.param(
            config(None, "classification"),
            Told("data=classification", "model=llama", write=f"model=hf {TASK}"),
            id="llama",
        ),
        pytest.param(
            config("causal_lm", "classification"),
            Told("data=classification", "model.task=causal_lm", write=f"model=hf {TASK}"),
            id="causal",
        ),
        pytest.param(
            config("sequence_classification", "chat"),
            Told(f"{TASK} with data=chat", "next token", write="data=classification"),
            id="chat",
        ),
        pytest.param(
            config("question_answering", "text"),
            Told(
                "model.task=question_answering with data=text",
                "next token",
                allowed=("start_positions",),
                write="data=custom data._target_=...",
            ),
            id="questions",
        ),
        pytest.param(
            config("masked_lm", "my.Data", 3),
            Told("model.num_labels=3", "no effect", allowed=("image_classification",), write="model.num_labels=null"),
            id="num-labels",
        ),
        pytest.param(
            config("masked_lm", "my.Data", labels="next"),
            Told("data.labels=next", "no effect", write="data.labels=null"),
            id="labels",
        ),
        pytest.param(
            config("sequence_classification", "classification", 3, classes=["no", "yes"]),
            Told("model.num_labels=3", "2 names", write="model.num_labels=null"),
            id="classes",
        ),
    ],
)
def test_what_does_not_go_together(job: dict[str, Any], told: Told) -> None:
    (error,) = task_errors(job, typed)
    assert_only_told(error, told)


def test_what_goes_together() -> None:
    for job in (
        config(None, "text"),
        config("causal_lm", "chat"),
        config("sequence_classification", "classification", 2, classes=["no", "yes"]),
        config("image_classification", "my.Data", 3),
    ):
        assert list(task_errors(job, typed)) == []


@pytest.mark.parametrize(
    ("labels", "label", "value"),
    [
        pytest.param(Labels(3, SINGLE, None), 2, 2, id="number"),
        pytest.param(Labels(2, SINGLE, ["no", "yes"]), "yes", 1, id="name"),
        pytest.param(Labels(1, REGRESSION, None), 0.5, 0.5, id="regression"),
        pytest.param(Labels(2, REGRESSION, None), [1, -2.5], [1.0, -2.5], id="several-numbers"),
        pytest.param(Labels(3, MULTI, None), [1, 0, 1], [1.0, 0.0, 1.0], id="many"),
        pytest.param(Labels(3, MULTI, ["a", "b", "c"]), ["c"], [0.0, 0.0, 1.0], id="many-names"),
        pytest.param(Labels(3, SINGLE, None), 3, "model.num_labels=4", id="too-large"),
        pytest.param(Labels(3, SINGLE, None), "no", "data.classes=[no,...]", id="name-of-none"),
        pytest.param(Labels(2, SINGLE, ["no", "yes"]), "yse", "did you mean yes", id="misspelt"),
        pytest.param(Labels(2, SINGLE, None), True, "not the number of a class", id="bool"),
        pytest.param(Labels(1, REGRESSION, None), "0.5", "not a number", id="text"),
        pytest.param(Labels(3, MULTI, None), [1, 0], "2 labels instead of 3", id="too-few"),
        pytest.param(Labels(2, MULTI, None), [1, 2], "neither 0 nor 1", id="no-share"),
        pytest.param(Labels(2, MULTI, None), 1, "no list", id="no-list"),
    ],
)
def test_labels(labels: Labels, label: Any, value: Any) -> None:
    keys = {"text_key": "text", "pair_key": None, "label_key": "label"}
    if not isinstance(value, str):
        assert labelled({"text": "a", "label": label}, keys, labels).label == value
        return
    with pytest.raises(BadRow) as caught:
        labelled({"text": "a", "label": label}, keys, labels)
    assert value in f"{caught.value} {caught.value.write}"


class _Model(torch.nn.Module):
    def __init__(self, **fields: Any) -> None:
        super().__init__()
        self.config = SimpleNamespace(num_labels=3, **fields)

    def forward(self, input_ids: Any, attention_mask: Any = None) -> None: ...


@pytest.mark.parametrize(
    ("task", "batch", "told"),
    [
        pytest.param(
            "sequence_classification",
            {"labels": torch.tensor([0, 3])},
            Told("data: labels", "from 0 to 3", "3 classes", write="model.num_labels=4"),
            id="class",
        ),
        pytest.param(
            "sequence_classification",
            {"labels": torch.zeros(2, 5)},
            Told("data: labels", "multi_label_classification", "[2, 5]", allowed=("[b, 3]",)),
            id="shape",
        ),
        pytest.param(
            "sequence_classification",
            {"labels": torch.tensor([0, 1]), "words": torch.zeros(2)},
            Told("data: words", "takes no words", allowed=("attention_mask",)),
            id="unknown",
        ),
        pytest.param(
            "question_answering",
            {"labels": torch.tensor([0, 1])},
            Told("data", "input_ids, labels", allowed=("start_positions", "end_positions")),
            id="targets",
        ),
        pytest.param("token_classification", {"labels": torch.zeros(2, 4)}, Told("data: labels", "float32"), id="type"),
    ],
)
def test_batches_that_cannot_be_trained_on(task: str, batch: dict[str, Any], told: Told) -> None:
    module = TaskModule(_Model(), task, {}, {}, -1)
    with pytest.raises(ConfigError) as caught:
        module.check({"input_ids": torch.zeros(2, 4, dtype=torch.int64), **batch})
    assert_only_told(caught.value, told)
