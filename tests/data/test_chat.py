"""data=chat and data=documents: what is trained on, which rows are refused, and the batches that come of them."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers")

from autolaunch.cli import run
from autolaunch.config.schema import DATA
from autolaunch.config.tokenizer import with_tokenizer
from autolaunch.data import prepared, progress
from autolaunch.data.conversations import conversation
from autolaunch.data.encoders import ChatEncoder
from autolaunch.data.exported import write_tokenizer
from autolaunch.data.loader import PositionedLoader
from autolaunch.data.order import BatchOrder
from autolaunch.data.present import check_data
from autolaunch.data.prompts import PromptEncoder
from autolaunch.data.rows import BadRow, without_empty
from autolaunch.data.rows_of_files import open_rows, open_sequences
from autolaunch.data.tokenizers import load_tokenizer
from autolaunch_strategies.config import ConfigError, ConfigErrors
from tests.support.chats import (
    CHATML,
    COUNTS_MESSAGES,
    MARKED,
    MARKED_WITHOUT_END,
    REFUSES,
    REWRITES_EARLIER_ANSWERS,
    SPACE_BEFORE_ANSWERS,
    WITHOUT_EARLIER_REASONING,
    chat_tokenizer,
    save_tokenizer,
)
from tests.support.messages import Told, assert_only_told, assert_told

USER, ASSISTANT = "<|im_start|>user\n", "<|im_start|>assistant\n"
TWO_ANSWERS = [
    {"role": "user", "content": "what"},
    {"role": "assistant", "content": "two"},
    {"role": "user", "content": "and?"},
    {"role": "assistant", "content": "four"},
]


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    load_tokenizer.cache_clear()


def chat_config(**changes: Any) -> dict[str, Any]:
    if "tokenizer" not in changes:
        changes["tokenizer"] = str(save_tokenizer(Path("tokenizer")))
    config = dataclasses.asdict(DATA["chat"]())
    return {**config, "batch_size": 2, "validation_fraction": 0.0, "seq_len": 64, "path": "chats.jsonl", **changes}


def document_config(**changes: Any) -> dict[str, Any]:
    config = dataclasses.asdict(DATA["documents"]())
    fixed = {"batch_size": 2, "validation_fraction": 0.0, "seq_len": 16, "path": "texts.jsonl", "tokenizer": "bytes"}
    return {**config, **fixed, **changes}


def write_lines(name: str, rows: Sequence[Any]) -> Path:
    Path(name).write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return Path(name)


def chats(count: int) -> list[dict[str, Any]]:
    """Conversation i has an answer of i characters and a few more tokens."""
    return [
        {"messages": [{"role": "user", "content": "what"}, {"role": "assistant", "content": "x" * (number + 1)}]}
        for number in range(count)
    ]


def runs(encoder: ChatEncoder, example: Any) -> list[tuple[str, bool]]:
    """Text that is trained on (True) and text that is not, by turns."""
    assert not isinstance(example, BadRow), example
    ids, trained = example
    parts: list[tuple[list[int], bool]] = []
    for number, flag in zip(ids.tolist(), trained.tolist(), strict=True):
        if not parts or parts[-1][1] != flag:
            parts.append(([], flag))
        parts[-1][0].append(number)
    return [(encoder.decode(part), flag) for part, flag in parts]


def encoded(template: str, row: Any, train_on: str = "assistant", eos: bool = True) -> tuple[ChatEncoder, Any]:
    encoder = ChatEncoder(chat_tokenizer(template), None, train_on, eos, {})
    return encoder, encoder.encode([row])[0]


BOTH = [
    (f"{USER}what<|im_end|>\n{ASSISTANT}", False),
    ("two<|im_end|>", True),
    (f"\n{USER}and?<|im_end|>\n{ASSISTANT}", False),
    ("four<|im_end|>", True),
    ("\n", False),
]
BOTH_WITHOUT_ENDS = [
    (f"{USER}what<|im_end|>\n{ASSISTANT}", False),
    ("two", True),
    (f"<|im_end|>\n{USER}and?<|im_end|>\n{ASSISTANT}", False),
    ("four", True),
    ("<|im_end|>\n", False),
]
BEFORE_LAST = f"{USER}what<|im_end|>\n{ASSISTANT}two<|im_end|>\n{USER}and?<|im_end|>\n{ASSISTANT}"
LAST = [(BEFORE_LAST, False), ("four<|im_end|>", True), ("\n", False)]
TEMPLATES = {"prefixes": CHATML, "marks": MARKED, "marks without the end": MARKED_WITHOUT_END}


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
@pytest.mark.parametrize(
    ("train_on", "eos", "expected"),
    [
        pytest.param("assistant", True, BOTH, id="answers"),
        pytest.param("assistant", False, BOTH_WITHOUT_ENDS, id="without ends"),
        pytest.param("last", True, LAST, id="last"),
        pytest.param("all", True, [("".join(text for text, _ in BOTH), True)], id="all"),
    ],
)
def test_what_is_trained_on(template: str, train_on: str, eos: bool, expected: list[tuple[str, bool]]) -> None:
    encoder, example = encoded(template, {"messages": TWO_ANSWERS}, train_on, eos)
    assert runs(encoder, example) == expected
    assert example[0].tolist() == chat_tokenizer(template).apply_chat_template(TWO_ANSWERS)["input_ids"]


def test_a_mask_token_by_token() -> None:
    _, (ids, trained) = encoded(CHATML, {"messages": [{"role": "user", "content": "a"}, TWO_ANSWERS[3]]})
    pairs = list(zip(chat_tokenizer().convert_ids_to_tokens(ids), trained.tolist(), strict=True))
    start = next(at for at, (_, flag) in enumerate(pairs) if flag)
    assert [token for token, _ in pairs[:start]][-2:] == ["t", "Ċ"] or pairs[start - 1][0].endswith("Ċ")
    assert pairs[start:] == [*((token, True) for token, _ in pairs[start:-2]), ("<|im_end|>", True), ("Ċ", False)]
    assert "".join(token for token, _ in pairs[start:-2]) == "four"


SAME_CONVERSATION = [
    pytest.param({"messages": TWO_ANSWERS[:2]}, {}, id="messages"),
    pytest.param(
        {"conversations": [{"from": "human", "value": "what"}, {"from": "gpt", "value": "two"}]}, {}, id="ShareGPT"
    ),
    pytest.param({"prompt": "what", "completion": "two"}, {}, id="prompt and completion"),
    pytest.param({"instruction": "what", "input": "", "output": "two"}, {}, id="alpaca"),
    pytest.param({"q": "what", "a": "two", "messages": 3}, {"prompt": "q", "completion": "a"}, id="named columns"),
    pytest.param({"talk": TWO_ANSWERS[:2]}, {"messages": "talk"}, id="named messages"),
]


@pytest.mark.parametrize(("row", "columns"), SAME_CONVERSATION)
def test_columns(row: dict[str, Any], columns: dict[str, str]) -> None:
    encoder = ChatEncoder(chat_tokenizer(), None, "assistant", True, columns)
    assert runs(encoder, encoder.encode([row])[0]) == [*BOTH[:2], ("\n", False)]


def test_tools_may_be_json() -> None:
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    for found, expected in (
        (tools, tools),
        (json.dumps(tools), tools),
        (" ", None),
        ("null", None),
        ([], None),
        ({}, None),
    ):
        assert conversation({"messages": TWO_ANSWERS, "tools": found}, {})[1] == expected
        columns = {"messages": "messages", "tools": "functions"}
        assert conversation({"messages": TWO_ANSWERS, "functions": found}, columns)[1] == expected
    for found, problem in (
        ("add()", "text that is no JSON"),
        ("[" * 100_000, "text that is no JSON"),
        ('{"a": 1}', "is a dict, not a list"),
        (3, "is a int"),
    ):
        with pytest.raises(BadRow, match=problem):
            conversation({"messages": TWO_ANSWERS, "tools": found}, {})


def test_fields_that_only_other_rows_of_a_table_have_are_not_there() -> None:
    call = {"function": {"name": "weather", "arguments": {"city": "Oslo", "date": None}}, "id": None}
    row = without_empty({"messages": [{"role": "assistant", "content": None, "tool_calls": [call]}], "tools": None})
    expected = {"function": {"name": "weather", "arguments": {"city": "Oslo"}}}
    assert row == {"messages": [{"role": "assistant", "tool_calls": [expected]}]}


def test_generation_ends_where_answers_were_learned_to_end() -> None:
    """A base model has another end of texts; its export says the same."""
    tokenizer = chat_tokenizer(ENDED := CHATML.replace("<|im_end|>", "<|endoftext|>"))
    tokenizer.save_pretrained("model")
    ends = [tokenizer.convert_tokens_to_ids(text) for text in ("<|im_end|>", "<|endoftext|>")]
    for train_on_eos, expected in ((True, {*ends}), (False, {ends[0]})):
        chat = {"name": "chat", "tokenizer": "model", "chat_template": ENDED, "train_on_eos": train_on_eos}
        assert PromptEncoder(chat).ends == expected
    assert PromptEncoder({"name": "documents", "tokenizer": "model"}).ends == {ends[0]}


def test_prompts_are_encoded_by_the_whole_tokenizer_of_a_model(tmp_path: Path) -> None:
    """`data=text` names its tokenizer.json, which knows neither ends nor a template."""
    save_tokenizer(tmp_path)
    alone = tmp_path / "alone.json"
    alone.write_bytes((tmp_path / "tokenizer.json").read_bytes())
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 0]}')
    ends = {chat_tokenizer().eos_token_id, 7, 0}
    encoder = PromptEncoder({"name": "text", "tokenizer": str(tmp_path / "tokenizer.json")})
    assert encoder.ends == ends == PromptEncoder({"name": "documents", "tokenizer": str(tmp_path)}).ends
    prompt = [{"role": "user", "content": "what"}]
    assert encoder.tokenizer.decode(encoder.encode(prompt, "prompts[0]")).endswith("<|im_start|>assistant\n")
    with pytest.raises(ConfigError) as caught:
        PromptEncoder({"name": "text", "tokenizer": str(alone)}).encode(prompt, "prompts[0]")
    told = Told("prompts[0]", str(alone), "no chat template", write="data=chat data.chat_template=chatml.jinja")
    assert_only_told(caught.value, told)


def test_system_and_input_columns() -> None:
    row = {"system": "be brief", "instruction": "what", "input": "1 1", "output": "two"}
    encoder, example = encoded(CHATML, row)
    prompt = f"<|im_start|>system\nbe brief<|im_end|>\n{USER}what\n\n1 1<|im_end|>\n{ASSISTANT}"
    assert runs(encoder, example) == [(prompt, False), ("two<|im_end|>", True), ("\n", False)]


def test_earlier_answers_without_their_reasoning() -> None:
    """Qwen3's way: an answer is rendered in full only while it is the last one."""
    encoder, example = encoded(WITHOUT_EARLIER_REASONING, {"messages": TWO_ANSWERS})
    assert runs(encoder, example) == [*BOTH[:3], ("<think>four<|im_end|>", True), ("\n", False)]


