"""What can be wrong with the data, found by the parent before any process starts; imports no torch."""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from autolaunch.data.conversations import check_columns, conversation
from autolaunch.data.counts import (
    ITEM_SIZES,
    bytes_token_count,
    npy_length,
    split_counts,
    token_file_length,
    window_count,
)
from autolaunch.data.documents import TEXT_SUFFIXES, TOKEN_SUFFIXES, expanded, find_files, standard_library_documents
from autolaunch.data.labelled_rows import check_labelled_columns
from autolaunch.data.rows import LINES, BadRow, FileRows, Rows, bad_row_errors, text_of
from autolaunch.data.sources import find_sources
from autolaunch.data.tokenizers import (
    BYTES_END,
    has_template,
    no_template,
    no_tokenizer,
    template_text,
    tokenizer_files,
)
from autolaunch_strategies.config import ConfigError, as_typed

BYTES_VOCABULARY = BYTES_END + 1
_SAMPLE_BYTES = 2**20
_SAMPLE_ROWS = 1000
"""Of all files together that are looked at beforehand; at least one of each."""


def check_data(data_cfg: dict[str, Any], dp: int, facts: Any) -> list[ConfigError]:
    """Every problem of the config group `data`; an empty list if there is none.

    Args:
        data_cfg: every key of one of the schemas of `autolaunch.config.schema.DATA`; a data module of one's own is not
            checked.
        dp: size of the data parallel axis.
        facts: what is known about the model: `vocab_size` and `max_seq_len`, an int or None (not known) each. None for
            a model that is refused itself: then nothing is said of a tokenizer that might have been the model's.
    """
    if "_target_" in data_cfg:
        return []
    errors = _batch_errors(data_cfg, dp) + _length_errors(data_cfg, getattr(facts, "max_seq_len", None))
    vocab_size = getattr(facts, "vocab_size", None)
    if data_cfg["name"] in ("documents", "chat", "classification"):
        errors += _row_errors(data_cfg) + _rows_tokenizer_errors(data_cfg, vocab_size, facts is not None)
    else:
        check = {"text": _text_errors, "tokens": _token_errors, "synthetic": _synthetic_errors}[data_cfg["name"]]
        errors += check(data_cfg, vocab_size)
    if getattr(facts, "name", None) == "hf":  # whose sizes are those of the config of transformers
        for error in errors:
            error.write = error.write.replace("model.vocab_size=", "model.config.vocab_size=")
    return errors


def _batch_errors(config: dict[str, Any], dp: int) -> list[ConfigError]:
    batch, microbatches = config["batch_size"], config["microbatches"]
    parts = dp * microbatches
    if batch % parts == 0:
        return []
    below = batch // parts * parts
    sizes = [size for size in (below, below + parts) if size]
    several = microbatches > 1
    return [
        ConfigError(
            f"data.batch_size={batch}",
            f"{batch} sequences cannot be shared evenly by {dp} data parallel rank{'s' if dp > 1 else ''}"
            + (f" in {microbatches} microbatches" if several else ""),
            f"multiples of {dp} x {microbatches} = {parts}" if several else f"multiples of {parts}",
            " or ".join(f"data.batch_size={size}" for size in sizes),
        )
    ]


def _length_errors(config: dict[str, Any], max_seq_len: int | None) -> list[ConfigError]:
    if max_seq_len is None or config["seq_len"] <= max_seq_len:
        return []
    return [
        ConfigError(
            f"data.seq_len={config['seq_len']}",
            f"the model takes sequences of at most {max_seq_len} tokens",
            f"1 to {max_seq_len}",
            f"data.seq_len={max_seq_len}",
        )
    ]


def amount_errors(config: dict[str, Any], where: str, training: int, validation: int | None) -> list[ConfigError]:
    """Too few sequences for one training batch or, where validation is wanted (not None), none for it."""
    errors = []
    batch = config["batch_size"]
    if training < batch:
        errors.append(
            ConfigError(
                where,
                f"{training} training sequence{'' if training == 1 else 's'} of {config['seq_len']} tokens, "
                f"fewer than one batch of {batch}",
                "more data, or a smaller data.batch_size or data.seq_len",
                # Nobody has data yet who plans with the text that comes along.
                "data=synthetic" if where == "data.path=null" else "",
            )
        )
    if validation == 0:
        key, write = "more data, or a smaller data.seq_len", ""
        if config.get("validation_path") is not None:
            where = f"data.validation_path={config['validation_path']}"
        else:
            key = "a larger data.validation_fraction, more data, or a smaller data.seq_len"
            fraction = math.ceil(100 / max(training, 1)) / 100
            larger = f"data.validation_fraction={fraction}, or " if fraction <= 0.5 else ""
            write = f"{larger}data.validation_fraction=0 for no validation"
        reason = f"not one validation sequence of {config['seq_len']} tokens"
        errors.append(ConfigError(where, reason, key, write))
    return errors


