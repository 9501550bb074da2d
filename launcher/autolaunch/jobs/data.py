"""`autolaunch data show data=chat ...`: what of the data is trained on, sample by sample. Imports no torch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.text import Text

from autolaunch.config.against_schema import validate
from autolaunch.config.command_line import CommandLine, parse, unquoted
from autolaunch.config.compose import compose, resolved, unresolvable
from autolaunch.config.hub import with_hub_directory
from autolaunch.config.tokenizer import with_tokenizer
from autolaunch.data.order import BatchOrder
from autolaunch.data.present import check_data
from autolaunch.report.terminal import Terminal
from autolaunch_strategies.config import ConfigError, raise_all

if TYPE_CHECKING:
    from autolaunch.data.encoders import Encoder
    from autolaunch.data.examples import ExampleSequences

USAGE = "autolaunch data show data=chat data.path=chats.jsonl model=hf model.path=DIRECTORY"
"""The command, as messages show it."""

_SAMPLES = 5
_TRAINED, _REST = "bold green", "dim"
_MARKS = ("[[", "]]")
"""Around what is trained on, where there are no colours."""


def data_command(words: Sequence[str]) -> int:
    """Do what stands behind `autolaunch data`. What is tokenised for it, the run finds in the cache.

    Raises:
        ConfigError, ConfigErrors: something else than `show` and keys, or all that is wrong with the data or its cache.
    """
    if not words or words[0] != "show":
        raise ConfigError(
            " ".join(["autolaunch data", *words]), "no such command", "show, and the keys of a run", USAGE
        )
    line = parse(words[1:])
    _refuse_other_pages(line)
    composed = compose(line)
    raise_all([*composed.errors, *unresolvable(composed.config, composed.origin)])
    values, wrong = validate(resolved(composed.config), composed.origin)
    raise_all(wrong)
    config = with_tokenizer(with_hub_directory(values))
    data = config["data"]
    if "_target_" in data or data["name"] not in ("documents", "chat"):
        raise ConfigError(
            f"autolaunch data show data={data.get('name')}",
            "there is nothing to see: "
            + ("a text has one label" if data.get("name") == "classification" else "every token is trained on"),
            "data=documents, data=chat",
            USAGE,
        )
    raise_all(check_data(data, 1, None))
    show(data, config["seed"], Terminal())
    return 0


def _refuse_other_pages(line: CommandLine) -> None:
    """Flags of other pages, and of sweeps, which show no data."""
    flags = {
        f"--cfg {line.cfg}": line.cfg is not None,
        f"--info {line.info}": line.info is not None,
        "--help": line.help,
        "--version": line.version,
        "--multirun": line.multirun,
        **dict.fromkeys(line.hydra_flags, True),
    }
    for flag in (flag for flag, typed in flags.items() if typed):
        keys = " ".join(map(unquoted, line.overrides))
        raise ConfigError(
            f"autolaunch data show {flag}",
            "shows what of the data is trained on, and nothing else",
            "the keys of a run, --config-dir, --config-path, --config-name",
            f"autolaunch data show {keys}" if keys else USAGE,
        )


def show(config: dict[str, Any], seed: int, console: Terminal) -> None:
    """Print the first samples of the first batch, and what the training sequences consist of.

    Args:
        config: every key of a `DocumentData` or `ChatData`, with its tokenizer.
        seed: of the order.
    """
    from autolaunch.data.rows_of_files import (
        left_out,
        make_encoder,
        open_rows,
        start_of_stream,
        training_sequences,
    )

    encoder, streamed = make_encoder(config), []
    weights: tuple[tuple[int, float], ...] = ()
    if config["streaming"]:
        sequences, counts = start_of_stream(config, seed)
        streamed = [("streamed", f"these are the first {counts.examples:,} examples")]
        first_bad: list[str] = []
    else:
        opened = open_rows(config, "path")
        sequences, counts, first_bad = training_sequences(config, opened), opened.counts, opened.prepared.first_bad
        weights = tuple(zip(sequences.sizes, opened.weights, strict=True)) if opened.weights else ()
    batch_size = min(config["batch_size"], len(sequences))
    order = BatchOrder(len(sequences), batch_size, 1, seed, config["shuffle"], weights=weights)
    for number, index in enumerate(order.indices(0)[:_SAMPLES], start=1):
        batch = sequences.batch(np.asarray([index]))
        _show_sample(number, int(index), batch, sequences, encoder, console)
    lengths, trained = measured(sequences)
    per_sequence = np.add.reduceat(lengths, _starts(sequences))
    tokens, room = int(lengths.sum()), len(sequences) * config["seq_len"]
    rows = [
        *streamed,
        ("sequences", f"{len(sequences):,} of at most {config['seq_len']:,} tokens"),
        (
            "lengths",
            f"{per_sequence.min():,} to {per_sequence.max():,} tokens, "
            f"half of them up to {int(np.median(per_sequence)):,}",
        ),
        ("batch", f"{config['batch_size']:,} sequences, {config['batch_size'] * per_sequence.mean():,.0f} tokens"),
        ("padding", f"{1 - tokens / room:.1%}" + ("" if config["packing"] != "none" else _packing_hint(tokens, room))),
        ("trained on", f"{trained / tokens:.1%} of the tokens; {1 - trained / tokens:.1%} are masked"),
        *(("rows", text) for text in left_out(counts, config["seq_len"])),
        *(("bad", text) for text in first_bad),
    ]
    width = max(len(name) for name, _ in rows)
    for name, text in rows:
        console.print(Text(f"{name:{width}}  ", "bold").append(text, "not bold"), soft_wrap=True)


def _packing_hint(tokens: int, room: int) -> str:
    return " (data.packing=documents puts several into one sequence)" if tokens < 0.5 * room else ""


def _starts(sequences: ExampleSequences) -> np.ndarray:
    return np.arange(len(sequences)) if sequences.packs is None else sequences.packs[:-1]


def measured(sequences: ExampleSequences) -> tuple[np.ndarray, int]:
    """(tokens of each span, how many of all tokens are trained on)."""
    spans, trained = sequences.spans, sequences.prepared.trained
    pairs = zip(spans.first.tolist(), spans.end.tolist(), strict=True)
    return spans.lengths, sum(int(np.count_nonzero(trained[first + 1 : end])) for first, end in pairs)


def _show_sample(
    number: int,
    index: int,
    batch: dict[str, np.ndarray],
    sequences: ExampleSequences,
    encoder: Encoder,
    console: Terminal,
) -> None:
    spans = sequences.spans[list(sequences.spans_of(index))]
    length = int(spans.lengths.sum())
    ids, labels = batch["input_ids"][0, :length], batch["labels"][0, :length]
    trained = labels != -100
    places = ", ".join(dict.fromkeys(sequences.prepared.place(example) for example in spans.example.tolist()))
    console.print(
        Text(f"{number}  {places}", "bold").append(
            f"  {length:,} tokens, {int(trained.sum()):,} trained on", "not bold"
        ),
        soft_wrap=True,
    )
    text = Text()
    edges = [0, *(np.flatnonzero(np.diff(trained)) + 1).tolist(), length]
    for first, end in itertools.pairwise(edges):
        part = encoder.decode(ids[first:end].tolist())
        if trained[first]:
            before, behind = ("", "") if console.color_system else _MARKS
            text.append(f"{before}{part}{behind}", _TRAINED)
        else:
            text.append(part, _REST)
    console.print(text, soft_wrap=True)
    console.print()
