"""What rows of chat data look like, and the messages in them. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from autolaunch.data.rows import BadRow
from autolaunch_strategies.config import ConfigError, nearest

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
SHARED_GPT_ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant",
    "system": "system", "tool": "tool", "observation": "tool", "function_call": "assistant",
}  # fmt: skip
"""`from` of ShareGPT's messages -> role."""

COLUMNS = ("messages", "prompt", "input", "completion", "system", "tools")
"""What `data.columns` can name the columns of."""

_PAIRS = (("prompt", "completion"), ("prompt", "response"), ("instruction", "output"), ("instruction", "response"))
_KNOWN = "`messages`, `conversations`, `prompt` and `completion`, or `instruction` and `output`"
_COLUMNS_TYPED = "'data.columns={prompt: question, completion: answer}'"

Messages = list[dict[str, Any]]


def check_columns(columns: Mapping[str, Any]) -> list[ConfigError]:
    """What is wrong with `data.columns`."""
    for key, column in columns.items():
        if key not in COLUMNS:
            close = nearest(str(key), COLUMNS)
            return [
                ConfigError(
                    f"data.columns.{key}",
                    "chats have no such part" + (f"; did you mean {close}?" if close else ""),
                    ", ".join(COLUMNS),
                    f"data.columns.{close}={column}" if close else "",
                )
            ]
        if not isinstance(column, str) or not column:
            return [ConfigError(f"data.columns.{key}={column}", "not the name of a column", "text")]
    if columns and "messages" not in columns and not {"prompt", "completion"} <= columns.keys():
        return [
            ConfigError(
                f"data.columns={dict(columns)}",
                "nothing says where the conversation is",
                "messages, or prompt and completion",
                _COLUMNS_TYPED,
            )
        ]
    return []


def conversation(row: Mapping[str, Any], columns: Mapping[str, str]) -> tuple[Messages, list[Any] | None]:
    """(messages, tools or None) of a row.

    Args:
        columns: part of a conversation -> column; empty to go by the names that the columns have.

    Raises:
        BadRow: the row holds no conversation with something to learn.
    """
    names = dict(columns) or _detected(row)
    absent = [column for part, column in names.items() if part in ("messages", "prompt", "completion")]
    absent = [column for column in absent if column not in row]
    if absent:
        raise BadRow(f"no column {absent[0]}; there are {_listed(row)}", "the columns that data.columns names")
    messages = _messages(row[names["messages"]]) if "messages" in names else _pair(row, names)
    system = row.get(names.get("system", "system"))
    if isinstance(system, str) and system and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system}, *messages]
    if not any(message["role"] == "assistant" for message in messages):
        raise BadRow("no message of the assistant: there is nothing to learn")
    column = names.get("tools", "tools")
    return messages, _tools(row.get(column), column)


def _tools(found: Any, column: str) -> list[Any] | None:
    """The tools that a row offers, which many data sets hold as JSON text; None if it has none."""
    allowed = "a list of tools, or its JSON; or data.columns, which names another column, or one that is not there"
    if isinstance(found, str):
        try:
            found = json.loads(found) if found.strip() else None
        except (ValueError, RecursionError):
            raise BadRow(f"{column} is text that is no JSON", allowed) from None
    if found and not isinstance(found, list):
        raise BadRow(f"{column} is a {type(found).__name__}, not a list of tools", allowed)
    return found or None


def _detected(row: Mapping[str, Any]) -> dict[str, str]:
    for name in ("messages", "conversations", "conversation"):
        if name in row:
            return {"messages": name}
    for prompt, completion in _PAIRS:
        if prompt in row and completion in row:
            return {"prompt": prompt, "completion": completion, "input": "input"}
    raise BadRow(
        f"no conversation in the columns {_listed(row)}",
        f"{_KNOWN}; or data.columns, which names others",
        _COLUMNS_TYPED if len(row) > 1 else "",
    )


def _listed(row: Mapping[str, Any]) -> str:
    return ", ".join(map(str, row)) or "(none)"


def _pair(row: Mapping[str, Any], names: Mapping[str, str]) -> Messages:
    prompt, completion = row[names["prompt"]], row[names["completion"]]
    for part, text in (("prompt", prompt), ("completion", completion)):
        if not isinstance(text, str):
            raise BadRow(f"{names[part]} is a {type(text).__name__}, not text")
        if not text.strip():
            raise BadRow(f"{names[part]} is empty")
    more = row.get(names.get("input", ""), "")
    if isinstance(more, str) and more.strip():
        prompt = f"{prompt}\n\n{more}"
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]


def _messages(items: Any) -> Messages:
    if not isinstance(items, list):
        raise BadRow(f"the messages are a {type(items).__name__}, not a list")
    if not items:
        raise BadRow("the list of messages is empty")
    return [_message(number, item) for number, item in enumerate(items, start=1)]


def _message(number: int, item: Any) -> dict[str, Any]:
    if not isinstance(item, Mapping):
        raise BadRow(f"message {number} is a {type(item).__name__}", "{role: ..., content: ...}")
    message = {key: value for key, value in item.items() if value is not None}
    if "role" not in message and "from" in message:
        role = SHARED_GPT_ROLES.get(str(message["from"]))
        if role is None:
            raise BadRow(f"message {number} is from {message['from']}", ", ".join(SHARED_GPT_ROLES))
        message = {"role": role, "content": message.get("value")}
    if "role" not in message:
        raise BadRow(f"message {number} has no role", "{role: ..., content: ...}, or {from: ..., value: ...}")
    if message["role"] not in ROLES:
        raise BadRow(f"message {number} has the role {message['role']}", ", ".join(ROLES))
    content = message.get("content")
    if content is None and not message.get("tool_calls"):
        raise BadRow(f"message {number} ({message['role']}) has no content")
    is_parts = isinstance(content, list) and all(isinstance(part, Mapping) for part in content)
    if content is not None and not isinstance(content, str) and not is_parts:
        raise BadRow(f"the content of message {number} is a {type(content).__name__}, not text")
    if content == "" and message["role"] == "assistant" and not message.get("tool_calls"):
        raise BadRow(f"message {number} (assistant) is empty")
    return message
