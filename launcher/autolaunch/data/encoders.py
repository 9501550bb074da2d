"""From a row to tokens, and to which of them are trained on."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from autolaunch.data.conversations import Messages, conversation
from autolaunch.data.rows import BadRow, text_of
from autolaunch.data.tokenizers import BYTES_END, end_of_text, no_template
from autolaunch_strategies.config import ConfigError

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_SHOWN = 60

Example = tuple[np.ndarray, np.ndarray]
"""Token ids and which of them are trained on (bool), both [length]."""


class Encoder(Protocol):
    """Makes examples of rows."""

    vocab_size: int
    pad: int

    def encode(self, rows: Sequence[Mapping[str, Any]]) -> list[Example | BadRow]:
        """The example of every row, or why there is none."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some tokens, the special ones included."""
        ...


@dataclass
class DocumentEncoder:
    """Documents as tokens with an end-of-text token behind them, all trained on.

    Args:
        tokenizer: of `transformers`; None for the bytes of UTF-8.
        text_key: the column with the text.
    """

    tokenizer: Any
    text_key: str
    vocab_size: int = field(init=False)
    pad: int = field(init=False)

    def __post_init__(self) -> None:
        self.vocab_size = BYTES_END + 1 if self.tokenizer is None else len(self.tokenizer)
        self.end = BYTES_END if self.tokenizer is None else end_of_text(self.tokenizer)
        self.pad = BYTES_END if self.tokenizer is None else padding(self.tokenizer)

    def encode(self, rows: Sequence[Mapping[str, Any]]) -> list[Example | BadRow]:
        bad = [self._problem(row) for row in rows]
        texts = [row[self.text_key] for row, problem in zip(rows, bad, strict=True) if problem is None]
        encoded = iter(self._ids(texts))
        return [problem or self._example(next(encoded)) for problem in bad]

    def _problem(self, row: Mapping[str, Any]) -> BadRow | None:
        try:
            text_of(row, self.text_key)
        except BadRow as problem:
            return problem
        return None

    def _ids(self, texts: list[str]) -> Sequence[Sequence[int]]:
        if self.tokenizer is None:
            return [list(text.encode(errors="replace")) for text in texts]
        return self.tokenizer(texts, verbose=False)["input_ids"] if texts else []

    def _example(self, ids: Sequence[int]) -> Example:
        end = [] if self.end is None or (len(ids) and ids[-1] == self.end) else [self.end]
        tokens = np.asarray([*ids, *end], np.int64)
        return tokens, np.ones(len(tokens), bool)

    def decode(self, ids: Sequence[int]) -> str:
        if self.tokenizer is None:
            return "".join(
                "<|end|>" if part == [BYTES_END] else bytes(part).decode(errors="replace")
                for part in _split_at(list(ids), BYTES_END)
            )
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