UNSTABLE = [
    pytest.param(COUNTS_MESSAGES, "assistant", ["not prefix-stable", "1 messages", "4 messages"], id="text"),
    pytest.param(SPACE_BEFORE_ANSWERS, "assistant", ["not prefix-stable", "tokens"], id="tokens"),
    pytest.param(REWRITES_EARLIER_ANSWERS, "assistant", ["otherwise", "'two'"], id="answers"),
]


@pytest.mark.parametrize(("template", "train_on", "facts"), UNSTABLE)
def test_templates_that_are_not_prefix_stable(template: str, train_on: str, facts: list[str]) -> None:
    messages = [TWO_ANSWERS[0], {"role": "assistant", "content": "two" if "upper" in template else "hello"}]
    _, example = encoded(template, {"messages": [*messages, *TWO_ANSWERS[2:]]}, train_on)
    assert isinstance(example, BadRow)
    assert all(fact in str(example) for fact in facts), str(example)
    assert "data.train_on=" in example.write


def test_the_last_answer_of_a_template_that_rewrites_earlier_ones() -> None:
    encoder, example = encoded(REWRITES_EARLIER_ANSWERS, {"messages": TWO_ANSWERS}, "last")
    assert [text for text, flag in runs(encoder, example) if flag] == ["four<|im_end|>"]


