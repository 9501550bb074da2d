"""Sequences from text, token files and from nothing; the config group `data`."""

from __future__ import annotations

import dataclasses
import os
import pickle
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autolaunch.config.schema import DATA
from autolaunch.data import build_data, synthetic, text, tokens
from autolaunch.data.counts import split_counts, window_count
from autolaunch.data.documents import find_files
from autolaunch.data.windows import Sequences, TokenFile, Windows
from autolaunch_strategies.config import ConfigError
from tests.support.messages import assert_told


def config(kind: str, **changes: Any) -> dict[str, Any]:
    defaults = dataclasses.asdict(DATA[kind]())
    assert not changes.keys() - defaults.keys()
    return {**defaults, **changes}


def everything(sequences: Sequences) -> np.ndarray:
    return sequences.tokens(np.arange(len(sequences)))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "autolaunch"


# --- windows -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length, windows", [(0, 0), (1, 0), (4, 0), (5, 1), (8, 1), (9, 2), (13, 3)])
def test_windows_share_only_their_border(length: int, windows: int) -> None:
    found = Windows([np.arange(length)], seq_len=4)
    assert len(found) == window_count(length, 4) == windows
    assert everything(found).tolist() == [list(range(4 * i, 4 * i + 5)) for i in range(windows)]


def test_no_window_crosses_from_one_file_to_the_next() -> None:
    parts = [np.arange(100, 111), np.arange(200, 203), np.arange(300, 305), np.arange(400, 410)]
    found = Windows(parts, seq_len=4)
    assert everything(found)[:, 0].tolist() == [100, 104, 300, 400, 404]
    shuffled = np.array([4, 2, 0, 3, 1, 2])
    np.testing.assert_array_equal(found.tokens(shuffled), everything(found)[shuffled])


@pytest.mark.parametrize(
    "total, fraction, expected",
    [(100, 0.05, (95, 5)), (100, 0.29, (71, 29)), (7, 0.0, (7, 0)), (80, None, (76, 4)), (69, None, (69, 0))],
)
def test_validation_is_the_last_part(total: int, fraction: float, expected: tuple[int, int]) -> None:
    assert split_counts(total, fraction, batch=4) == expected


# --- tokens --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32", "uint32", "int64"])
def test_token_files_of_every_type_form_one_space(tmp_path: Path, dtype: str) -> None:
    values = np.arange(50, dtype=dtype)
    (tmp_path / "b").mkdir()
    values[:21].tofile(tmp_path / "a.bin")
    np.save(tmp_path / "b" / "c.npy", values[21:].astype(">i4"))
    (tmp_path / "notes.txt").write_text("not tokens")
    training, validation, *_ = tokens.open_sequences(
        config("tokens", path=str(tmp_path), dtype=dtype, seq_len=4, validation_fraction=0.25), 0
    )
    rows = np.concatenate([everything(training), everything(validation)])
    assert rows.dtype == np.int64
    assert rows[:, 0].tolist() == [0, 4, 8, 12, 16, 21, 25, 29, 33, 37, 41, 45]
    np.testing.assert_array_equal(rows - rows[:, :1], np.tile(np.arange(5), (12, 1)))
    assert (len(training), len(validation)) == (9, 3)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_token_that_the_model_does_not_know_is_told_where_it_is_read(tmp_path: Path, workers: int) -> None:
    values = np.arange(40, dtype=np.uint16)
    values[29] = 900
    values.tofile(tmp_path / "a.bin")
    keys = config(
        "tokens", path=str(tmp_path / "a.bin"), seq_len=4, batch_size=2, num_workers=workers, shuffle=False,
        validation_fraction=0.0,
    )  # fmt: skip
    data: Any = build_data(keys, 0, vocab_size=900)
    data.setup("fit")
    batches = iter(data.train_dataloader())
    for _ in range(3):
        next(batches)
    with pytest.raises(ConfigError) as caught:
        next(batches)
    assert_told(caught.value, f"data.path={tmp_path / 'a.bin'}", "token 900 at position 29", "only 900")
    everything(tokens.open_sequences(keys, 0).training)  # of a model that nothing is known of