def nothing_to_test(config: dict[str, Any], key: str, test: int) -> list[ConfigError]:
    """No sequence under `key`, which is for a test."""
    if test:
        return []
    return [
        ConfigError(
            f"{key}={config[key.removeprefix('data.')]}",
            f"not one test sequence of {config['seq_len']} tokens",
            "more data, or a smaller data.seq_len",
        )
    ]


def test_data_error(data_cfg: dict[str, Any]) -> ConfigError | None:
    """What keeps `autolaunch test` from running: nothing was kept for it."""
    if "_target_" in data_cfg or data_cfg.get("test_path") is not None or data_cfg.get("num_test_sequences"):
        return None
    files = {"text": "test.txt", "tokens": "test.bin", "documents": "test.jsonl", "chat": "test.jsonl"}
    files["classification"] = "test.jsonl"
    file = files.get(data_cfg["name"])
    key, value = ("test_path", file) if file else ("num_test_sequences", "256")
    return ConfigError(
        f"autolaunch test with data={data_cfg['name']}",
        "no data are said to be those of the test",
        f"data.{key}; or `autolaunch validate`, for the data that training validates on",
        f"data.{key}={value}",
    )


def _vocabulary_error(where: str, needed: int, vocab_size: int | None) -> list[ConfigError]:
    if vocab_size is None or vocab_size >= needed:
        return []
    return [
        ConfigError(
            where,
            f"token ids up to {needed - 1}, but the model knows only {vocab_size}",
            f"a model with a vocabulary of {needed} or more",
            f"model.vocab_size={needed}",
        )
    ]


def _text_errors(config: dict[str, Any], vocab_size: int | None) -> list[ConfigError]:
    path, tokenizer = config["path"], config["tokenizer"] or "bytes"
    errors: list[ConfigError] = []
    sizes = test_sizes = None
    try:
        if config["test_path"] is not None:
            test_sizes = [
                file.stat().st_size for file in find_files(config["test_path"], TEXT_SUFFIXES, "data.test_path")
            ]
    except ConfigError as error:
        errors.append(error)
    try:
        if path is None:
            sizes = [len(document) for document in standard_library_documents()]
        else:
            sizes = [file.stat().st_size for file in find_files(path, TEXT_SUFFIXES)]
    except ConfigError as error:
        errors.append(error)
    if tokenizer != "bytes":
        return errors + _tokenizer_errors(tokenizer, vocab_size)
    errors += _vocabulary_error("data.tokenizer=bytes", BYTES_VOCABULARY, vocab_size)
    if sizes is not None:
        windows = window_count(bytes_token_count(sizes), config["seq_len"])
        training, validation = split_counts(windows, config["validation_fraction"], config["batch_size"])
        where = f"data.path={'null' if path is None else path}"
        errors += amount_errors(config, where, training, validation if config["validation_fraction"] else None)
    if test_sizes is not None:
        test = window_count(bytes_token_count(test_sizes), config["seq_len"])
        errors += nothing_to_test(config, "data.test_path", test)
    return errors