GOOD = {"messages": TWO_ANSWERS}
BAD_CHATS = [
    pytest.param("{oops}", ["not JSON", "column 2"], id="not JSON"),
    pytest.param('{"messages": [', ["not JSON"], id="cut off"),
    pytest.param("[1, 2]", ["list", "object"], id="a list"),
    pytest.param('"text"', ["str", "object"], id="text"),
    pytest.param({"question": "a", "answer": "b"}, ["question, answer"], id="unknown columns"),
    pytest.param({}, ["(none)"], id="no columns"),
    pytest.param({"messages": "hello"}, ["str", "list"], id="messages are text"),
    pytest.param({"messages": []}, ["empty"], id="no messages"),
    pytest.param({"messages": ["hello"]}, ["message 1", "str"], id="message is text"),
    pytest.param({"messages": [{"content": "a"}]}, ["message 1", "no role"], id="no role"),
    pytest.param({"messages": [{"role": "robot", "content": "a"}]}, ["message 1", "robot"], id="unknown role"),
    pytest.param({"conversations": [{"from": "x", "value": "a"}]}, ["message 1", "from x"], id="unknown from"),
    pytest.param({"messages": [{"role": "user"}]}, ["message 1", "no content"], id="no content"),
    pytest.param({"messages": [{"role": "user", "content": 3}]}, ["message 1", "int"], id="content is a number"),
    pytest.param({"messages": TWO_ANSWERS[:1]}, ["no message of the assistant"], id="no answer"),
    pytest.param({"messages": TWO_ANSWERS[1:2]}, ["speaks first"], id="no prompt"),
    pytest.param(
        {"messages": [TWO_ANSWERS[0], {"role": "assistant", "content": ""}]}, ["message 2"], id="empty answer"
    ),
    pytest.param({"prompt": 3, "completion": "a"}, ["prompt", "int"], id="prompt is a number"),
    pytest.param({"prompt": "a", "completion": " "}, ["completion is empty"], id="empty completion"),
    pytest.param({"messages": [{"role": "system", "content": "a"}, *TWO_ANSWERS]}, ["no system, please"], id="refused"),
    pytest.param(b'{"prompt": "\xff"}', ["not UTF-8", "byte 13"], id="not UTF-8"),
    pytest.param('{"a":' * 100_000, ["nested too deeply"], id="too deep"),
    pytest.param({"messages": None}, ["NoneType", "list"], id="messages are null"),
    pytest.param({"messages": [{"role": "user", "content": ["a"]}]}, ["message 1", "list"], id="content is a list"),
    pytest.param({"conversations": [{"from": "human"}]}, ["message 1", "no content"], id="no value"),
    pytest.param({"prompt": "a", "completion": None}, ["completion", "NoneType"], id="completion is null"),
]
BAD_DOCUMENTS = [
    pytest.param({"body": "a"}, ["no column text", "body", "data.text_key=body"], id="no text"),
    pytest.param({"text": 3}, ["int"], id="text is a number"),
    pytest.param({"text": "  "}, ["empty"], id="empty"),
    pytest.param("nothing", ["not JSON"], id="document is no JSON"),
]
BAD_ROWS = [
    pytest.param(kind, *case.values, id=case.id)
    for kind, cases in (("chat", BAD_CHATS), ("documents", BAD_DOCUMENTS))
    for case in cases
]


