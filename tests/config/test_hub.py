"""model.path=OWNER/NAME: the hub's library against a server and a cache on this machine."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from autolaunch.config import hub
from autolaunch.config.tokenizer import with_tokenizer
from autolaunch_strategies.config import ConfigError
from tests.support.hub import COMMIT, Hub, serving
from tests.support.messages import Told, assert_only_told

pytest.importorskip("huggingface_hub")

FILES = {
    "config.json": '{"model_type": "llama"}', "tokenizer.json": "{}", "pytorch_model.bin": "not wanted",
    "model.safetensors.index.json": '{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}',
    "model-1.safetensors": "1", "model-2.safetensors": "2", "consolidated.safetensors": "not wanted",
}  # fmt: skip
WEIGHTS = {"model-1.safetensors", "model-2.safetensors"}


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    from huggingface_hub import constants

    model = tmp_path / "model"
    model.mkdir()
    for name, text in FILES.items():
        (model / name).write_text(text)
    (tmp_path / "pickled").mkdir()
    (tmp_path / "pickled" / "config.json").write_text("{}")
    with serving(
        Hub({"org/tiny": model, "org/gated": model, "org/pickled": tmp_path / "pickled"}, ("org/gated",))
    ) as it:
        # The library reads its variables once, when it is imported.
        monkeypatch.setattr(constants, "ENDPOINT", it.endpoint)
        files = it.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr("huggingface_hub.file_download.HUGGINGFACE_CO_URL_TEMPLATE", files, raising=False)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", files)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        hub._small_files.cache_clear()
        yield it


def job(path: str | None, **model: Any) -> dict[str, Any]:
    model = {"name": "hf", "path": path, "revision": None, "pretrained": True, **model}
    return {"task": "fit", "module": None, "model": model, "data": {"name": "documents", "tokenizer": None}}


def files_at(path: str) -> set[str]:
    return {file.name for file in Path(path).iterdir()}


def fetched(path: str, **model: Any) -> str:
    config = hub.with_hub_directory(job(path, **model))
    hub.fetch_weights(config)
    return config["model"]["path"]


def test_a_name_becomes_a_directory_and_is_downloaded_once(
    server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = hub.with_hub_directory(job("org/tiny", revision="v1"))
    path = config["model"]["path"]
    assert path.endswith(f"/models--org--tiny/snapshots/{COMMIT}") and config["model"]["revision"] is None
    assert files_at(path) == {"config.json", "tokenizer.json", "model.safetensors.index.json"}  # nothing large yet
    assert with_tokenizer(config)["data"]["tokenizer"] == path
    hub.fetch_weights({**config, "task": "plan"})
    assert not files_at(path) & WEIGHTS
    hub.fetch_weights(config)
    assert files_at(path) == set(FILES) - {"pytorch_model.bin", "consolidated.safetensors"}
    assert "2 files" in capsys.readouterr().err
    asked = len(server.requests)
    hub.fetch_weights(config)
    assert hub.with_hub_directory(job("org/tiny", revision="v1")) == config
    assert len(server.requests) == asked
    # A directory of one's own is no name of the hub, whatever it is called.
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "tiny").mkdir(parents=True)
    assert hub.with_hub_directory(job("org/tiny"))["model"]["path"] == "org/tiny"
    # Without a network the cache serves, and says what it lacks.
    monkeypatch.chdir("/")
    server.requests.clear()
    monkeypatch.setattr(hub, "_small_files", hub._small_files.__wrapped__)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    assert fetched("org/tiny", revision="v1") == path
    with pytest.raises(ConfigError) as caught:
        fetched("org/other")
    assert_only_told(
        caught.value,
        Told("model.path=org/other", "can't be reached", "cache", allowed=None, write=None),
    )
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (Path(path) / "model-2.safetensors").unlink()
    with pytest.raises(ConfigError) as caught:
        fetched("org/tiny", revision="v1")
    assert_only_told(
        caught.value,
        Told("model.path=org/tiny", "HF_HUB_OFFLINE", allowed=("HF_HOME", "HF_ENDPOINT"),
             write="hf download org/tiny, where there is a network"),
    )  # fmt: skip
    assert not server.requests


LOGIN = "hf auth login, or HF_TOKEN=... before the command"


@pytest.mark.parametrize(
    ("path", "model", "told"),
    [
        pytest.param("org/absent", {}, Told("model.path=org/absent", "no such model", write=LOGIN), id="absent"),
        pytest.param("org/gated", {}, Told("model.path=org/gated", "asked for", write=LOGIN), id="gated"),
        pytest.param(
            "org/tiny",
            {"revision": "v9"},
            Told("model.revision=v9", "no such revision", write="model.revision=null"),
            id="revision",
        ),
        pytest.param(
            "org/pickled",
            {},
            Told("model.path=org/pickled", "no model.safetensors", write="model.pretrained=false for random weights"),
            id="pickled",
        ),
        pytest.param("or..g/x", {}, Told("model.path=or..g/x", "no such directory"), id="no-name"),
        pytest.param(
            None, {"revision": "v1"}, Told("model.revision=v1", "no effect", write="model.revision=null"), id="nothing"
        ),
    ],
)
def test_what_cannot_be_had_is_one_message(server: Hub, path: str, model: dict[str, Any], told: Told) -> None:
    with pytest.raises(ConfigError) as caught:
        fetched(path, **model)
    assert_only_told(caught.value, told)


def test_a_full_disk(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("huggingface_hub.file_download._chmod_and_move", full)
    with pytest.raises(ConfigError) as caught:
        fetched("org/tiny")
    assert_only_told(caught.value, Told("model.path=org/tiny", "space", write="HF_HOME=DIRECTORY before the command"))