def _tokenizer_errors(tokenizer: str, vocab_size: int | None) -> list[ConfigError]:
    where = f"data.tokenizer={tokenizer}"
    file = expanded(tokenizer)
    allowed = "bytes, or the path of a tokenizer.json"
    if not file.is_file():
        inside = file / "tokenizer.json"
        write = as_typed("data.tokenizer", inside) if inside.is_file() else ""
        return [ConfigError(where, "a directory" if file.is_dir() else "no such file", allowed, write)]
    try:
        size = tokenizer_vocabulary(json.loads(file.read_text("utf-8")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return [ConfigError(where, "not a tokenizer of the library `tokenizers`", allowed)]
    if importlib.util.find_spec("tokenizers") is None:
        return [missing_tokenizers(tokenizer)]
    return _vocabulary_error(where, size, vocab_size)


def _row_errors(config: dict[str, Any]) -> list[ConfigError]:
    """Of documents, chats and labelled texts: files, and their first rows."""
    errors = check_columns(config["columns"]) if config["name"] == "chat" else []
    errors += _streaming_errors(config)
    if config["path"] is None:
        errors.append(
            ConfigError(
                f"data={config['name']}",
                "no file is given",
                "data.path: a file, a directory, a glob, a dataset of the hub, or a list of them",
                f"data.path={'chats' if config['name'] == 'chat' else 'texts'}.jsonl",
            )
        )
    for key in ("path", "validation_path", "test_path"):
        try:
            sources = [] if config[key] is None else find_sources(config, key)
            if not errors and config["on_bad"] == "refuse":
                errors += _first_rows_errors([rows for source in sources for rows in source.rows], config)
        except ConfigError as error:
            errors.append(error)
    return errors


def _streaming_errors(config: dict[str, Any]) -> list[ConfigError]:
    """Keys that go with `data.streaming`, and keys that do not."""
    errors = []
    if not config.get("streaming"):
        if config.get("shuffle_buffer") is not None:
            reason = "it has no effect: without data.streaming all rows are shuffled together"
            where = f"data.shuffle_buffer={config['shuffle_buffer']}"
            errors.append(ConfigError(where, reason, "null, or data.streaming=true", "data.shuffle_buffer=null"))
        return errors
    if config["validation_fraction"] and config["validation_path"] is None:
        where = f"data.validation_fraction={config['validation_fraction']}"
        reason = "with data.streaming the end of the data is not known beforehand"
        errors.append(ConfigError(where, reason, "data.validation_path", "data.validation_path=validation.jsonl"))
    if config["num_workers"] > 1:
        reason = "with data.streaming each of several loader processes would read and tokenise all rows"
        errors.append(ConfigError(f"data.num_workers={config['num_workers']}", reason, "0, 1", "data.num_workers=1"))
    return errors


def _first_rows_errors(sources: Sequence[Rows], config: dict[str, Any]) -> list[ConfigError]:
    """What is wrong with rows that are cheap to read: the first of every source, and more of files of lines."""
    errors: list[ConfigError] = []
    bad: list[tuple[str, BadRow]] = []
    left = _SAMPLE_ROWS
    for rows in sources:
        if isinstance(rows, FileRows) and rows.file.suffix.lower() not in LINES:
            continue
        read = itertools.islice(rows.read(), max(1, left) if isinstance(rows, FileRows) else 1)
        looked_at, here = 0, []
        for number, row, mark in read:
            looked_at += 1
            if (problem := _problem(row, config)) is not None:
                here.append((rows.place(number), problem))
            if isinstance(rows, FileRows) and mark[1] > _SAMPLE_BYTES:
                break
        left -= looked_at
        if not looked_at:
            errors.append(ConfigError(rows.name, "there are no rows in it"))
        elif len(here) == looked_at:  # not some bad rows, but another kind of file than was meant
            errors += bad_row_errors(here[:1], may_skip=False)
        else:
            bad += here
    return errors + bad_row_errors(bad)


def _problem(row: Mapping[str, Any] | BadRow, config: dict[str, Any]) -> BadRow | None:
    """What can be told to be wrong with a row without a tokenizer."""
    if isinstance(row, BadRow):
        return row
    try:
        if config["name"] == "chat":
            conversation(row, config["columns"])
        elif config["name"] == "documents":
            text_of(row, config["text_key"])
        else:
            check_labelled_columns(row, config)
    except BadRow as problem:
        return problem
    return None


def _rows_tokenizer_errors(config: dict[str, Any], vocab_size: int | None, has_model: bool) -> list[ConfigError]:
    tokenizer, is_chat = config["tokenizer"], config["name"] == "chat"
    if is_chat and tokenizer in (None, "bytes"):
        return [no_tokenizer()] if has_model or tokenizer == "bytes" else []
    if tokenizer in (None, "bytes"):
        return _vocabulary_error("data.tokenizer=bytes", BYTES_VOCABULARY, vocab_size)
    where, place = f"data.tokenizer={tokenizer}", expanded(tokenizer)
    files = tokenizer_files(place)
    if not files:
        reason = "there is no tokenizer in this directory" if place.is_dir() else "no such file or directory"
        kinds = "a directory with tokenizer.json, or a tokenizer.json" + ("" if is_chat else ", or bytes")
        return [ConfigError(where, reason, kinds)]
    if importlib.util.find_spec("transformers") is None:
        return [ConfigError(where, "transformers is not installed", write="pip install 'autolaunch[hf]'")]
    errors: list[ConfigError] = []
    if is_chat and config["chat_template"] is None and not has_template(place):
        errors.append(no_template(tokenizer))
    if config.get("chat_template") is not None:
        try:
            template_text(config["chat_template"])
        except ConfigError as error:
            errors.append(error)
    file = next(
        (file for file in files if file.suffix == ".json" and file.name in (place.name, "tokenizer.json")), None
    )
    if file is None:
        return errors
    try:
        size = tokenizer_vocabulary(json.loads(file.read_text("utf-8")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return [*errors, ConfigError(where, "not a tokenizer of the library `tokenizers`")]
    return errors + _vocabulary_error(where, size, vocab_size)


def tokenizer_vocabulary(tokenizer: dict[str, Any]) -> int:
    """One more than the largest token id of a tokenizer.json."""
    vocabulary = tokenizer["model"]["vocab"]
    ids = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
    return 1 + max([*ids, *(token["id"] for token in tokenizer.get("added_tokens") or [])])


def missing_tokenizers(tokenizer: str) -> ConfigError:
    """The error for a tokenizer.json without the library that reads it."""
    return ConfigError(
        f"data.tokenizer={tokenizer}",
        "a tokenizer file needs the library `tokenizers`, which is not installed",
        "bytes, or a tokenizer.json with `tokenizers` installed",
        "pip install 'autolaunch[hf]'",
    )


def _token_errors(config: dict[str, Any], vocab_size: int | None) -> list[ConfigError]:
    if config["path"] is None:
        return [
            ConfigError(
                "data=tokens",
                "no file is given",
                "data.path: a .bin or .npy file, a directory, a glob, or a list of them",
                "data.path=tokens.bin",
            )
        ]
    keys = ["path", *(key for key in ("validation_path", "test_path") if config[key] is not None)]
    errors: list[ConfigError] = []
    counts: dict[str, int] = {}
    for key in keys:
        name = f"data.{key}"
        try:
            files = find_files(config[key], TOKEN_SUFFIXES, name)
        except ConfigError as error:
            errors.append(error)
            continue
        faults = [fault for file in files if (fault := _token_file_error(file, config["dtype"], name))]
        if not faults:
            counts[key] = sum(
                window_count(token_file_length(file, config["dtype"]), config["seq_len"]) for file in files
            )
            faults = _first_unknown_token(files, config["dtype"], vocab_size, name)
        errors += faults
    if len(counts) < len(keys):
        return errors
    if "test_path" in counts:
        errors += nothing_to_test(config, "data.test_path", counts["test_path"])
    if "validation_path" in counts:
        training, validation = counts["path"], counts["validation_path"]
        wanted = True
    else:
        training, validation = split_counts(counts["path"], config["validation_fraction"], config["batch_size"])
        wanted = bool(config["validation_fraction"])
    return errors + amount_errors(config, f"data.path={config['path']}", training, validation if wanted else None)


def _token_file_error(file: Path, dtype: str, key: str) -> ConfigError | None:
    where = f"{key}={file}"
    if file.suffix == ".npy":
        try:
            npy_length(file)
        except (OSError, ValueError) as error:
            return ConfigError(
                where, f"not a .npy file of tokens ({error})", "one dimension of integers, as numpy.save writes"
            )
    elif file.suffix == ".bin":
        size = file.stat().st_size
        if size % ITEM_SIZES[dtype]:
            return ConfigError(
                where,
                f"{size} bytes are no whole number of {dtype} tokens",
                f"a multiple of {ITEM_SIZES[dtype]} bytes, or another data.dtype",
            )
    else:
        return ConfigError(where, f"a file that ends in {file.suffix or 'nothing'}", "files that end in .bin or .npy")
    return None


def _first_unknown_token(files: list[Path], dtype: str, vocab_size: int | None, key: str) -> list[ConfigError]:
    """A wrong vocabulary shows in the first tokens; the rest of a file of any size is looked at when it is read."""
    if vocab_size is None:
        return []
    from autolaunch.data.windows import TokenFile, unknown_token

    for file in files[:16]:
        whole = TokenFile(file, dtype)
        tokens = whole[: _SAMPLE_BYTES // 8]
        (places,) = ((tokens < 0) | (tokens >= vocab_size)).nonzero()
        if len(places):
            return [unknown_token(whole, int(tokens[places[0]]), int(places[0]), vocab_size, key)]
    return []


def _synthetic_errors(config: dict[str, Any], vocab_size: int | None) -> list[ConfigError]:
    where = f"data.num_sequences={config['num_sequences']}"
    errors = amount_errors(config, where, config["num_sequences"], None)
    return errors + _vocabulary_error(f"data.vocab_size={config['vocab_size']}", config["vocab_size"], vocab_size)
