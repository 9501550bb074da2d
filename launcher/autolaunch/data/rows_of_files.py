"""data=documents and data=chat: rows of files, tokenised once, each an example of its own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from autolaunch.data.counts import split_counts
from autolaunch.data.encoders import ChatEncoder, DocumentEncoder, Encoder
from autolaunch.data.examples import Counts, ExampleSequences, Spans, fitted, packed
from autolaunch.data.prepared import Prepared, prepare
from autolaunch.data.present import amount_errors, too_few_for_test
from autolaunch.data.rows import find_row_files
from autolaunch.data.tokenizers import known_by, load_tokenizer, no_tokenizer, template_text
from autolaunch.data.windows import Parts
from autolaunch_strategies.config import raise_all


class Source(NamedTuple):
    """The rows behind one key, as sequences."""

    prepared: Prepared
    spans: Spans
    counts: Counts


def open_sequences(config: dict[str, Any], seed: int) -> Parts:
    """The sequences of a `DocumentData` or `ChatData` config; rows are tokenised unless that was done before.

    Raises:
        ConfigError, ConfigErrors: files or a tokenizer that are absent or unreadable; rows that are bad or too long;
            fewer sequences than a batch.
    """
    training = open_source(config, "path")
    sequences = partial(_sequences, config, training.prepared)
    if config["validation_path"] is None:
        first = _training_count(config, training)
        parts = sequences(training.spans[:first]), sequences(training.spans[first:])
        wanted = config["validation_fraction"] > 0
    else:
        validation = open_source(config, "validation_path")
        parts = sequences(training.spans), _sequences(config, validation.prepared, validation.spans)
        wanted = True
    where = f"data.path={config['path']}"
    raise_all(amount_errors(config, where, len(parts[0]), len(parts[1]) if wanted else None))
    parts[0].notes = [f"data.path: {text}" for text in left_out(training.counts, config["seq_len"])]
    if config["test_path"] is None:
        return Parts(*parts)
    test = open_source(config, "test_path")
    test_sequences = _sequences(config, test.prepared, test.spans)
    raise_all(too_few_for_test(config, "data.test_path", len(test_sequences)))
    return Parts(*parts, test_sequences)


def open_source(config: dict[str, Any], key: str) -> Source:
    """The rows of the files that `key` (path, validation_path or test_path) names, in the order of the files.

    Raises:
        ConfigError, ConfigErrors: see `open_sequences`.
    """
    where = f"data.{key}"
    files = find_row_files(config[key], where, with_text=config["name"] == "documents")
    identity, encoder = _encoder(config)
    prepared = prepare(files, where, identity, encoder, config["on_bad"])
    spans, counts = fitted(prepared, config["seq_len"], config["too_long"], f"{where}={config[key]}")
    return Source(prepared, spans, counts)


def training_sequences(config: dict[str, Any], source: Source) -> ExampleSequences:
    """What is trained on of `data.path`, without what is kept for validation."""
    first = len(source.spans) if config["validation_path"] is not None else _training_count(config, source)
    return _sequences(config, source.prepared, source.spans[:first])


def _training_count(config: dict[str, Any], source: Source) -> int:
    return split_counts(len(source.spans), config["validation_fraction"])[0]


def left_out(counts: Counts, seq_len: int) -> list[str]:
    """What became of rows that are not trained on as they are, a sentence for each kind."""
    words = {
        f"bad rows were left out (data.on_bad=skip), beside {counts.examples:,} good ones": counts.bad,
        f"of {counts.examples:,} examples were cut to {seq_len:,} tokens (data.too_long=truncate)": counts.truncated,
        f"of {counts.examples:,} examples are longer than {seq_len:,} tokens and were left out (data.too_long=skip)": (
            counts.skipped
        ),
        f"of {counts.examples:,} examples were left out: nothing to train on was left of them": counts.untrained,
        f"of {counts.examples:,} examples were split into parts of {seq_len:,} tokens (data.too_long=split)": (
            counts.split
        ),
    }
    return [f"{count:,} {text}" for text, count in words.items() if count]


def make_encoder(config: dict[str, Any]) -> Encoder:
    """What turns rows into tokens, by a `DocumentData` or `ChatData` config.

    Raises:
        ConfigError: the tokenizer or the chat template is absent or cannot be read.
    """
    return _encoder(config)[1]()


def _encoder(config: dict[str, Any]) -> tuple[dict[str, Any], Callable[[], Encoder]]:
    """(what the examples depend on beside their files, what makes the encoder)."""
    path = config["tokenizer"] or "bytes"
    identity: dict[str, Any] = {"name": config["name"], "tokenizer": known_by(path)}
    if config["name"] == "documents":
        identity["text_key"] = config["text_key"]
        return identity, lambda: DocumentEncoder(None if path == "bytes" else load_tokenizer(path), config["text_key"])
    if path == "bytes":  # nothing was checked, because the model is a module of the user's
        raise no_tokenizer()
    template = None if config["chat_template"] is None else template_text(config["chat_template"])
    keys = ("train_on", "train_on_eos", "columns")
    identity |= {"chat_template": template, **{key: config[key] for key in keys}}
    return identity, lambda: ChatEncoder(load_tokenizer(path), template, **{key: config[key] for key in keys})


def _sequences(config: dict[str, Any], prepared: Prepared, spans: Spans) -> ExampleSequences:
    packs: np.ndarray | None = None
    if config["packing"] == "documents":
        spans, packs = packed(spans, config["seq_len"]) if len(spans) else (spans, np.zeros(1, np.int64))
    return ExampleSequences(prepared, spans, packs, config["seq_len"])
