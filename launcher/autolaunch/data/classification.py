"""data=classification: texts with a label each, tokenised when a batch of them is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from autolaunch.data.counts import no_validation, split_counts
from autolaunch.data.labelled_rows import SINGLE, Labelled, labelled, labels_of
from autolaunch.data.present import amount_errors, nothing_to_test
from autolaunch.data.rows import BadRow
from autolaunch.data.sources import find_sources
from autolaunch.data.tokenizers import load_tokenizer
from autolaunch.data.windows import Parts
from autolaunch_strategies.config import ConfigError, raise_all

_TOLD = 5
"""Bad rows that are named before the rest is not looked at."""


class LabelledTexts:
    """Texts with labels, numbered; a batch of them is tokenised when it is asked for.

    Args:
        rows: in memory.
        config: the fields of `autolaunch.config.schema.ClassificationData`.
    """

    def __init__(self, rows: Sequence[Labelled], config: dict[str, Any]) -> None:
        self.rows, self.config = rows, config
        self.notes: Sequence[str] = ()
        _, problem, self.pad = config["of_model"]
        self._type = np.int64 if problem == SINGLE else np.float32

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """The texts `indices` (int64 [b]) as `input_ids` and `attention_mask`, int64 [b, seq_len], and `labels`.

        Padded on the right. Labels are int64 [b]: classes; or float32 [b] or [b, n]: numbers, or 1 for each of several
        labels. Of two texts the tokenizer may also give `token_type_ids`.
        """
        rows = [self.rows[int(index)] for index in indices]
        columns = self._encoded(rows)
        length = self.config["seq_len"]
        batch = {}
        for name, fill in (("input_ids", self.pad), ("attention_mask", 0), ("token_type_ids", 0)):
            if name in columns:
                batch[name] = np.full((len(rows), length), fill, np.int64)
                for place, values in enumerate(columns[name]):
                    batch[name][place, : len(values)] = values
        return {**batch, "labels": np.asarray([row.label for row in rows], self._type)}

    def _encoded(self, rows: list[Labelled]) -> dict[str, list[list[int]]]:
        length, tokenizer = self.config["seq_len"], self.config["tokenizer"]
        texts = [row.text for row in rows]
        if tokenizer == "bytes":
            pairs = [b"" if row.pair is None else bytes(f"\n{row.pair}", "utf-8", "replace") for row in rows]
            ids = [
                list((text.encode(errors="replace") + pair)[:length]) for text, pair in zip(texts, pairs, strict=True)
            ]
            return {"input_ids": ids, "attention_mask": [[1] * len(row) for row in ids]}
        has_pairs = self.config["pair_key"] is not None
        pairs_of = [row.pair or "" for row in rows] if has_pairs else None
        encoded = load_tokenizer(tokenizer)(
            texts, pairs_of, truncation=True, max_length=length, padding=False, verbose=False
        )
        names = ("input_ids", "attention_mask", *(("token_type_ids",) if has_pairs else ()))
        return {name: encoded[name] for name in names if name in encoded}


def open_sequences(config: dict[str, Any], seed: int) -> Parts:
    """The texts of a `ClassificationData` config, resolved.

    Raises:
        ConfigError, ConfigErrors: files or a tokenizer that are absent or unreadable; bad rows, by file and line; fewer
            texts than a batch.
    """
    rows, notes = _rows(config, "path")
    if config["validation_path"] is None:
        fraction = config["validation_fraction"]
        first, kept = split_counts(len(rows), fraction, config["batch_size"])
        notes += no_validation(len(rows), fraction, kept)
        parts = LabelledTexts(rows[:first], config), LabelledTexts(rows[first:], config)
        wanted = kept > 0 or bool(fraction)
    else:
        parts = LabelledTexts(rows, config), LabelledTexts(_rows(config, "validation_path")[0], config)
        wanted = True
    where = f"data.path={config['path']}"
    raise_all(amount_errors(config, where, len(parts[0]), len(parts[1]) if wanted else None))
    parts[0].notes = notes
    if config["test_path"] is None:
        return Parts(*parts)
    test = LabelledTexts(_rows(config, "test_path")[0], config)
    raise_all(nothing_to_test(config, "data.test_path", len(test)))
    return Parts(*parts, test)


def _rows(config: dict[str, Any], key: str) -> tuple[list[Labelled], list[str]]:
    """(the rows of the files that `key` names, what the person should know of them)."""
    labels = labels_of(config)
    good: list[Labelled] = []
    bad: list[ConfigError] = []
    for part in (rows for source in find_sources(config, key) for rows in source.rows):
        for number, row, _ in part.read():
            try:
                if isinstance(row, BadRow):
                    raise row
                good.append(labelled(row, config, labels))
            except BadRow as error:
                skip = "data.on_bad=skip, to leave such rows out"
                write = f"{error.write}; or {skip}" if error.write else skip
                bad.append(ConfigError(part.place(number), str(error), error.allowed, write))
                if config["on_bad"] == "refuse" and len(bad) == _TOLD:
                    raise_all(bad)
    if config["on_bad"] == "refuse":
        raise_all(bad)
    if not good:
        raise ConfigError(f"data.{key}={config[key]}", "there are no rows in it" if not bad else "all rows are bad")
    if not bad:
        return good, []
    rows = f"{len(bad)} bad row{'' if len(bad) == 1 else 's'}"
    return good, [f"data.{key}: {rows} left out; the first: {bad[0].where}"]
