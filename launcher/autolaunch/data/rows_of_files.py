"""data=documents and data=chat: rows, tokenised once, each an example of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from autolaunch.data.counts import VALIDATION_FRACTION, no_validation, split_counts
from autolaunch.data.encoders import ChatEncoder, DocumentEncoder, Encoder
from autolaunch.data.examples import Counts, ExampleSequences, Spans, fitted, nothing_left, packed
from autolaunch.data.prepared import Prepared, prepare
from autolaunch.data.present import amount_errors, nothing_to_test
from autolaunch.data.rows import Rows
from autolaunch.data.sources import find_sources
from autolaunch.data.streams import BLOCK_ROWS, Position, RowStream, Streams
from autolaunch.data.tokenizers import known_by, load_tokenizer, no_tokenizer, template_text
from autolaunch.data.windows import Parts
from autolaunch_strategies.config import raise_all


class Opened(NamedTuple):
    """The rows behind one key, tokenised."""

    prepared: Prepared
    spans: list[Spans]
    """Of each source that has a weight of its own; one without weights."""
    weights: list[float]
    """Of the sources; empty without."""
    counts: Counts


def open_sequences(config: dict[str, Any], seed: int) -> Parts:
    """The sequences of a `DocumentData` or `ChatData` config; rows are tokenised unless that was done before.

    Raises:
        ConfigError, ConfigErrors: files or a tokenizer that are absent or unreadable; rows that are bad or too long;
            fewer sequences than a batch.
    """
    if config["streaming"]:
        return _streamed(config, seed)
    opened = open_rows(config, "path")
    training, validation, notes = _training_and_validation(config, opened)
    wanted = bool(config["validation_fraction"])
    if config["validation_path"] is not None:
        validation, wanted = _whole(config, "validation_path"), True
    where = f"data.path={config['path']}"
    raise_all(amount_errors(config, where, len(training), len(validation) if wanted else None))
    notes = [*(f"data.path: {text}" for text in left_out(opened.counts, config["seq_len"])), *notes]
    test = _test(config)
    weights = list(zip(training.sizes, opened.weights, strict=True)) if opened.weights else []
    return Parts(training, validation, test, notes, weights)


def _streamed(config: dict[str, Any], seed: int) -> Parts:
    """Training sequences are streamed; those of other tasks are not."""
    sources = find_sources(config, "path")
    weights = [source.weight for source in sources if source.weight is not None]
    validation: ExampleSequences | None = None
    if config["validation_path"] is not None:
        validation = _whole(config, "validation_path")
        raise_all(amount_errors(config, "data.validation_path", config["batch_size"], len(validation)))
    training = Streams(partial(open_streams, config, seed, [source.rows for source in sources]), weights)
    silent = config["validation_fraction"] is None and validation is None
    notes = ["no validation: with data.streaming it is data.validation_path that says of what"] if silent else []
    return Parts(training, validation, _test(config), notes)


def open_streams(
    config: dict[str, Any], seed: int, sources: Sequence[Sequence[Rows]], tell: bool = False
) -> list[RowStream]:
    """A stream of each source of `data.path`, which is read when it is asked for."""
    encoder = make_encoder(config)

    def sequences(prepared: Prepared) -> ExampleSequences:
        return _sequences(config, prepared, [fitted(prepared, config["seq_len"], config["too_long"])[0]])

    block_rows = config["shuffle_buffer"] or BLOCK_ROWS
    return [
        RowStream(rows, number, seed, config["shuffle"], block_rows, encoder, sequences, config["on_bad"], tell)
        for number, rows in enumerate(sources)
    ]


def start_of_stream(config: dict[str, Any], seed: int) -> tuple[ExampleSequences, Counts]:
    """The first block of the first source of `data.path`, and what became of its rows."""
    source = find_sources(config, "path")[0]
    (stream,) = open_streams(config, seed, [source.rows])
    drawn, _ = next(stream.read(Position(), endless=False))
    prepared = drawn.block.prepared
    return drawn.block, fitted(prepared, config["seq_len"], config["too_long"])[1]


def _test(config: dict[str, Any]) -> ExampleSequences | None:
    if config["test_path"] is None:
        return None
    test = _whole(config, "test_path")
    raise_all(nothing_to_test(config, "data.test_path", len(test)))
    return test


def open_rows(config: dict[str, Any], key: str) -> Opened:
    """The rows that `key` (path, validation_path or test_path) means, tokenised, in their order.

    Raises:
        ConfigError, ConfigErrors: see `open_sequences`.
    """
    where = f"data.{key}"
    sources = find_sources(config, key)
    identity, encoder = _encoder(config)
    parts = [prepare(source.rows, where, identity, encoder, config["on_bad"]) for source in sources]
    fits = [fitted(part, config["seq_len"], config["too_long"]) for part in parts]
    for part, (fit, _) in zip(parts, fits, strict=True):
        if not len(fit):
            raise nothing_left(part, config["seq_len"], f"{where}={config[key]}")
    first_tokens, first_examples = (np.cumsum([0, *sizes]) for sizes in zip(*map(_sizes, parts), strict=True))
    spans = [
        Spans(fit.first + token, fit.end + token, fit.example + example)
        for (fit, _), token, example in zip(fits, first_tokens, first_examples, strict=False)
    ]
    weights = [source.weight for source in sources if source.weight is not None]
    return Opened(Prepared.joined(parts), spans, weights, Counts.total(counts for _, counts in fits))


def _sizes(prepared: Prepared) -> tuple[int, int]:
    return int(prepared.ends[-1]), len(prepared.ends)


def training_sequences(config: dict[str, Any], opened: Opened) -> ExampleSequences:
    """What is trained on of `data.path`, without what is kept for validation."""
    return _training_and_validation(config, opened)[0]


def _training_and_validation(
    config: dict[str, Any], opened: Opened
) -> tuple[ExampleSequences, ExampleSequences, list[str]]:
    """(for training, for validation, what to say about that): the last part of every source is for validation."""
    fraction = config["validation_fraction"] if config["validation_path"] is None else 0.0
    count = sum(map(len, opened.spans))
    if fraction is None:  # whether it is enough, all sources say together
        fraction = VALIDATION_FRACTION if split_counts(count, None, config["batch_size"])[1] else None
    kept = [0 if fraction is None else split_counts(len(part), fraction, 0)[1] for part in opened.spans]
    notes = no_validation(count, config["validation_fraction"] if config["validation_path"] is None else 0.0, sum(kept))
    parts = list(zip(opened.spans, kept, strict=True))
    training = _sequences(config, opened.prepared, [part[: len(part) - last] for part, last in parts])
    return training, _sequences(config, opened.prepared, [part[len(part) - last :] for part, last in parts]), notes


def _whole(config: dict[str, Any], key: str) -> ExampleSequences:
    opened = open_rows(config, key)
    return _sequences(config, opened.prepared, opened.spans)


def left_out(counts: Counts, seq_len: int) -> list[str]:
    """What became of rows that are not trained on as they are, a sentence for each kind."""
    words = {
        f"of {counts.examples:,} examples were cut to {seq_len:,} tokens (data.too_long=truncate)": counts.truncated,
        f"of {counts.examples:,} examples are longer than {seq_len:,} tokens and were left out (data.too_long=skip)": (
            counts.skipped
        ),
        f"of {counts.examples:,} examples were left out: nothing to train on was left of them": counts.untrained,
        f"of {counts.examples:,} examples were split into parts of {seq_len:,} tokens (data.too_long=split)": (
            counts.split
        ),
    }
    rows = f"{counts.bad:,} bad row{'' if counts.bad == 1 else 's'}"
    bad = f"{rows} left out (data.on_bad=skip), beside {counts.examples:,} good"
    return [*([bad] if counts.bad else []), *(f"{count:,} {text}" for text, count in words.items() if count)]


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


def _sequences(config: dict[str, Any], prepared: Prepared, spans: Sequence[Spans]) -> ExampleSequences:
    """Those of several sources, one behind the other; each is packed by itself."""
    packs: list[np.ndarray] = []
    if config["packing"] == "documents":
        both = [packed(part, config["seq_len"]) for part in spans]
        spans, packs = [part for part, _ in both], [begins for _, begins in both]
    return ExampleSequences(prepared, spans, packs, config["seq_len"])
