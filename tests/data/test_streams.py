"""data.streaming, sources with weights, and datasets by name: which sequences come when, on every rank, resumed or not."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autolaunch.config.schema import DATA
from autolaunch.data import build_data
from autolaunch.data.order import BatchOrder, shared_out
from autolaunch.data.present import check_data
from autolaunch.data.rows_of_files import open_sequences
from autolaunch_strategies.config import ConfigError, ConfigErrors
from tests.data.test_loader import OnRank, Recorder, SaveAt, train
from tests.support.messages import Told, assert_only_told

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def config(**changes: Any) -> dict[str, Any]:
    fixed = {"batch_size": 4, "microbatches": 2, "seq_len": 8, "tokenizer": "bytes", "path": "texts.jsonl"}
    return {**dataclasses.asdict(DATA["documents"]()), **fixed, **changes}


def streamed(**changes: Any) -> dict[str, Any]:
    return config(streaming=True, shuffle_buffer=5, **changes)


def write(name: str, first: int, count: int) -> None:
    """Row i is the character of number i, twice."""
    rows = (json.dumps({"text": chr(number) * 2}) for number in range(first, first + count))
    Path(name).write_text("".join(f"{row}\n" for row in rows))


def first_tokens(data: Any, steps: int, **options: Any) -> list[list[int]]:
    return train(steps, data=build(data), **options).batches


def build(data: Any) -> Any:
    return build_data(data, 3)


def of_one_process(data: dict[str, Any], steps: int) -> list[list[int]]:
    return first_tokens(data, steps, max_epochs=-1)


KINDS = {
    "plain": {},
    "in order": {"shuffle": False},
    "packed": {"packing": "documents"},
    "with a worker": {"num_workers": 1},
    "several files": {"path": ["a.jsonl", "b.jsonl"]},
    "weights": {"path": [{"path": "a.jsonl", "weight": 3}, {"path": "b.jsonl", "weight": 1}]},
}


@pytest.mark.parametrize("kind", KINDS)
def test_streams_are_the_same_on_every_rank_and_go_on_exactly(kind: str, tmp_path: Path) -> None:
    for name, first, count in (("texts", 40, 27), ("a", 40, 19), ("b", 80, 8)):
        write(f"{name}.jsonl", first, count)
    data = streamed(**KINDS[kind])
    # Six steps of four, three rows left over; packed into half as many.
    everything = of_one_process(data, 16)
    assert len(everything) == 32
    epoch = list(itertools.chain(*everything[:6]))
    if kind == "in order":
        assert epoch == list(range(40, 40 + len(epoch)))
    elif kind != "weights":
        assert len(set(epoch)) == len(epoch) and epoch != sorted(epoch)
    for saved, dp_size in ((1, 1), (6, 2), (9, 1)):
        checkpoint = tmp_path / f"{saved}.ckpt"
        before = train(saved, data=build(data), strategy=OnRank(0, 1), callbacks=[SaveAt(saved, checkpoint)])
        assert before.batches == everything[: 2 * saved]
        parts = [
            first_tokens(data, 16, resume=checkpoint, strategy=OnRank(rank, dp_size)) for rank in range(dp_size)
        ]
        assert [list(itertools.chain(*both)) for both in zip(*parts, strict=True)] == everything[2 * saved :]
