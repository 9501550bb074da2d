"""What a job records about itself: the same training is recognised however it is written, another one is not."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autolaunch.config.against_schema import validate
from autolaunch.config.recorded import recorded
from autolaunch_strategies.checkpoint.record import changes


def record(**groups: Any) -> dict[str, Any]:
    named = {"model": {"name": "llama"}, "data": {"name": "text"}, "launch": {"name": "local"}}
    config = {
        key: {**named.get(key, {}), **value} if isinstance(value, dict) else value for key, value in groups.items()
    }
    values, errors = validate({**named, **config})
    assert errors == []
    return recorded(values)


def changed(one: dict[str, Any], other: dict[str, Any]) -> set[str]:
    return set(changes(record(**one), record(**other)))


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        pytest.param({}, {"seed": 1}, {"seed"}, id="seed"),
        pytest.param({}, {"data": {"batch_size": 32}}, {"batch_size"}, id="batch"),
        pytest.param({}, {"data": {"seq_len": 128}}, {"seq_len"}, id="length"),
        pytest.param({}, {"optimizer": {"name": "adam"}}, {"optimizer"}, id="optimizer"),
        pytest.param(
            {}, {"optimizer": {"name": "custom", "_target_": "torch.optim.AdamW"}}, set(), id="optimizer-by-its-path"
        ),
        pytest.param(
            {}, {"optimizer": {"name": "custom", "_target_": "my.Optimizer"}}, set(), id="optimizer-known-when-built"
        ),
        pytest.param({}, {"data": {"shuffle": False}}, {"data"}, id="order"),
        pytest.param({}, {"data": {"validation_fraction": 0.1}}, {"data"}, id="split"),
        pytest.param({}, {"data": {"num_workers": 2}, "launch": {"devices": 2}, "compile": True}, set(), id="speed"),
        pytest.param(
            {"data": {"name": "synthetic"}}, {"data": {"name": "synthetic", "num_sequences": 100}}, {"data"},
            id="synthetic",
        ),
        pytest.param(
            {"data": {"name": "synthetic"}}, {"data": {"name": "synthetic", "num_validation_sequences": 8}}, set(),
            id="validation",
        ),
        pytest.param(
            {"data": {"name": "custom", "_target_": "a.B", "root": "x"}},
            {"data": {"name": "custom", "_target_": "a.B", "root": "y"}}, {"data"}, id="data-module",
        ),
        pytest.param({}, {"model": {"rope_theta": 5e5}}, {"model"}, id="arithmetic"),
        pytest.param(
            {"model": {"size": "8b"}}, {"model": {"size": "8b", "hidden_size": 4096}}, set(), id="the-same-shape"
        ),
        pytest.param({}, {"model": {"init_std": 0.1}}, set(), id="initial-weights"),
        pytest.param(
            {},
            {"optimizer": {"lr": 0.1}, "trainer": {"max_steps": 7}, "scheduler": {"name": "linear"}},
            {"optimizer.lr", "trainer.max_steps", "scheduler.name"},
            id="settings",
        ),
        pytest.param(
            {"module": {"_target_": "a.B", "width": 2}}, {"module": {"_target_": "a.B", "width": 3}}, {"model"},
            id="module",
        ),
        pytest.param(
            {"module": {"_target_": "a.B"}}, {"module": {"_target_": "a.B"}, "optimizer": {"lr": 1.0}}, set(),
            id="what-a-module-does-not-use",
        ),
    ],
)  # fmt: skip
def test_what_has_changed(one: dict[str, Any], other: dict[str, Any], expected: set[str]) -> None:
    assert changed(one, other) == expected


def test_data_are_known_by_their_files_and_not_by_their_place(tmp_path: Path) -> None:
    tokens = np.arange(100_000, dtype=np.uint16) % 256
    for place in ("here", "there"):
        (tmp_path / place).mkdir()
        np.save(tmp_path / place / "a.npy", tokens)
        np.save(tmp_path / place / "b.npy", tokens[:999])
    os.utime(tmp_path / "there" / "a.npy", (1, 1))

    def at(path: Any) -> dict[str, Any]:
        return {"data": {"name": "tokens", "path": path}}

    here = at(f"{tmp_path}/here")
    assert changed(here, at(f"{tmp_path}/there")) == set()
    assert changed(here, at(f"{tmp_path}/there/*.npy")) == set()
    assert changed(here, at(f"{tmp_path}/there/a.npy")) == {"data"}
    assert changed(here, at([f"{tmp_path}/here/b.npy", f"{tmp_path}/here/a.npy"])) == {"data"}
    np.save(tmp_path / "there" / "b.npy", tokens[1:1000])
    assert changed(here, at(f"{tmp_path}/there")) == {"data"}


def test_text_and_tokenizer_are_known_by_their_content(tmp_path: Path) -> None:
    for name, text in (("a.txt", "one"), ("b.txt", "two"), ("c.txt", "one"), ("t.json", "{}"), ("u.json", "{ }")):
        (tmp_path / name).write_text(text * 400)
    one, two, three = ({"data": {"path": f"{tmp_path}/{name}.txt"}} for name in "abc")
    assert changed(one, two) == {"data"}
    assert changed(one, three) == set()
    assert changed(one, {}) == {"data"}
    first, second = ({"data": {**one["data"], "tokenizer": f"{tmp_path}/{name}.json"}} for name in "tu")
    assert changed(first, second) == {"data"}


def test_models_of_transformers_are_known_by_their_config() -> None:
    pytest.importorskip("transformers")
    small = {"name": "hf", "config": {"model_type": "qwen3", "hidden_size": 32}}
    large = {"name": "hf", "config": {"model_type": "qwen3", "hidden_size": 64}}
    assert changed({"model": small}, {"model": {**small, "attn_implementation": "eager"}}) == set()
    assert changed({"model": small}, {"model": large}) == {"model"}