@pytest.mark.parametrize(("kind", "row", "facts"), BAD_ROWS)
def test_bad_rows_are_named_by_file_and_line(kind: str, row: Any, facts: list[str]) -> None:
    good = json.dumps(GOOD if kind == "chat" else {"text": "good"})
    bad = row if isinstance(row, bytes) else (row if isinstance(row, str) else json.dumps(row)).encode()
    Path("rows.jsonl").write_bytes(b"\n".join([good.encode(), b"", bad, good.encode()]))
    if kind == "chat":
        config = chat_config(tokenizer=str(save_tokenizer(Path("tokenizer"), REFUSES)), path="rows.jsonl")
    else:
        config = document_config(path="rows.jsonl")
    with pytest.raises(ConfigError) as caught:
        open_sequences(config, 0)
    assert caught.value.where == "rows.jsonl:3"
    assert all(fact in str(caught.value) for fact in facts), str(caught.value)
    assert "data.on_bad=skip" in caught.value.write

    opened = open_rows({**config, "on_bad": "skip"}, "path")
    assert (opened.counts.examples, opened.counts.bad) == (2, 1)
    assert opened.prepared.first_bad[0].startswith("rows.jsonl:3: ")
    assert [opened.prepared.place(number) for number in range(2)] == ["rows.jsonl:1", "rows.jsonl:4"]


def test_several_bad_rows_are_told_at_once() -> None:
    write_lines("chats.jsonl", ["{", GOOD, "[", *["{}"] * 9])
    same = Told("chats.jsonl:4", "also chats.jsonl:5, chats.jsonl:6", write=None)
    for streaming in (False, True):
        with pytest.raises(ConfigErrors) as caught:
            open_rows_or_stream(chat_config(streaming=streaming))
        assert [error.where for error in caught.value.errors] == ["chats.jsonl:1", "chats.jsonl:3", same.key]
        assert_told(caught.value, same.key, *same.facts, write=None)
    beforehand = check_data(chat_config(), 1, SimpleNamespace(vocab_size=None, max_seq_len=None))
    told = [
        Told(f"chats.jsonl:{line}", "not JSON", write="data.on_bad=skip, to leave such rows out") for line in (1, 3)
    ]
    assert_only_told(ConfigErrors(beforehand), [*told, Told(same.key, *same.facts, "6 more", write=None)])


def open_rows_or_stream(config: dict[str, Any]) -> None:
    training: Any = open_sequences(config, 0).training
    next(training.steps(None, 1, tell=False))


def test_files_that_are_no_json_or_not_utf8() -> None:
    Path("texts.json").write_text('[{"text": "a"},\n {"text": ]')
    for on_bad in ("refuse", "skip"):  # not one bad row: the whole file is
        with pytest.raises(ConfigError, match="line 2, column 11") as caught:
            open_sequences(document_config(path="texts.json", on_bad=on_bad), 0)
        assert (caught.value.where, caught.value.write) == ("texts.json", "")
    Path("texts.jsonl").write_bytes(b'{"text": "\xff"}\n')
    with pytest.raises(ConfigError, match=r"texts.jsonl:1: not UTF-8 \(byte 11\)"):
        open_sequences(document_config(), 0)
    write_lines("texts.jsonl", ["", " "])
    with pytest.raises(ConfigError, match="no rows"):
        open_sequences(document_config(), 0)
    write_lines("texts.jsonl", ["a", "b"])
    with pytest.raises(ConfigError, match=r"all 2 rows are bad; the first: texts.jsonl:1: not JSON"):
        open_sequences(document_config(on_bad="skip"), 0)