def test_validation_files_leave_the_training_files_whole(tmp_path: Path) -> None:
    np.arange(9, dtype=np.uint16).tofile(tmp_path / "train.bin")
    np.arange(100, 105, dtype=np.uint16).tofile(tmp_path / "valid.bin")
    paths = {"path": str(tmp_path / "train.bin"), "validation_path": str(tmp_path / "valid.bin")}
    training, validation, *_ = tokens.open_sequences(config("tokens", seq_len=4, **paths), 0)
    assert everything(training)[:, 0].tolist() == [0, 4]
    assert everything(validation)[:, 0].tolist() == [100]


def test_test_files_are_for_the_test_alone(tmp_path: Path) -> None:
    np.arange(200, 209, dtype=np.uint16).tofile(tmp_path / "test.bin")
    np.arange(100, dtype=np.uint16).tofile(tmp_path / "train.bin")
    (tmp_path / "a.txt").write_text("a" * 100)
    (tmp_path / "b.txt").write_text("b" * 100)
    tested = tokens.open_sequences(
        config("tokens", seq_len=4, path=str(tmp_path / "train.bin"), test_path=str(tmp_path / "test.bin")), 0
    ).test
    assert tested is not None and everything(tested)[:, 0].tolist() == [200, 204]
    parts = text.open_sequences(
        config("text", seq_len=4, path=str(tmp_path / "a.txt"), test_path=str(tmp_path / "b.txt")), 0
    )
    assert parts.test is not None
    assert {int(token) for token in everything(parts.test).flatten()} == {ord("b")}
    assert {int(token) for part in parts[:2] for token in everything(part).flatten()} == {ord("a")}
    walks = synthetic.open_sequences(config("synthetic", num_test_sequences=3, num_validation_sequences=2), 0)
    assert walks.test is not None and len(walks.test) == 3
    rows = [everything(part).tolist() for part in (walks.validation, walks.test)]
    assert not any(row in rows[0] for row in rows[1])


