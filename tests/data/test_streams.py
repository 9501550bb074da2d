"""Streams, sources with weights, datasets by name: which sequences come when, on every rank, resumed or not."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autolaunch.config.schema import DATA
from autolaunch.data import build_data
from autolaunch.data.order import shared_out
from autolaunch.data.present import check_data
from autolaunch.data.rows_of_files import open_sequences
from autolaunch_strategies.config import ConfigError, ConfigErrors
from autolaunch_strategies.lightning.strategy import MeshStrategy
from tests.data.test_loader import SaveAt, train
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


class OnRank(MeshStrategy):
    """One process that takes the share of one rank of several."""

    def __init__(self, dp_rank: int, dp_size: int) -> None:
        super().__init__(mesh="1")
        self.share = dp_rank, dp_size

    @property
    def dp_rank(self) -> int:
        return self.share[0]

    @property
    def dp_size(self) -> int:
        return self.share[1]


def first_tokens(data: Any, steps: int, dp_rank: int = 0, dp_size: int = 1, **options: Any) -> list[list[int]]:
    return train(steps, data=build(data), strategy=OnRank(dp_rank, dp_size), **options).batches


def build(data: Any) -> Any:
    return build_data(data, 3)


KINDS = {
    "plain": {},
    "in order": {"shuffle": False},
    "packed": {"packing": "documents"},
    "with a worker": {"num_workers": 1},
    "several files": {"path": ["a.jsonl", "b.jsonl"]},
    "weights": {"path": [{"path": "a.jsonl", "weight": 3}, {"path": "b.jsonl", "weight": 1}]},
}


DAILY = ("packed", "weights")


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in DAILY else pytest.mark.full) for kind in KINDS]
)
def test_streams_are_the_same_on_every_rank_and_go_on_exactly(kind: str, tmp_path: Path) -> None:
    for name, first, count in (("texts", 40, 27), ("a", 40, 19), ("b", 80, 8)):
        write(f"{name}.jsonl", first, count)
    data = streamed(**KINDS[kind])
    # Six steps of four, three rows left over; packed into half as many.
    everything = first_tokens(data, 16)
    assert len(everything) == 32
    epoch = list(itertools.chain(*everything[:6]))
    if kind == "in order":
        assert epoch == list(range(40, 40 + len(epoch)))
    elif kind != "weights":
        assert len(set(epoch)) == len(epoch) and epoch != sorted(epoch)
    for saved, dp_size in ((1, 1), (6, 2), (9, 1)):
        checkpoint = tmp_path / f"{saved}.ckpt"
        assert first_tokens(data, saved, callbacks=[SaveAt(saved, checkpoint)]) == everything[: 2 * saved]
        parts = [first_tokens(data, 16, rank, dp_size, resume=checkpoint) for rank in range(dp_size)]
        assert [list(itertools.chain(*both)) for both in zip(*parts, strict=True)] == everything[2 * saved :]


@pytest.mark.parametrize("weights", [(1.0, 1.0), (0.7, 0.3), (1.0, 5.0, 2.0, 0.01)])
def test_shares_hold_in_every_window(weights: tuple[float, ...]) -> None:
    source, number = shared_out(np.arange(3000), weights)
    for which, weight in enumerate(weights):
        mine = source == which
        assert number[mine].tolist() == list(range(mine.sum()))
        counts = np.concatenate([[0], np.cumsum(mine)])
        for window in (7, 100, 1000):
            share = window * weight / sum(weights)
            assert np.abs(counts[window:] - counts[:-window] - share).max() <= len(weights)


def test_sources_with_weights_on_every_rank() -> None:
    write("a.jsonl", 40, 20)
    write("b.jsonl", 80, 10)
    sources = [{"path": "a.jsonl", "weight": 0.25}, {"path": "b.jsonl", "weight": 0.75}]
    data = config(path=sources, validation_fraction=0.2)
    parts = open_sequences(data, 0)
    assert list(parts.weights) == [(16, 0.25), (8, 0.75)]
    held_out = parts.validation.batch(np.arange(6))["input_ids"][:, 0]
    assert held_out.tolist() == [56, 57, 58, 59, 88, 89]  # the last ones of each

    everything = list(itertools.chain(*first_tokens(data, 16)))
    for start in range(0, 64, 4):
        assert sum(token >= 80 for token in everything[start : start + 4]) == 3
    of_a, of_b = [token for token in everything if token < 80], [token for token in everything if token >= 80]
    assert sorted(of_a) == list(range(40, 56))
    for epoch in range(6):  # while the first source is visited once
        assert sorted(of_b[8 * epoch : 8 * epoch + 8]) == list(range(80, 88))
    assert of_b[:8] != of_b[8:16]
    parts_of_ranks = [first_tokens(data, 16, rank, 2) for rank in range(2)]
    together = [token for both in zip(*parts_of_ranks, strict=True) for part in both for token in part]
    assert together == everything


A = {"path": "a.jsonl", "weight": 1}
WRONG = [
    pytest.param({"path": [A, "b.jsonl"]}, Told("data.path: b.jsonl", "no weight", write=None), id="half weighted"),
    pytest.param({"path": [{**A, "weight": 0}]}, Told("data.path: weight=0", "share"), id="no share"),
    pytest.param({"path": [{**A, "wieght": 1}]}, Told("data.path: wieght", "weight"), id="unknown key"),
    pytest.param({"path": [{"weight": 1}]}, Told("data.path={'weight': 1}", "without a path"), id="no path"),
    pytest.param({"validation_path": [A]}, Told("data.validation_path: weight=1", "no effect"), id="of validation"),
    pytest.param({"path": "saved/texts"}, Told("data.path=saved/texts", "no such file"), id="no such directory"),
    pytest.param({"path": "owner/a.jsonl"}, Told("data.path=owner/a.jsonl", "no such file"), id="no such file"),
    pytest.param({"split": "train"}, Told("data.split=train", "no effect"), id="split of a file"),
    pytest.param({"subset": "en"}, Told("data.subset=en", "no effect"), id="subset of a file"),
    pytest.param(
        {"path": "saved", "split": "tset"}, Told("data.path=saved", "tset", "test", write="data.split=test"), id="split"
    ),
    pytest.param(
        {"shuffle_buffer": 9}, Told("data.shuffle_buffer=9", "no effect", write="data.shuffle_buffer=null"), id="buffer"
    ),
    pytest.param(
        {"streaming": True, "validation_fraction": 0.1},
        Told("data.validation_fraction=0.1", "streaming", write="data.validation_path=validation.jsonl"),
        id="validation of a stream",
    ),
    pytest.param(
        {"streaming": True, "num_workers": 2},
        Told("data.num_workers=2", "tokenise", write="data.num_workers=1"),
        id="workers",
    ),
]


@pytest.mark.parametrize(("changes", "told"), WRONG)
def test_wrong_sources(changes: dict[str, Any], told: Told) -> None:
    write("a.jsonl", 40, 3)
    write("b.jsonl", 40, 3)
    Path("saved").mkdir()
    Path("saved/dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert_only_told(ConfigErrors(check_data(config(**{"path": "a.jsonl", **changes}), 1, None)), told)


def test_what_goes_wrong_in_a_stream() -> None:
    write("texts.jsonl", 40, 20)
    with Path("texts.jsonl").open("a") as file:
        file.write("{oops}\n[1]\n")
    for workers in (0, 1):
        with pytest.raises(ConfigErrors, match=r"(?s)^texts.jsonl:21: not JSON.*\ntexts.jsonl:22: a list"):
            first_tokens(streamed(num_workers=workers), 16)
    assert len(first_tokens(streamed(on_bad="skip"), 5)) == 10
    with pytest.raises(ConfigError, match="fewer than 64 sequences"):
        first_tokens(streamed(on_bad="skip", batch_size=64), 1)
    with pytest.raises(ConfigError, match="nothing in it to train on"):
        first_tokens(streamed(on_bad="skip", seq_len=1), 1)