class ChatEncoder:
    """Conversations as the chat template renders them, and what the assistant says in them as what is trained on.

    What that is, the template's own ``{% generation %}`` marks say. Without them it is what the longer rendering adds
    to the prompt of each answer, which must begin it, text and tokens: else nothing would be known of where an
    answer begins, or the model would be trained on other prompts than it will be given.

    Args:
        tokenizer: of `transformers`.
        chat_template: a jinja template in place of the tokenizer's own.
        train_on: `assistant` (all that it says), `last` (its last answer), `all` (every token).
        train_on_eos: whether the token that ends an answer is trained on.
        columns: see `conversation`.

    Raises:
        ConfigError: there is no template, or it is no jinja.
    """

    def __init__(
        self,
        tokenizer: Any,
        chat_template: str | None,
        train_on: str,
        train_on_eos: bool,
        columns: Mapping[str, str],
    ) -> None:
        self.tokenizer, self.chat_template = tokenizer, chat_template
        self.train_on, self.train_on_eos, self.columns = train_on, train_on_eos, columns
        self.vocab_size, self.pad = len(tokenizer), padding(tokenizer)
        try:
            template = tokenizer.get_chat_template(chat_template)
        except ValueError:
            raise no_template(tokenizer.name_or_path) from None
        self.is_marked = bool(_GENERATION.search(template))
        self._check_syntax(template)
        added = tokenizer.added_tokens_decoder
        self._special = {*tokenizer.all_special_ids, *(number for number, token in added.items() if token.special)}

    def _check_syntax(self, template: str) -> None:
        from jinja2 import TemplateSyntaxError

        try:
            self.tokenizer.apply_chat_template(
                [{"role": "user", "content": ""}], chat_template=template, tokenize=False
            )
        except TemplateSyntaxError as error:
            raise ConfigError(
                "data.chat_template", f"not a jinja template: {error.message} in line {error.lineno}"
            ) from error
        except Exception:  # what it says to real messages counts
            return

    def encode(self, rows: Sequence[Mapping[str, Any]]) -> list[Example | BadRow]:
        return [self._encode_row(row) for row in rows]

    def _encode_row(self, row: Mapping[str, Any]) -> Example | BadRow:
        try:
            return self._encode_one(*conversation(row, self.columns))
        except BadRow as bad:
            return bad

    def _encode_one(self, messages: Messages, tools: list[Any] | None) -> Example | BadRow:
        try:
            ids, trained = self._marked(messages, tools) if self.is_marked else self._by_prefixes(messages, tools)
            if self.train_on == "all":
                trained = np.ones(len(ids), bool)
            # The first token is predicted from nothing.
            if not trained[1:].any():
                raise BadRow("no token of it is trained on")
        except BadRow as bad:
            return bad
        return np.asarray(ids, np.int64), trained

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def end_of_answers(self) -> int | None:
        """The special token that ends an answer; None where answers are only followed by other text, or not known."""
        example = self._encode_one([{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}], None)
        if isinstance(example, BadRow):
            return None
        ids, trained = example
        last = int(ids[np.flatnonzero(trained)[-1]])
        return last if last in self._special else None

    def _render(self, messages: Messages, tools: list[Any] | None, **options: Any) -> Any:
        try:
            return self.tokenizer.apply_chat_template(
                messages, tools=tools, chat_template=self.chat_template, **{"tokenize": False, **options}
            )
        except Exception as error:  # templates raise what they like
            raise BadRow(f"the chat template refuses it: {' '.join(str(error).split())}") from error

    def _marked(self, messages: Messages, tools: list[Any] | None) -> tuple[list[int], np.ndarray]:
        encoded = self._render(messages, tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        ids, mask = list(encoded["input_ids"]), np.asarray(encoded["assistant_masks"], bool)
        edges = np.flatnonzero(np.diff(mask, prepend=False, append=False))
        spans = [(int(start), int(end)) for start, end in zip(edges[::2], edges[1::2], strict=True)]
        return ids, self._trained(ids, spans)

    def _by_prefixes(self, messages: Messages, tools: list[Any] | None) -> tuple[list[int], np.ndarray]:
        text = self._render(messages, tools)
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        ids, offsets = list(encoded["input_ids"]), encoded["offset_mapping"]
        if self.train_on == "all":
            return ids, np.ones(len(ids), bool)
        answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        spans: list[tuple[int, int]] = []
        for number in answers if self.train_on == "assistant" else answers[-1:]:
            start = self._start(messages[:number], tools, text, ids)
            so_far = text if number == len(messages) - 1 else self._render(messages[: number + 1], tools)
            if text.startswith(so_far):
                end = next((place for place in range(start, len(ids)) if offsets[place][0] >= len(so_far)), len(ids))
            else:
                end = self._end(messages[number], start, ids)
            spans.append((start, end))
        return ids, self._trained(ids, spans)

    def _start(self, before: Messages, tools: list[Any] | None, text: str, ids: list[int]) -> int:
        """How many tokens the prompt of an answer has."""
        if not before:
            raise BadRow("the assistant speaks first, to no prompt: the chat template marks no answers")
        prompt = self._render(before, tools, add_generation_prompt=True)
        if not text.startswith(prompt):
            raise self._unstable(prompt, text)
        prefix = self.tokenizer(prompt, add_special_tokens=False, verbose=False)["input_ids"]
        if ids[: len(prefix)] != list(prefix):
            raise self._unstable(prompt, text, "tokens")
        return len(prefix)

    def _end(self, message: Mapping[str, Any], start: int, ids: list[int]) -> int:
        """The end of an answer in a template that renders earlier answers otherwise (without reasoning, as Qwen3's).

        It is the next end-of-text token, if what stands before it is the answer, or the last part of it.
        """
        end = next((place for place in range(start, len(ids)) if ids[place] == self.tokenizer.eos_token_id), None)
        said = "" if end is None else self.decode(ids[start:end]).strip()
        content = message.get("content")
        if end is None or not said or not isinstance(content, str) or not content.strip().endswith(said):
            raise BadRow(
                "the chat template renders this answer otherwise when other messages follow, so that its end is not "
                f"known: {_beginning(str(content))}",
                "a template that is prefix-stable or has {% generation %} marks (data.chat_template)",
                "data.train_on=last",
            )
        return end + 1

    def _unstable(self, prompt: str, text: str, what: str = "text") -> BadRow:
        same = next((at for at, pair in enumerate(zip(prompt, text, strict=False)) if pair[0] != pair[1]), None)
        same = min(len(prompt), len(text)) if same is None else same
        first = max(same - _SHOWN // 2, 0)
        return BadRow(
            f"the chat template is not prefix-stable: the {what} of a prompt changes when its answer follows; "
            f"{prompt[first : same + _SHOWN // 2]!r} becomes {text[first : same + _SHOWN // 2]!r}",
            "a template that is prefix-stable or has {% generation %} marks (data.chat_template)",
            "data.train_on=all, for training on every token",
        )

    def _trained(self, ids: list[int], spans: Sequence[tuple[int, int]]) -> np.ndarray:
        """Which tokens are trained on, given the spans of answers: each up to the special token that ends it."""
        trained = np.zeros(len(ids), bool)
        for start, end in spans[-1:] if self.train_on == "last" else spans:
            last = end
            while last > start and ids[last - 1] not in self._special and not self.decode([ids[last - 1]]).strip():
                last -= 1
            if last > start and ids[last - 1] in self._special:
                end = last if self.train_on_eos else last - 1
            elif end < len(ids) and ids[end] in self._special and self.train_on_eos:
                end += 1  # a template that marks answers without their end
            trained[start:end] = True
        return trained


def padding(tokenizer: Any) -> int:
    """The id that sequences are padded with; which one does not matter, as nothing looks at it."""
    candidates = (tokenizer.pad_token_id, tokenizer.eos_token_id)
    return next((number for number in candidates if number is not None), 0)


def _beginning(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}...")


def _split_at(ids: list[int], border: int) -> list[list[int]]:
    parts: list[list[int]] = [[]]
    for number in ids:
        if number == border:
            parts += [[border], []]
        else:
            parts[-1].append(number)
    return [part for part in parts if part]
