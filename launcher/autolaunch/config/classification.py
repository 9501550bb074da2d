"""What `model.task` and the data have to say to each other: which go together, and what labels are. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from autolaunch.data.labelled_rows import MULTI, REGRESSION, SINGLE
from autolaunch.data.rows import BadRow
from autolaunch.data.sources import find_sources
from autolaunch.data.tokenizers import BYTES_END, pad_token_id
from autolaunch.models.hf_config import read_hf_config
from autolaunch.models.hf_tasks import MODEL_TASKS, task_of
from autolaunch_strategies.config import ConfigError
from autolaunch_strategies.config.values import Where, written

_CLASSES = "sequence_classification"
_OWN_NAMES = "LABEL_"
"""How `transformers` calls classes that have no name."""


def task_errors(config: Mapping[str, Any], where: Where) -> Iterator[ConfigError]:
    """A task without the data for it, data without the task, and keys that have no effect with the task."""
    model, data = config["model"], config["data"]
    task = None if config["module"] is not None else task_of(model)
    is_labelled = "_target_" not in data and data["name"] == "classification"
    if is_labelled and task != _CLASSES:
        has = "module" if config["module"] is not None else f"model={model.get('name')}"
        yield ConfigError(
            "data=classification",
            f"texts with labels are for model.task={_CLASSES}"
            + (f", not for {has}" if task is None else f", not for model.task={task}"),
            f"model=hf model.task={_CLASSES}; for a module of your own, a data module of your own",
            f"model=hf model.task={_CLASSES}",
        )
    if task is None:
        return
    if not is_labelled and task != "causal_lm" and "_target_" not in data:
        others = "data=classification, or " if task == _CLASSES else ""
        targets = ", ".join(MODEL_TASKS[task].targets)
        yield ConfigError(
            f"model.task={task} with data={data['name']}",
            "these data are trained on for the next token",
            f"{others}a data module of your own whose batches have {targets} (data=custom)",
            "data=classification" if task == _CLASSES else "data=custom data._target_=...",
        )
    if model["num_labels"] is not None and not MODEL_TASKS[task].has_classes:
        yield ConfigError(
            where("model.num_labels", model["num_labels"]),
            f"has no effect: with model.task={task} there are no classes",
            ", ".join(f"model.task={name}" for name, entry in MODEL_TASKS.items() if entry.has_classes),
            "model.num_labels=null",
        )
    if "_target_" in data and data.get("labels") is not None and task != "causal_lm":
        yield ConfigError(
            where("data.labels", data["labels"]),
            f"has no effect: with model.task={task} nothing is shifted",
            "model.task=causal_lm",
            "data.labels=null",
        )
    names = data.get("classes") if is_labelled else None
    if names is not None and (len(set(names)) != len(names) or not names):
        yield ConfigError(f"data.classes={written(names)}", "names of classes are different ones")
    elif names is not None and model["num_labels"] not in (None, len(names)):
        yield ConfigError(
            where("model.num_labels", model["num_labels"]),
            f"data.classes has {len(names)} names",
            "as many as there are names, or null",
            "model.num_labels=null",
        )


def with_labels_of_model(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with what labelled texts have to know of their model, and it of them.

    That is ``data.of_model`` (`autolaunch.config.schema.MADE`): how many outputs the model has, what labels mean, and
    with which id texts are padded. A classifier looks at the last token that is another one: where its config says
    none, it is that of the tokenizer.

    Raises:
        ConfigError: neither the model nor the tokenizer says with which id to pad.
    """
    model, data = config["model"], config["data"]
    if config["module"] is not None or task_of(model) != _CLASSES:
        return dict(config)
    model = {**model, "config": dict(model["config"])}
    names = None if "_target_" in data else data["classes"]
    if names is not None:
        model["config"]["id2label"] = {str(number): name for number, name in enumerate(names)}
        model["config"]["label2id"] = {name: number for number, name in enumerate(names)}
    fields = read_hf_config(model)
    padding = fields.get("pad_token_id")
    if padding is None and "_target_" not in data:
        padding = BYTES_END if data["tokenizer"] == "bytes" else pad_token_id(data["tokenizer"])
    if padding is None:
        raise ConfigError(
            f"model.task={_CLASSES}",
            "neither the config of the model nor the tokenizer says with which token id texts are padded, "
            "so that the last token of a text is not known",
            "the id that the batches are padded with",
            "model.config.pad_token_id=0",
        )
    model["config"]["pad_token_id"] = padding
    if "_target_" in data:
        return {**config, "model": model}
    known = fields.get("id2label")
    if known and names is None and not all(str(name).startswith(_OWN_NAMES) for name in known.values()):
        names = [name for _, name in sorted(known.items(), key=lambda item: int(item[0]))]
    count = len(known) if known else 2
    return {
        **config,
        "model": model,
        "data": {**data, "classes": names, "of_model": [count, _problem(fields, count, data), padding]},
    }


def _problem(fields: Mapping[str, Any], count: int, data: Mapping[str, Any]) -> str:
    """What labels mean, as `transformers` tells it: by the config, the number of outputs and their type."""
    if fields.get("problem_type"):
        return str(fields["problem_type"])
    if count == 1:
        return REGRESSION
    for rows in (rows for source in find_sources(data, "path") for rows in source.rows):
        for _, row, _ in rows.read():
            if not isinstance(row, BadRow) and data["label_key"] in row:
                return MULTI if isinstance(row[data["label_key"]], list) else SINGLE
    return SINGLE
