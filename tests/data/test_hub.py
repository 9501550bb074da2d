"""Datasets of the hub by name, from the cache of `datasets`; what is said where there is none, and saved datasets."""

from __future__ import annotations

import dataclasses
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("datasets")

import datasets
import huggingface_hub

from autolaunch.config.schema import DATA
from autolaunch.data import hub
from autolaunch.data.present import check_data
from autolaunch.data.rows_of_files import open_rows, open_sequences
from autolaunch.data.sources import find_sources
from autolaunch_strategies.config import ConfigErrors
from tests.support.messages import Told, assert_only_told

pytestmark = pytest.mark.full  # importing `datasets` takes seconds

TEXTS = [chr(number) * 2 for number in range(40, 60)]


@pytest.fixture(autouse=True)
def without_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hub")
    reaches(monkeypatch, None)
    hub._splits.cache_clear()
    hub._loaded.cache_clear()
    hub._streamed.cache_clear()


def reaches(monkeypatch: pytest.MonkeyPatch, endpoint: str | None) -> None:
    """Let the hub be at `endpoint`, or nowhere."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1" if endpoint is None else "0")
    monkeypatch.setattr(hub, "_has_no_network", lambda: endpoint is None)
    for settings in (datasets.config, huggingface_hub.constants):
        monkeypatch.setattr(settings, "HF_HUB_OFFLINE", endpoint is None)
    if endpoint is not None:
        monkeypatch.setattr(datasets.config, "HF_ENDPOINT", endpoint)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_ETAG_TIMEOUT", 120)


def config(**changes: Any) -> dict[str, Any]:
    fixed = {"batch_size": 2, "seq_len": 8, "tokenizer": "bytes", "path": "owner/texts", "validation_fraction": 0.0}
    return {**dataclasses.asdict(DATA["documents"]()), **fixed, **changes}


def first_tokens(data: dict[str, Any]) -> list[int]:
    sequences: Any = open_sequences(data, 0).training
    return sequences.batch(np.arange(len(sequences)))["input_ids"][:, 0].tolist()


def in_the_cache(subset: str = "default", commit: str = "") -> None:
    """What `datasets` leaves behind when it has downloaded a subset of owner/texts."""
    Path("texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    datasets.load_dataset("json", data_files={"train": "texts.jsonl", "test": "texts.jsonl"})
    (made,) = (file.parent for file in Path("hub").glob("json/*/*/*/dataset_info.json"))
    there = Path("hub/owner___texts") / subset / "0.0.0" / (commit or made.name)
    there.parent.mkdir(parents=True)
    made.rename(there)
    for file in there.glob("json-*.arrow"):
        file.rename(file.with_name(file.name.replace("json-", "texts-")))
    info = json.loads((there / "dataset_info.json").read_text())
    (there / "dataset_info.json").write_text(json.dumps({**info, "dataset_name": "texts", "config_name": subset}))


def test_a_dataset_that_was_downloaded_before() -> None:
    in_the_cache()
    codes = [ord(text[0]) for text in TEXTS]
    assert check_data(config(), 1, None) == []
    assert first_tokens(config()) == codes
    assert first_tokens(config(split="train[:25%]+test[:1]")) == [*codes[:5], codes[0]]
    opened = open_rows(config(split="test"), "path")
    assert opened.prepared.place(3) == "owner/texts (test), row 4"
    told = Told("data.path=owner/texts", "no split tset", "did you mean test", write="data.split=test")
    assert_only_told(ConfigErrors(check_data(config(split="tset"), 1, None)), told)

    streams: Any = open_sequences(config(streaming=True, shuffle=False), 0).training
    state, seen = None, []
    for _ in range(4):  # left after each step
        chosen, _, state = next(streams.steps(state, 5, tell=False))
        seen += [int(drawn.block.batch(np.asarray([drawn.index]))["input_ids"][0, 0]) for drawn in chosen]
        state = json.loads(json.dumps(state))
    assert seen == codes


def test_another_stream_is_not_gone_on_with() -> None:
    def known_by(subset: str, split: str = "train") -> bytes:
        hub._streamed.cache_clear()
        ((rows,),) = (
            source.rows for source in find_sources(config(streaming=True, subset=subset, split=split), "path")
        )
        return rows.head(4096)

    for subset in ("english", "french"):
        in_the_cache(subset, "a" * 40)
    begun = known_by("english")
    assert known_by("english") == begun
    assert len({begun, known_by("english", "test"), known_by("french")}) == 3
    there = Path("hub/owner___texts/english/0.0.0")
    (there / ("a" * 40)).rename(there / ("b" * 40))
    assert known_by("english") != begun  # a later revision


class _Refuses(http.server.BaseHTTPRequestHandler):
    code = ""

    def do_GET(self) -> None:
        self.send_response(404 if self.code == "RepoNotFound" else 403)
        self.send_header("X-Error-Code", self.code)
        self.send_header("X-Error-Message", self.code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_POST = do_GET

    def log_message(self, *_: Any) -> None:
        return


@pytest.fixture
def server() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Refuses) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()


def test_what_cannot_be_had(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def told_of(**changes: Any) -> ConfigErrors:
        return ConfigErrors(check_data(config(**changes), 1, None))

    assert_only_told(told_of(), Told("data.path=owner/texts", "no such file", "cannot be reached"))
    reaches(monkeypatch, server)
    _Refuses.code = "RepoNotFound"
    assert_only_told(told_of(), Told("data.path=owner/texts", "no such file", "no dataset"))
    _Refuses.code = "GatedRepo"
    assert_only_told(told_of(), Told("data.path=owner/texts", "gated", write="hf auth login"))
    monkeypatch.setattr(hub.importlib.util, "find_spec", lambda name: None)
    told = Told("data.path=owner/texts", "not installed", write="pip install 'autolaunch[data]'")
    assert_only_told(told_of(path="owner/texts"), told)


def test_saved_datasets() -> None:
    in_the_cache()
    both = datasets.DatasetDict({name: datasets.load_dataset("owner/texts", split=name) for name in ("train", "test")})
    both["train"].save_to_disk("one")
    both.save_to_disk("both")
    codes = [ord(text[0]) for text in TEXTS]
    assert first_tokens(config(path="one")) == first_tokens(config(path="both")) == codes
    assert first_tokens(config(path=["one", {"path": "both", "split": "test"}])) == codes * 2
