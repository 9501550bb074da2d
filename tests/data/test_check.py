"""What is said about wrong data before any process starts."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from autolaunch.config.schema import DATA
from autolaunch.data.present import check_data, tokenizer_vocabulary
from autolaunch_strategies.config import ConfigErrors
from tests.support.messages import Told, assert_only_told

MODEL = SimpleNamespace(vocab_size=512, max_seq_len=1024)


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("good.txt").write_text("a" * 20_000)
    Path("short.txt").write_text("a" * 1000)
    Path("empty.txt").touch()
    Path("folder").mkdir()
    (Path("folder") / "empty.txt").touch()
    (Path("folder") / "picture.png").write_bytes(b"x")
    np.arange(20_000, dtype=np.uint16).__mod__(500).tofile("good.bin")
    np.full(20_000, 600, np.uint16).tofile("large.bin")
    Path("odd.bin").write_bytes(b"abc")
    Path("tokens.dat").write_bytes(b"abcd")
    np.save("float.npy", np.zeros(100))
    np.save("matrix.npy", np.zeros((10, 10), np.int32))
    np.save("good.npy", np.zeros(20_000, np.int32))
    np.save("few.npy", np.zeros(256, np.int32))
    Path("cut.npy").write_bytes(Path("good.npy").read_bytes()[:1128])
    Path("broken.npy").write_bytes(b"no header here")
    Path("tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 599}]}))
    Path("broken.json").write_text("{}")
    Path("model").mkdir()
    (Path("model") / "tokenizer.json").write_text("{}")


def told_of(kind: str, dp: int = 1, **changes: Any) -> ConfigErrors:
    """All that is said about a config of data."""
    config = {**dataclasses.asdict(DATA[kind]()), **changes}
    return ConfigErrors(check_data(config, dp, MODEL))


GOOD = [
    pytest.param("text", {}, id="default text"),
    pytest.param("text", {"path": "good.txt"}, id="a file"),
    pytest.param("text", {"path": "*.txt"}, id="a glob"),
    pytest.param("text", {"path": "good.txt", "batch_size": 66, "microbatches": 33}, id="one validation microbatch"),
    pytest.param("tokens", {"path": ["good.bin", "good.npy"]}, id="token files"),
    pytest.param("tokens", {"path": "good.bin", "validation_path": "good.npy"}, id="validation file"),
    pytest.param("synthetic", {"num_validation_sequences": 0}, id="synthetic without validation"),
]


@pytest.mark.parametrize("kind, changes", GOOD)
def test_nothing_is_said_about_good_data(kind: str, changes: dict[str, Any]) -> None:
    extra = {"batch_size": 2} if "path" in changes and "batch_size" not in changes else {}
    assert told_of(kind, **extra, **changes).errors == []


BAD = [
    pytest.param(
        "text",
        {"batch_size": 10, "microbatches": 2, "dp": 4},
        Told(
            "data.batch_size=10",
            "10 sequences",
            "4 data parallel ranks",
            "2 microbatches",
            allowed="multiples of 4 x 2 = 8",
            write="data.batch_size=8 or data.batch_size=16",
        ),
        id="batch does not divide",
    ),
    pytest.param(
        "text",
        {"batch_size": 3, "dp": 4},
        Told(
            "data.batch_size=3",
            "3 sequences",
            "4 data parallel ranks",
            allowed="multiples of 4",
            write="data.batch_size=4",
        ),
        id="batch smaller than the ranks",
    ),
    pytest.param(
        "synthetic",
        {"seq_len": 2048},
        Told("data.seq_len=2048", "at most 1024 tokens", allowed="1 to 1024", write="data.seq_len=1024"),
        id="sequence too long",
    ),
    pytest.param(
        "synthetic",
        {"vocab_size": 1000},
        Told("data.vocab_size=1000", "up to 999", "only 512", allowed=("1000",), write="model.vocab_size=1000"),
        id="synthetic vocabulary",
    ),
    pytest.param(
        "synthetic",
        {"num_sequences": 8},
        Told(
            "data.num_sequences=8",
            "8 training sequences",
            "256 tokens",
            "one batch of 16",
            allowed=("data.batch_size", "data.seq_len"),
        ),
        id="synthetic too few",
    ),
    pytest.param(
        "text",
        {"path": "godo.txt"},
        Told("data.path=godo.txt", "no such file", write="data.path=good.txt"),
        id="absent file",
    ),
    pytest.param("text", {"path": "a/b.txt"}, Told("data.path=a/b.txt", "no such file"), id="absent directory"),
    pytest.param(
        "text", {"path": "~no_such_user/a"}, Told("data.path=~no_such_user/a", "no such file"), id="absent user"
    ),
    pytest.param("text", {"path": "*.rst"}, Told("data.path=*.rst", "no file"), id="empty glob"),
    pytest.param("text", {"path": "empty.txt"}, Told("data.path=empty.txt", "empty"), id="empty file"),
    pytest.param(
        "text",
        {"path": "folder"},
        Told("data.path=folder", ".txt, .text, .md, .markdown, .rst, .tex"),
        id="directory without text",
    ),
    pytest.param(
        "text",
        {"path": []},
        Told("data.path=[]", "empty"),
        id="empty list",
    ),
    pytest.param(
        "text",
        {"path": 3},
        Told("data.path=3", "not a path"),
        id="a number as path",
    ),
    pytest.param(
        "text",
        {"path": "short.txt", "validation_fraction": 0.0},
        Told(
            "data.path=short.txt",
            "3 training sequences",
            "256 tokens",
            "one batch of 16",
            allowed=("data.batch_size", "data.seq_len"),
        ),
        id="too little text",
    ),
    pytest.param(
        "text",
        {"path": "good.txt", "validation_fraction": 0.005},
        Told(
            "data.path=good.txt",
            "not one validation sequence",
            "256 tokens",
            allowed=("data.validation_fraction", "data.seq_len"),
            write="data.validation_fraction=0.02, or data.validation_fraction=0 for no validation",
        ),
        id="too little text for validation",
    ),
    pytest.param(
        "text",
        {"tokenizer": "absent.json"},
        Told("data.tokenizer=absent.json", "no such file", allowed=("bytes", "tokenizer.json")),
        id="absent tokenizer",
    ),
    pytest.param(
        "text",
        {"tokenizer": "model"},
        Told(
            "data.tokenizer=model",
            "directory",
            allowed=("bytes", "tokenizer.json"),
            write="data.tokenizer=model/tokenizer.json",
        ),
        id="directory of a tokenizer",
    ),
    pytest.param(
        "text",
        {"tokenizer": "broken.json"},
        Told("data.tokenizer=broken.json", "tokenizers", allowed=("bytes", "tokenizer.json")),
        id="broken tokenizer",
    ),
    pytest.param(
        "text",
        {"tokenizer": "tokenizer.json"},
        Told("data.tokenizer=tokenizer.json", "up to 599", "only 512", allowed=("600",), write="model.vocab_size=600"),
        id="tokenizer vocabulary",
    ),
    pytest.param(
        "tokens",
        {},
        Told("data=tokens", "no file is given", allowed=("data.path", ".bin", ".npy"), write="data.path=tokens.bin"),
        id="no token file",
    ),
    pytest.param(
        "tokens",
        {"path": "odd.bin"},
        Told("data.path=odd.bin", "3 bytes", "uint16 tokens", allowed=("2", "data.dtype")),
        id="bin of another type",
    ),
    pytest.param(
        "tokens",
        {"path": "tokens.dat"},
        Told("data.path=tokens.dat", ".dat", allowed=(".bin", ".npy")),
        id="neither bin nor npy",
    ),
    pytest.param(
        "tokens",
        {"path": "float.npy"},
        Told("data.path=float.npy", "float64", "(100,)", allowed=("numpy.save",)),
        id="npy of floats",
    ),
    pytest.param(
        "tokens",
        {"path": "matrix.npy"},
        Told("data.path=matrix.npy", "int32", "(10, 10)", allowed=("numpy.save",)),
        id="npy of two dimensions",
    ),
    pytest.param(
        "tokens",
        {"path": "cut.npy"},
        Told("data.path=cut.npy", "20000 tokens", "250 there", allowed=("numpy.save",)),
        id="npy cut off",
    ),
    pytest.param(
        "tokens",
        {"path": "good.bin", "validation_path": "absent.bin"},
        Told("data.validation_path=absent.bin", "no such file"),
        id="absent validation file",
    ),
    pytest.param(
        "tokens",
        {"path": "good.bin", "validation_path": "few.npy", "batch_size": 80},
        [
            Told(
                "data.path=good.bin",
                "78 training sequences",
                "256 tokens",
                "one batch of 80",
                allowed=("data.batch_size", "data.seq_len"),
            ),
            Told(
                "data.validation_path=few.npy", "not one validation sequence of 256 tokens", allowed=("data.seq_len",)
            ),
        ],
        id="too few tokens",
    ),
    pytest.param(
        "tokens",
        {"path": "large.bin", "batch_size": 2},
        Told("data.path=large.bin", "token 600 at position 0", "only 512"),
        id="token outside of the vocabulary",
    ),
]


@pytest.mark.parametrize("kind, changes, told", BAD)
def test_bad_data_is_explained(kind: str, changes: dict[str, Any], told: Told | list[Told]) -> None:
    assert_only_told(told_of(kind, **changes), told)


def test_a_broken_npy_file_is_named() -> None:
    told = Told("data.path=broken.npy", ".npy", "magic string", allowed=("numpy.save",))
    assert_only_told(told_of("tokens", path="broken.npy"), told)


def test_bytes_need_257_ids() -> None:
    (error,) = check_data(dataclasses.asdict(DATA["text"]()), 1, SimpleNamespace(vocab_size=256, max_seq_len=None))
    told = Told("data.tokenizer=bytes", "up to 256", "only 256", allowed=("257",), write="model.vocab_size=257")
    assert_only_told(error, told)


def test_an_unreadable_file_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real: Callable[..., bool] = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "good.txt" and real(path, mode))
    assert_only_told(told_of("text", path="good.txt"), Told("data.path=good.txt", "cannot be read"))


def test_tokenizers_that_are_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    told = Told(
        "data.tokenizer=tokenizer.json",
        "`tokenizers`",
        "not installed",
        write="pip install 'autolaunch[hf]'",
        allowed=("bytes", "tokenizer.json"),
    )
    assert_only_told(told_of("text", tokenizer="tokenizer.json"), told)


@pytest.mark.parametrize(
    "vocabulary, added, size",
    [
        pytest.param({"a": 0, "b": 7}, [], 8, id="by name"),
        pytest.param([["a", -1.0], ["b", -2.0]], None, 2, id="unigram"),
        pytest.param({"a": 0}, [{"id": 3}, {"id": 1}], 4, id="added tokens"),
    ],
)
def test_vocabulary_of_a_tokenizer_file(vocabulary: Any, added: Any, size: int) -> None:
    assert tokenizer_vocabulary({"model": {"vocab": vocabulary}, "added_tokens": added}) == size


def test_facts_that_are_not_known_forbid_nothing() -> None:
    unknown = SimpleNamespace(vocab_size=None, max_seq_len=None)
    assert check_data({**dataclasses.asdict(DATA["synthetic"]()), "seq_len": 10**6}, 1, unknown) == []
    assert check_data({"name": "mine", "_target_": "my.Data"}, 1, unknown) == []


def test_checking_imports_neither_torch_nor_numpy() -> None:
    code = (
        "import sys, dataclasses\n"
        "from autolaunch.config.schema import TextData\n"
        "from autolaunch.data.present import check_data\n"
        "assert check_data(dataclasses.asdict(TextData()), 1, None) == []\n"
        "print(sorted({'torch', 'numpy', 'lightning'} & set(sys.modules)))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60)
    assert (done.stdout, done.stderr) == ("[]\n", "")
