"""What is said about wrong data before any process starts: whole messages."""

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

from autolaunch.config import DATA
from autolaunch.data.check import check_data, tokenizer_vocabulary

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
    Path("cut.npy").write_bytes(Path("good.npy").read_bytes()[:1128])
    Path("broken.npy").write_bytes(b"no header here")
    Path("tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 599}]}))
    Path("broken.json").write_text("{}")
    Path("model").mkdir()
    (Path("model") / "tokenizer.json").write_text("{}")


def messages(kind: str, dp: int = 1, **changes: Any) -> str:
    config = {**dataclasses.asdict(DATA[kind]()), **changes}
    return "\n".join(str(error) for error in check_data(config, dp, MODEL))


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
    assert messages(kind, **extra, **changes) == ""


BAD = [
    pytest.param(
        "text",
        {"batch_size": 10, "microbatches": 2, "dp": 4},
        "data.batch_size=10: 10 sequences cannot be shared evenly by 4 data parallel ranks in 2 microbatches\n"
        "  allowed: multiples of 4 x 2 = 8\n"
        "  write:   data.batch_size=8 or data.batch_size=16",
        id="batch does not divide",
    ),
    pytest.param(
        "text",
        {"batch_size": 3, "dp": 4},
        "data.batch_size=3: 3 sequences cannot be shared evenly by 4 data parallel ranks in 1 microbatches\n"
        "  allowed: multiples of 4 x 1 = 4\n"
        "  write:   data.batch_size=4",
        id="batch smaller than the ranks",
    ),
    pytest.param(
        "synthetic",
        {"seq_len": 2048},
        "data.seq_len=2048: the model takes sequences of at most 1024 tokens\n"
        "  allowed: 1 to 1024\n"
        "  write:   data.seq_len=1024",
        id="sequence too long",
    ),
    pytest.param(
        "synthetic",
        {"vocab_size": 1000},
        "data.vocab_size=1000: token ids up to 999, but the model knows only 512\n"
        "  allowed: a model with a vocabulary of 1000 or more\n"
        "  write:   model.vocab_size=1000",
        id="synthetic vocabulary",
    ),
    pytest.param(
        "synthetic",
        {"num_sequences": 8},
        "data.num_sequences=8: 8 training sequences of 256 tokens, fewer than one batch of 16\n"
        "  allowed: more data, or a smaller data.batch_size or data.seq_len",
        id="synthetic too few",
    ),
    pytest.param(
        "synthetic",
        {"num_validation_sequences": 7, "microbatches": 2},
        "data.num_validation_sequences=7: 7 validation sequences of 256 tokens, fewer than one batch of 8 "
        "(data.batch_size=16 / data.microbatches=2)\n"
        "  allowed: more validation data\n"
        "  write:   data.num_validation_sequences=8, or 0 for no validation",
        id="synthetic too few for validation",
    ),
    pytest.param(
        "text",
        {"path": "godo.txt"},
        "data.path=godo.txt: no such file or directory\n  write:   data.path=good.txt",
        id="absent file",
    ),
    pytest.param("text", {"path": "a/b.txt"}, "data.path=a/b.txt: no such file or directory", id="absent directory"),
    pytest.param(
        "text", {"path": "~no_such_user/a"}, "data.path=~no_such_user/a: no such file or directory", id="absent user"
    ),
    pytest.param("text", {"path": "*.rst"}, "data.path=*.rst: no file with anything in it matches", id="empty glob"),
    pytest.param("text", {"path": "empty.txt"}, "data.path=empty.txt: the file is empty", id="empty file"),
    pytest.param(
        "text",
        {"path": "folder"},
        "data.path=folder: no file with anything in it ends in .txt, .text, .md, .markdown, .rst, .tex "
        "in this directory",
        id="directory without text",
    ),
    pytest.param(
        "text",
        {"path": []},
        "data.path=[]: the list is empty\n  allowed: a file, a directory, a glob, or a list of them",
        id="empty list",
    ),
    pytest.param(
        "text",
        {"path": 3},
        "data.path=3: not a path\n  allowed: a file, a directory, a glob, or a list of them",
        id="a number as path",
    ),
    pytest.param(
        "text",
        {"path": "short.txt", "validation_fraction": 0.0},
        "data.path=short.txt: 3 training sequences of 256 tokens, fewer than one batch of 16\n"
        "  allowed: more data, or a smaller data.batch_size or data.seq_len",
        id="too little text",
    ),
    pytest.param(
        "text",
        {"path": "good.txt"},
        "data.path=good.txt: 4 validation sequences of 256 tokens, fewer than one batch of 16\n"
        "  allowed: a larger data.validation_fraction, more data, or a smaller data.batch_size or data.seq_len\n"
        "  write:   data.validation_fraction=0.22, or data.validation_fraction=0 for no validation",
        id="too little text for validation",
    ),
    pytest.param(
        "text",
        {"tokenizer": "absent.json"},
        "data.tokenizer=absent.json: no such file\n  allowed: bytes, or the path of a tokenizer.json",
        id="absent tokenizer",
    ),
    pytest.param(
        "text",
        {"tokenizer": "model"},
        "data.tokenizer=model: a directory\n"
        "  allowed: bytes, or the path of a tokenizer.json\n"
        "  write:   data.tokenizer=model/tokenizer.json",
        id="directory of a tokenizer",
    ),
    pytest.param(
        "text",
        {"tokenizer": "broken.json"},
        "data.tokenizer=broken.json: not a tokenizer of the library `tokenizers`\n"
        "  allowed: bytes, or the path of a tokenizer.json",
        id="broken tokenizer",
    ),
    pytest.param(
        "text",
        {"tokenizer": "tokenizer.json"},
        "data.tokenizer=tokenizer.json: token ids up to 599, but the model knows only 512\n"
        "  allowed: a model with a vocabulary of 600 or more\n"
        "  write:   model.vocab_size=600",
        id="tokenizer vocabulary",
    ),
    pytest.param(
        "tokens",
        {},
        "data=tokens: no file is given\n"
        "  allowed: data.path: a .bin or .npy file, a directory, a glob, or a list of them\n"
        "  write:   data.path=tokens.bin",
        id="no token file",
    ),
    pytest.param(
        "tokens",
        {"path": "odd.bin"},
        "data.path=odd.bin: 3 bytes are no whole number of uint16 tokens\n"
        "  allowed: a multiple of 2 bytes, or another data.dtype",
        id="bin of another type",
    ),
    pytest.param(
        "tokens",
        {"path": "tokens.dat"},
        "data.path=tokens.dat: a file that ends in .dat\n  allowed: files that end in .bin or .npy",
        id="neither bin nor npy",
    ),
    pytest.param(
        "tokens",
        {"path": "float.npy"},
        "data.path=float.npy: not a .npy file of tokens (an array of float64 with shape (100,))\n"
        "  allowed: one dimension of integers, as numpy.save writes",
        id="npy of floats",
    ),
    pytest.param(
        "tokens",
        {"path": "matrix.npy"},
        "data.path=matrix.npy: not a .npy file of tokens (an array of int32 with shape (10, 10))\n"
        "  allowed: one dimension of integers, as numpy.save writes",
        id="npy of two dimensions",
    ),
    pytest.param(
        "tokens",
        {"path": "cut.npy"},
        "data.path=cut.npy: not a .npy file of tokens (cut off: 20000 tokens announced, 250 there)\n"
        "  allowed: one dimension of integers, as numpy.save writes",
        id="npy cut off",
    ),
    pytest.param(
        "tokens",
        {"path": "good.bin", "validation_path": "absent.bin"},
        "data.validation_path=absent.bin: no such file or directory",
        id="absent validation file",
    ),
    pytest.param(
        "tokens",
        {"path": "good.bin", "validation_path": "good.npy", "batch_size": 80},
        "data.path=good.bin: 78 training sequences of 256 tokens, fewer than one batch of 80\n"
        "  allowed: more data, or a smaller data.batch_size or data.seq_len\n"
        "data.path=good.bin: 78 validation sequences of 256 tokens, fewer than one batch of 80\n"
        "  allowed: more validation data",
        id="too few tokens",
    ),
    pytest.param(
        "tokens",
        {"path": "large.bin", "batch_size": 2},
        "data.path=large.bin: it holds the token 600, but the model knows only 512\n"
        "  allowed: the dtype and the vocabulary that the file was written with",
        id="token outside of the vocabulary",
    ),
]


@pytest.mark.parametrize("kind, changes, expected", BAD)
def test_bad_data_is_explained(kind: str, changes: dict[str, Any], expected: str) -> None:
    assert messages(kind, **changes) == expected


def test_a_broken_npy_file_is_named() -> None:
    assert messages("tokens", path="broken.npy").startswith(
        "data.path=broken.npy: not a .npy file of tokens (the magic string is not correct"
    )


def test_bytes_need_257_ids() -> None:
    (error,) = check_data(dataclasses.asdict(DATA["text"]()), 1, SimpleNamespace(vocab_size=256, max_seq_len=None))
    assert str(error) == (
        "data.tokenizer=bytes: token ids up to 256, but the model knows only 256\n"
        "  allowed: a model with a vocabulary of 257 or more\n"
        "  write:   model.vocab_size=257"
    )


def test_an_unreadable_file_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real: Callable[..., bool] = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "good.txt" and real(path, mode))
    assert messages("text", path="good.txt") == "data.path=good.txt: the file cannot be read by this user"


def test_tokenizers_that_are_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert messages("text", tokenizer="tokenizer.json") == (
        "data.tokenizer=tokenizer.json: a tokenizer file needs the library `tokenizers`, which is not installed\n"
        "  allowed: bytes, or a tokenizer.json with `tokenizers` installed\n"
        "  write:   pip install 'autolaunch[hf]'"
    )


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
        "from autolaunch.config import TextData\n"
        "from autolaunch.data.check import check_data\n"
        "assert check_data(dataclasses.asdict(TextData()), 1, None) == []\n"
        "print(sorted({'torch', 'numpy', 'lightning'} & set(sys.modules)))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60)
    assert (done.stdout, done.stderr) == ("[]\n", "")