WRONG = [
    pytest.param("chat", {"path": None}, Told("data=chat", "no file", write="data.path=chats.jsonl"), id="no path"),
    pytest.param("chat", {"tokenizer": None}, Told("data=chat", "no tokenizer", write=None), id="no tokenizer"),
    pytest.param("chat", {"tokenizer": "bytes"}, Told("data=chat", "no tokenizer", write=None), id="bytes"),
    pytest.param("chat", {"tokenizer": "no"}, Told("data.tokenizer=no", "no such file"), id="absent tokenizer"),
    pytest.param("chat", {"tokenizer": "empty"}, Told("data.tokenizer=empty", "no tokenizer"), id="empty directory"),
    pytest.param("chat", {"tokenizer": "plain"}, Told("data=chat", "no chat template", write=None), id="no template"),
    pytest.param(
        "chat", {"chat_template": "no.jinja"}, Told("data.chat_template=no.jinja", "no such file"), id="absent template"
    ),
    pytest.param(
        "chat", {"path": "no.jsonl"}, Told("data.path=no.jsonl", "no such file", write=None), id="absent file"
    ),
    pytest.param("chat", {"path": "notes.md"}, Told("data.path=notes.md", ".md", allowed=(".jsonl",)), id="text file"),
    pytest.param("chat", {"path": "bad.jsonl"}, Told("bad.jsonl:2", "question", write=None), id="first row"),
    pytest.param(
        "chat",
        {"path": "chats.json"},
        Told("data.path=chats.json", "no such file", write="data.path=chats.jsonl"),
        id="another ending",
    ),
    pytest.param(
        "chat",
        {"path": "here/chat.jsonl"},
        Told("data.path=here/chat.jsonl", "no such file", write="data.path=there/chats.jsonl"),
        id="slips in both names",
    ),
    pytest.param(
        "chat", {"columns": {"promt": "a"}}, Told("data.columns.promt", "prompt", write=None), id="unknown part"
    ),
    pytest.param(
        "chat",
        {"columns": {"prompt": "a"}},
        Told("data.columns={'prompt': 'a'}", write="'data.columns={prompt: question, completion: answer}'"),
        id="half a pair",
    ),
    pytest.param(
        "documents", {"text_key": "body"}, Told("texts.jsonl:1", "body", write="data.text_key=text"), id="absent"
    ),
]


@pytest.mark.parametrize(("kind", "changes", "told"), WRONG)
def test_before_any_process_starts(kind: str, changes: dict[str, Any], told: Told) -> None:
    write_lines("chats.jsonl", [GOOD])
    write_lines("texts.jsonl", [{"text": "a"}])
    write_lines("bad.jsonl", ["", {"question": "a"}])
    Path("notes.md").write_text("a")
    Path("empty").mkdir()
    Path("there").mkdir()
    write_lines("there/chats.jsonl", [GOOD])
    save_tokenizer(Path("plain"), None)
    config = chat_config(**changes) if kind == "chat" else document_config(**changes)
    assert_only_told(ConfigErrors(check_data(config, 1, SimpleNamespace(vocab_size=300, max_seq_len=64))), told)


def test_good_data_and_a_vocabulary_that_is_too_small() -> None:
    write_lines("chats.jsonl", [GOOD])
    size = len(chat_tokenizer())
    assert check_data(chat_config(), 1, SimpleNamespace(vocab_size=size, max_seq_len=64)) == []
    errors = check_data(chat_config(), 1, SimpleNamespace(vocab_size=size - 1, max_seq_len=64))
    told = Told("data.tokenizer=tokenizer", f"up to {size - 1}", write=f"model.vocab_size={size}")
    assert_only_told(ConfigErrors(errors), told)


def test_a_template_that_is_no_jinja() -> None:
    write_lines("chats.jsonl", [GOOD])
    with pytest.raises(ConfigError, match="there is no tokenizer"):
        open_sequences(chat_config(tokenizer=None), 0)
    with pytest.raises(ConfigError, match="not a jinja template"):
        open_sequences(chat_config(chat_template="{% for %}"), 0)


def all_of(config: dict[str, Any]) -> dict[str, np.ndarray]:
    sequences: Any = open_sequences({**config, "batch_size": 1}, 0).training
    return sequences.batch(np.arange(len(sequences)))


def test_every_format_gives_the_same_sequences() -> None:
    rows = chats(3)
    write_lines("chats.jsonl", rows)
    Path("list.json").write_text(json.dumps(rows, indent=1))
    write_lines("lines.json", rows)
    Path("mark.jsonl").write_bytes(b"\xef\xbb\xbf" + Path("chats.jsonl").read_bytes())
    expected = all_of(chat_config())
    for path in ("list.json", "lines.json", "mark.jsonl"):
        np.testing.assert_equal(all_of(chat_config(path=path)), expected)


def test_tables_give_the_same_sequences() -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")

    rows = chats(3)
    write_lines("chats.jsonl", rows)
    table = pyarrow.Table.from_pylist(rows)
    parquet.write_table(table, "chats.parquet")
    Path("saved").mkdir()
    Path("saved/dataset_info.json").write_text("{}")
    Path("saved/state.json").write_text("{}")
    for name, writer_of in (("saved/data-00000-of-00001.arrow", "new_stream"), ("chats.arrow", "new_file")):
        with pyarrow.OSFile(name, "wb") as file, getattr(pyarrow.ipc, writer_of)(file, table.schema) as writer:
            writer.write_table(table)
    expected = all_of(chat_config())
    for path in ("chats.parquet", "saved", "chats.arrow"):
        np.testing.assert_equal(all_of(chat_config(path=path)), expected)
    Path("broken.parquet").write_bytes(b"no table")
    with pytest.raises(ConfigError, match=r"broken.parquet: not a parquet file"):
        all_of(chat_config(path="broken.parquet"))