def test_ten_gigabytes_are_not_read(tmp_path: Path) -> None:
    path = tmp_path / "big.bin"
    path.touch()
    os.truncate(path, 10 * 2**30)
    with path.open("r+b") as file:
        file.seek(2 * (10**9 * 4 + 1))
        file.write(np.array([7, 8, 9], np.uint16).tobytes())
    data = build_data(config("tokens", path=str(path), seq_len=8, validation_fraction=0.0), seed=1)
    data.setup("fit")
    before = _resident_bytes()
    loader = data.train_dataloader()
    batches = iter(loader)
    for _ in range(5):
        assert next(batches)["input_ids"].shape == (16, 8)
    assert len(loader) == (5 * 2**30 - 1) // 8 // 16
    assert loader.dataset[4 * 10**9 // 8]["input_ids"].tolist() == [0, 7, 8, 9, 0, 0, 0, 0]
    assert _resident_bytes() - before < 2**28


def _resident_bytes() -> int:
    """Memory that this process holds, of which whatever it read from the file would be a part."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_mapped_file_is_not_copied_into_workers(tmp_path: Path) -> None:
    np.arange(10**6, dtype=np.uint16).tofile(tmp_path / "a.bin")
    found = Windows([TokenFile(tmp_path / "a.bin")], seq_len=4)
    before = found.tokens(np.array([3, 70_000]))
    copied = pickle.dumps(found)
    assert len(copied) < 2000
    np.testing.assert_array_equal(pickle.loads(copied).tokens(np.array([3, 70_000])), before)


# --- text ----------------------------------------------------------------------------------------------------------


def test_default_text_is_the_help_of_python() -> None:
    training, validation, *_ = text.open_sequences(config("text"), 0)
    rows = np.concatenate([everything(training), everything(validation)])
    stream = np.append(rows[:, :-1].reshape(-1), rows[-1, -1])
    documents = bytes(np.where(stream == 256, 0, stream).astype(np.uint8)).decode(errors="replace").split("\0")
    from pydoc_data.topics import topics

    assert documents[:-1] == [topics[name] for name in sorted(topics)][: len(documents) - 1]
    assert len(stream) > 400_000
    assert len(validation) == round(0.05 * len(rows))


def test_bytes_of_several_files_are_separated(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "b.md").write_text("ö!")
    (tmp_path / "a.txt").write_text("ab")
    (tmp_path / "sub" / "c.txt").write_text("c")
    (tmp_path / "empty.txt").touch()
    (tmp_path / ".hidden.txt").write_text("no")
    (tmp_path / "picture.png").write_bytes(b"no")
    training, *_ = text.open_sequences(config("text", path=str(tmp_path), seq_len=7, validation_fraction=0.0), 0)
    assert everything(training).tolist() == [[97, 98, 256, 0xC3, 0xB6, 33, 256, 99]]


def test_paths_may_be_globs_and_lists(tmp_path: Path) -> None:
    for name in ("b.log", "a.log", "c.txt"):
        (tmp_path / name).write_text(name)
    paths = [str(tmp_path / "c.txt"), str(tmp_path / "*.log")]
    assert [file.name for file in find_files(paths, (".txt",))] == ["c.txt", "a.log", "b.log"]


def test_large_text_is_tokenised_once(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = "".join(f"line {number}\n" for number in range(3000))
    (tmp_path / "a.txt").write_text(content)
    wanted = config("text", path=str(tmp_path / "a.txt"), seq_len=16, validation_fraction=0.0)
    in_memory = everything(text.open_sequences(wanted, 0)[0])
    assert not cache.exists()
    monkeypatch.setattr(text, "IN_MEMORY_TOKENS", 1000)
    monkeypatch.setattr(text, "_PIECE", 500)
    np.testing.assert_array_equal(everything(text.open_sequences(wanted, 0)[0]), in_memory)
    (cached,) = cache.iterdir()
    written = cached.stat().st_mtime_ns
    np.testing.assert_array_equal(everything(text.open_sequences(wanted, 0)[0]), in_memory)
    assert [file.stat().st_mtime_ns for file in cache.iterdir()] == [written]
    (tmp_path / "a.txt").write_text("other" + content[5:])
    changed = everything(text.open_sequences(wanted, 0)[0])
    assert bytes(changed[0, :5].astype(np.uint8)) == b"other"
    assert len(list(cache.iterdir())) == 2


def test_an_interrupted_cache_leaves_nothing_behind(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text("abc" * 1000)
    monkeypatch.setattr(text, "IN_MEMORY_TOKENS", 1000)

    def fail(self: text.BytesEncoder, document: bytes) -> np.ndarray:
        raise KeyboardInterrupt

    monkeypatch.setattr(text.BytesEncoder, "encode", fail)
    with pytest.raises(KeyboardInterrupt):
        text.open_sequences(config("text", path=str(tmp_path / "a.txt")), 0)
    assert list(cache.iterdir()) == []


def test_a_cache_is_shared_by_users_and_may_be_full(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text("abc" * 1000)
    wanted = config("text", path=str(tmp_path / "a.txt"))
    monkeypatch.setattr(text, "IN_MEMORY_TOKENS", 1000)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    first = everything(text.open_sequences(wanted, 0)[0])
    (cached,) = cache.iterdir()
    (tmp_path / "plain").touch()
    assert cached.stat().st_mode == (tmp_path / "plain").stat().st_mode

    may = os.access  # nothing is closed to root, who may run this
    monkeypatch.setattr("os.access", lambda path, mode: path != cached and may(path, mode))
    np.testing.assert_array_equal(everything(text.open_sequences(wanted, 0)[0]), first)
    temporary = tmp_path / f"autolaunch-{os.getuid()}"
    assert [item.name for item in temporary.iterdir()] == [cached.name]

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    monkeypatch.setattr(text, "_write_npy", lambda file, chunks, dtype: Path("/dev/full").write_bytes(b"x"))
    with pytest.raises(ConfigError) as error:
        text.open_sequences(wanted, 0)
    assert_told(
        error.value, f"cache {tmp_path / 'other/autolaunch'}", "no space left", write="export XDG_CACHE_HOME=DIRECTORY"
    )
    assert list((tmp_path / "other/autolaunch").iterdir()) == []


def test_text_through_a_tokenizer_file(tmp_path: Path, cache: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = {"[UNK]": 0, "the": 1, "cat": 2, "sat": 3, "</s>": 4}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="[UNK] $A", special_tokens=[("[UNK]", 0)]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.txt").write_text("the cat\nsat")
    (tmp_path / "b.txt").write_text("dog the cat sat")
    training, *_ = text.open_sequences(
        config(
            "text",
            path=[str(tmp_path / "a.txt"), str(tmp_path / "b.txt")],
            tokenizer=str(tmp_path / "tokenizer.json"),
            seq_len=7,
            validation_fraction=0.0,
        ),
        0,
    )
    assert everything(training).tolist() == [[1, 2, 3, 4, 0, 1, 2, 3]]
    (cached,) = cache.iterdir()
    assert np.load(cached).dtype == np.uint16


def test_bytes_that_are_no_text_are_refused_by_a_tokenizer_and_tokens_without_one(tmp_path: Path, cache: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfcaf\xc3\xa9\nna\xefve\n")
    keys = config("text", path=str(tmp_path / "a.txt"), seq_len=2, validation_fraction=0.0)
    assert 0xEF in everything(text.open_sequences({**keys, "tokenizer": "bytes"}, 0).training)
    for key, other in (("path", {}), ("test_path", {"path": None, "test_path": keys["path"]})):
        with pytest.raises(ConfigError) as caught:
            text.open_sequences({**keys, "tokenizer": str(tmp_path / "tokenizer.json"), **other}, 0)
        assert_told(caught.value, f"data.{key}={tmp_path / 'a.txt'}", "not UTF-8", "byte 12", allowed=("UTF-8",))
    assert not list(cache.iterdir())


# --- synthetic -----------------------------------------------------------------------------------------------------


def test_synthetic_sequences_depend_on_seed_and_index_only() -> None:
    wanted = config("synthetic", num_sequences=100, num_validation_sequences=20, vocab_size=50, seq_len=32)
    training, validation, *_ = synthetic.open_sequences(wanted, 7)
    rows = everything(training)
    assert rows.shape == (100, 33) and rows.dtype == np.int64
    assert rows.min() == 0 and rows.max() == 49
    np.testing.assert_array_equal(training.tokens(np.array([30, 4])), rows[[30, 4]])
    together = [*map(tuple, rows), *map(tuple, everything(validation))]
    assert len(set(together)) > 110  # a walk without a jump can occur twice
    assert not np.array_equal(everything(synthetic.open_sequences(wanted, 8)[0]), rows)


def test_synthetic_sequences_have_a_pattern_to_learn() -> None:
    wanted = config("synthetic", num_sequences=400, vocab_size=64, seq_len=64)
    training, validation, *_ = synthetic.open_sequences(wanted, 0)
    pairs = Counter(zip(everything(training)[:, :-1].flat, everything(training)[:, 1:].flat, strict=True))
    follower = {first: max(range(64), key=lambda second: pairs[first, second]) for first in range(64)}
    assert sorted(follower.values()) == list(range(64))
    rows = everything(validation)
    hits = np.mean([follower[first] == second for row in rows for first, second in pairwise(row)])
    assert abs(hits - (1 - synthetic.JUMP_PROBABILITY)) < 0.02
    counts = np.bincount(rows.flat, minlength=64) / rows.size
    assert counts.min() > 0.5 / 64 and counts.max() < 2 / 64


def test_tokens_have_room_for_the_highest_id(tmp_path: Path) -> None:
    """Ids of added tokens may leave some out, so that there are fewer tokens than ids."""
    tokenizers = pytest.importorskip("tokenizers")
    known = tokenizers.models.WordLevel({"a": 0, "b": 70_000}, unk_token="a")
    tokenizers.Tokenizer(known).save(str(tmp_path / "tokenizer.json"))
    assert text.FileEncoder(tmp_path / "tokenizer.json").encode(b"b").tolist() == [70_000]