def test_tables_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("chats.parquet").write_bytes(b"x")
    monkeypatch.setattr("autolaunch.data.rows.importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pyarrow") as caught:
        open_sequences(chat_config(path="chats.parquet"), 0)
    assert_told(caught.value, "data.path=chats.parquet", "pyarrow", write="pip install 'autolaunch[data]'")


def test_a_batch_of_chats() -> None:
    write_lines("chats.jsonl", chats(2))
    tokenizer = chat_tokenizer()
    batch = all_of(chat_config(seq_len=32))
    for row, text in enumerate(("x", "xx")):
        ids = tokenizer(f"{USER}what<|im_end|>\n{ASSISTANT}{text}<|im_end|>\n")["input_ids"]
        padding = 32 - len(ids)
        answer = len(tokenizer(f"{text}<|im_end|>")["input_ids"])
        assert batch["input_ids"][row].tolist() == ids + [tokenizer.pad_token_id] * padding
        before = len(ids) - answer - 1
        assert batch["labels"][row].tolist() == [-100] * before + ids[before:-1] + [-100] * (1 + padding)
        assert batch["attention_mask"][row].tolist() == [1] * len(ids) + [0] * padding
    assert {rows.dtype for rows in batch.values()} == {np.dtype(np.int64)}


def test_documents_are_texts_with_an_end() -> None:
    write_lines("texts.jsonl", [{"text": "ab"}, {"text": "é"}])
    Path("page.md").write_text("c\n")
    batch = all_of(document_config(path=["texts.jsonl", "page.md"], seq_len=4))
    assert batch["input_ids"].tolist() == [[97, 98, 256, 256], [0xC3, 0xA9, 256, 256], [99, 10, 256, 256]]
    assert batch["labels"].tolist() == [[-100, 98, 256, -100], [-100, 0xA9, 256, -100], [-100, 10, 256, -100]]
    tokens = all_of(document_config(tokenizer=str(save_tokenizer(Path("tokenizer"))), seq_len=8))
    ids = chat_tokenizer()("ab")["input_ids"]
    assert tokens["input_ids"][0][: len(ids) + 1].tolist() == [*ids, chat_tokenizer().eos_token_id]


def test_long_documents_are_split_and_every_token_is_predicted_once() -> None:
    text = "".join(map(chr, range(40, 75)))
    write_lines("texts.jsonl", [{"text": text}, {"text": "z"}])
    batch = all_of(document_config(seq_len=8))
    learned = batch["labels"][batch["labels"] != -100].tolist()
    assert learned == [*map(ord, text[1:]), 256, 256]
    for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True):
        assert all(label in (-100, token) for token, label in zip(ids, labels, strict=True))


def test_too_long_chats() -> None:
    write_lines("chats.jsonl", [*chats(3), {"messages": [{"role": "user", "content": "x" * 99}, TWO_ANSWERS[1]]}])
    longest = int(all_of(chat_config(seq_len=512))["attention_mask"].sum(1)[2])
    cut = open_rows(chat_config(seq_len=longest - 1), "path")
    assert (cut.counts.truncated, cut.counts.untrained, len(cut.spans[0])) == (2, 1, 3)
    left_out = open_rows(chat_config(seq_len=longest, too_long="skip"), "path")
    assert (left_out.counts.skipped, len(left_out.spans[0])) == (1, 3)
    with pytest.raises(ConfigError) as caught:
        open_rows(chat_config(seq_len=longest - 1, too_long="refuse"), "path")
    assert_told(caught.value, "chats.jsonl:3", f"{longest} tokens", "2 of 4", write=None)
    with pytest.raises(ConfigError, match="none is left"):
        open_rows(chat_config(seq_len=8), "path")


def test_packed_documents_are_kept_apart() -> None:
    lengths = [5, 3, 6, 2, 1, 7, 4, 4]
    write_lines("texts.jsonl", [{"text": chr(97 + at) * length} for at, length in enumerate(lengths)])
    alone = all_of(document_config(seq_len=10))
    batch = all_of(document_config(seq_len=10, packing="documents"))
    assert sorted(batch) == ["input_ids", "labels", "position_ids"]
    # First-fit of 6, 4, 7, 3, 2, 8, 5, 5 tokens into 10.
    contents = ["".join(chr(token) for token in row if 97 <= token <= 122) for row in batch["input_ids"]]
    assert contents == ["aaaaabbb", "ccccccdd", "effffffff"[:8], "gggghhhh"]
    for ids, labels, positions in zip(*(batch[name] for name in ("input_ids", "labels", "position_ids")), strict=True):
        starts = np.flatnonzero(positions == 0)
        assert starts[0] == 0 and (np.diff(positions)[np.diff(positions) != 1] <= 0).all()
        assert (labels[starts] == -100).all()
        assert ((labels == ids) | (labels == -100)).all()
    assert sorted(batch["labels"][batch["labels"] != -100]) == sorted(alone["labels"][alone["labels"] != -100])


def count_of_encodings(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    calls: list[int] = []
    original = ChatEncoder.encode
    monkeypatch.setattr(ChatEncoder, "encode", lambda self, rows: calls.append(len(rows)) or original(self, rows))
    return calls


def test_the_second_start_does_not_tokenise(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    calls = count_of_encodings(monkeypatch)
    write_lines("chats.jsonl", chats(4))
    first = all_of(chat_config())
    assert calls == [4] and "tokenised 4 examples" in capsys.readouterr().err
    Path("elsewhere.jsonl").write_bytes(Path("chats.jsonl").read_bytes())
    for changes in ({}, {"path": "elsewhere.jsonl"}, {"seq_len": 128}, {"packing": "documents"}, {"num_workers": 3}):
        all_of(chat_config(**changes))
    assert calls == [4] and capsys.readouterr().err == ""
    np.testing.assert_equal(all_of(chat_config()), first)

    write_lines("chats.jsonl", chats(5))
    changed: list[dict[str, Any]] = [{}, {"train_on": "all"}, {"train_on_eos": False}, {"chat_template": MARKED}]
    changed.append({"tokenizer": str(save_tokenizer(Path("other"), MARKED))})
    for changes in changed:
        all_of(chat_config(**changes))
    assert calls == [4, *[5] * len(changed)]


def test_preparing_says_that_it_gets_on(monkeypatch: pytest.MonkeyPatch) -> None:
    moves: list[None] = []
    monkeypatch.setattr(progress, "_listeners", [])
    progress.listen(lambda: moves.append(None))
    write_lines("texts.jsonl", [{"text": "a"}] * 2000)
    open_sequences(document_config(), 0)
    assert len(moves) >= 5  # its hash, and four times 512 rows


def test_a_damaged_cache_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = count_of_encodings(monkeypatch)
    write_lines("chats.jsonl", chats(4))
    first = all_of(chat_config())
    (directory,) = (path for path in Path("cache/autolaunch").iterdir())
    (directory / "tokens.bin").write_bytes(b"\0" * 8)
    np.testing.assert_equal(all_of(chat_config()), first)
    assert calls == [4, 4] and list(Path("cache/autolaunch").iterdir()) == [directory]


def test_a_cache_is_shared_by_users_and_may_be_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, cache = count_of_encodings(monkeypatch), Path.cwd() / "cache/autolaunch"
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    write_lines("chats.jsonl", chats(4))
    first = all_of(chat_config())
    (directory,) = cache.iterdir()
    Path("plain").mkdir()
    assert directory.stat().st_mode == Path("plain").stat().st_mode

    may = os.access  # nothing is closed to root, who may run this
    monkeypatch.setattr("os.access", lambda path, mode: path != directory and may(path, mode))
    for _ in range(2):
        np.testing.assert_equal(all_of(chat_config()), first)
    temporary = tmp_path / f"autolaunch-{os.getuid()}"
    assert calls == [4, 4] and [item.name for item in temporary.iterdir()] == [directory.name]

    write_lines("chats.jsonl", chats(5))
    made = Path.mkdir

    def full(path: Path, *args: Any, **kwargs: Any) -> None:
        made(path, *args, **kwargs)
        if path.name.endswith(".part"):
            (path / "tokens.bin").symlink_to("/dev/full")

    monkeypatch.setattr(Path, "mkdir", full)
    with pytest.raises(ConfigError) as error:
        open_sequences(chat_config(), 0)
    assert_told(error.value, f"cache {cache}", "no space left", write="export XDG_CACHE_HOME=DIRECTORY")
    assert list(cache.iterdir()) == [directory]


def test_nothing_is_left_behind_by_bad_rows() -> None:
    write_lines("chats.jsonl", ["{"])
    with pytest.raises(ConfigError):
        open_sequences(chat_config(), 0)
    assert list(Path("cache/autolaunch").iterdir()) == []


@pytest.mark.parametrize("packing", ["none", "documents"])
def test_the_same_batches_on_one_rank_and_on_two_and_after_a_resume(packing: str) -> None:
    write_lines("chats.jsonl", chats(41))
    sequences: Any = open_sequences(chat_config(packing=packing, batch_size=4), 3).training

    def loader(rank: int = 0, ranks: int = 1) -> PositionedLoader:
        return PositionedLoader(sequences, BatchOrder(len(sequences), 4, 1, 3, True, rank, ranks))

    def hashed(batch: Any) -> list[bytes]:
        return [
            b"".join(batch[name][row].numpy().tobytes() for name in sorted(batch))
            for row in range(len(batch["labels"]))
        ]

    whole = loader()
    epochs = [hashed(batch) for _ in range(2) for batch in whole]
    halves = [loader(rank, 2) for rank in range(2)]
    joined = [hashed(first) + hashed(second) for _ in range(2) for first, second in zip(*halves, strict=True)]
    assert joined == epochs and epochs[: len(whole)] != epochs[len(whole) :]

    left = loader()
    batches = iter(left)
    done = [hashed(next(batches)) for _ in range(2)]
    later = loader()
    later.load_state_dict(left.state_dict())
    done += [hashed(batch) for batch in later]
    assert done == epochs[: len(done)]


def test_validation_is_the_end_or_another_file() -> None:
    write_lines("chats.jsonl", chats(20))
    write_lines("validation.jsonl", chats(3))
    parts = open_sequences(chat_config(validation_fraction=0.2), 0)
    assert (len(parts.training), len(parts.validation), parts.test) == (16, 4, None)
    parts = open_sequences(chat_config(validation_path="validation.jsonl", test_path="validation.jsonl"), 0)
    assert (len(parts.training), len(parts.validation), len(parts.test or ())) == (20, 3, 3)
    with pytest.raises(ConfigError, match="not one validation sequence") as caught:
        open_sequences(chat_config(validation_fraction=0.02), 0)
    assert "data.validation_fraction=0 for no validation" in str(caught.value)
    with pytest.raises(ConfigError, match="20 training sequences"):
        open_sequences(chat_config(batch_size=32), 0)


def test_the_tokenizer_is_the_models() -> None:
    save_tokenizer(Path("model"))

    def chosen(kind: str, model: dict[str, Any], **data: Any) -> Any:
        config = {"data": {**dataclasses.asdict(DATA[kind]()), **data}, "model": model, "module": None}
        return with_tokenizer(config)["data"]["tokenizer"]

    hf = {"name": "hf", "path": "model"}
    assert chosen("chat", hf) == chosen("documents", hf) == "model"
    assert chosen("text", hf) == str(Path("model/tokenizer.json"))
    assert chosen("text", hf, tokenizer="bytes") == "bytes"
    assert chosen("text", {"name": "llama"}) == chosen("documents", {"name": "hf", "path": "."}) == "bytes"
    assert chosen("chat", {"name": "llama"}) is None


def test_an_exported_directory_has_the_tokenizer() -> None:
    from transformers import AutoTokenizer

    save_tokenizer(Path("model"))
    Path("model/generation_config.json").write_text('{"eos_token_id": 2}')
    for number, data in enumerate(({"tokenizer": "model/tokenizer.json"}, {"tokenizer": "model"}, {"_target_": "a.B"})):
        target = Path(f"export{number}")
        target.mkdir()
        write_tokenizer(target, data, "model")
        loaded = AutoTokenizer.from_pretrained(target)
        assert loaded.chat_template == CHATML and loaded.eos_token == "<|im_end|>"
        assert json.loads((target / "generation_config.json").read_text()) == {"eos_token_id": 2}
    Path("own").mkdir()
    write_tokenizer(Path("own"), {"tokenizer": "model/tokenizer.json", "chat_template": MARKED}, None)
    loaded = AutoTokenizer.from_pretrained("own")
    assert loaded.chat_template == MARKED and loaded("hello")["input_ids"] == chat_tokenizer()("hello")["input_ids"]
    ended = CHATML.replace("<|im_end|>", "<|endoftext|>")
    for name, train_on_eos, ends in (("ends", True, [2, 0]), ("endless", False, 2)):
        Path(name).mkdir()
        chat = {"name": "chat", "tokenizer": "model", "chat_template": ended, "train_on_eos": train_on_eos}
        write_tokenizer(Path(name), chat, "model")
        assert json.loads(Path(name, "generation_config.json").read_text())["eos_token_id"] == ends
    Path("none").mkdir()
    write_tokenizer(Path("none"), {"tokenizer": "bytes"}, None)
    assert list(Path("none").iterdir()) == []


def test_data_show(capsys: pytest.CaptureFixture[str]) -> None:
    write_lines("chats.jsonl", [*chats(9), "{"])
    save_tokenizer(Path("model"))
    words = ["data", "show", "data=chat", "data.path=chats.jsonl", "data.tokenizer=model", "data.seq_len=32"]
    assert run([*words, "data.on_bad=skip", "data.batch_size=4", "data.validation_fraction=0"]) == 0
    shown = capsys.readouterr().out
    assert shown.count(" trained on\n") == 4 and "chats.jsonl:" in shown
    assert f"{USER}what<|im_end|>\n{ASSISTANT}[[x" in shown and "<|im_end|>]]" in shown
    assert "9 of at most 32 tokens" in shown and "1 bad row left out" in shown and "chats.jsonl:10: not JSON" in shown
    for line in ("data", "data shwo", "data show data=synthetic", "data show data=chat", "data show data.pth=x"):
        assert run(line.split()) == 2
        assert "data" in capsys.readouterr().err


def test_rows_are_read_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    write_lines("chats.jsonl", chats(10))
    expected = all_of(chat_config())
    monkeypatch.setattr(prepared, "_ROWS", 3)
    monkeypatch.setattr(prepared, "_FORMAT", -1)
    np.testing.assert_equal(all_of(chat_config()), expected)
