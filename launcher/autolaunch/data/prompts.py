"""What text is generated from: prompts as tokens, and tokens as text. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from autolaunch.data.documents import expanded
from autolaunch.data.tokenizers import (
    BYTES_END,
    end_of_text,
    ends_of_generation,
    load_tokenizer,
    template_text,
    whole_tokenizer,
)
from autolaunch_strategies.config import ConfigError

KINDS = "a text, a list of messages {role: ..., content: ...}, or a list of token ids"


def check_prompts(prompts: Any, key: str) -> None:
    """Check that `prompts` is a list of such.

    Raises:
        ConfigError: there are none, or one is of another kind.
    """
    if not isinstance(prompts, list | tuple) or not prompts:
        raise ConfigError(
            key if isinstance(prompts, list | tuple) else f"{key}={prompts}",
            "there is nothing to go on from",
            f"a list; in it {KINDS}",
            f"{key}=['Once upon a time']",
        )
    for index, prompt in enumerate(prompts):
        if not (isinstance(prompt, str) and prompt) and not _is_messages(prompt) and not _is_ids(prompt):
            raise ConfigError(f"{key}[{index}]", f"is {prompt!r}", KINDS)


def outside_of(ids: Sequence[int], vocab_size: int | None, key: str) -> ConfigError | None:
    """The error for the tokens of a prompt that a model does not know; None if it knows all, or how many is not known.

    Args:
        key: of the prompt.
    """
    unknown = next((number for number in ids if number < 0 or (vocab_size is not None and number >= vocab_size)), None)
    if unknown is None:
        return None
    has = "the ids of tokens begin at 0" if vocab_size is None else f"the model knows only {vocab_size} tokens"
    allowed = "ids from 0" + ("" if vocab_size is None else f" to {vocab_size - 1}")
    return ConfigError(key, f"the token {unknown} is in it, and {has}", f"{allowed}; for a text, the model's tokenizer")


def unknown_ids(prompts: Any, vocab_size: int | None, key: str) -> list[ConfigError]:
    """The errors for prompts of token ids that a model does not know.

    Args:
        prompts: as they were typed; what is no list of ids is left alone.
        key: which key gives them.
    """
    listed = enumerate(prompts if isinstance(prompts, list | tuple) else ())
    found = (outside_of(prompt, vocab_size, f"{key}[{index}]") for index, prompt in listed if _is_ids(prompt))
    return [error for error in found if error is not None]


def _is_messages(prompt: Any) -> bool:
    items = isinstance(prompt, list | tuple) and len(prompt) > 0
    return items and all(isinstance(item, Mapping) and {"role", "content"} <= item.keys() for item in prompt)


def _is_ids(prompt: Any) -> bool:
    items = isinstance(prompt, list | tuple) and len(prompt) > 0
    return items and all(isinstance(item, int) and not isinstance(item, bool) for item in prompt)


class PromptEncoder:
    """Makes tokens of prompts and text of tokens, by the tokenizer of a job.

    Args:
        data_cfg: the group `data` of a resolved job. Without a tokenizer in it, prompts are token ids. Of a
            tokenizer.json that stands beside the rest of its tokenizer, it is the whole that is taken.

    Raises:
        ConfigError: `transformers` is not installed, or cannot read the tokenizer.
    """

    def __init__(self, data_cfg: Mapping[str, Any]) -> None:
        name = data_cfg.get("tokenizer") if "_target_" not in data_cfg else None
        self.in_bytes = name == "bytes"
        self.name = None if name in (None, "bytes") else whole_tokenizer(str(name))
        self.tokenizer = None if self.name is None else load_tokenizer(self.name)
        template = data_cfg.get("chat_template")
        self.chat_template = None if template is None else template_text(template)
        end = BYTES_END if self.in_bytes else None if self.tokenizer is None else end_of_text(self.tokenizer)
        ends = (end, self._end_of_answers(data_cfg))
        said = frozenset() if self.name is None else ends_of_generation(expanded(self.name))
        self.ends = said | {number for number in ends if number is not None}
        """Tokens behind which nothing is generated."""

    def _end_of_answers(self, data_cfg: Mapping[str, Any]) -> int | None:
        """What a model that is tuned on chats learns to end its answers with: a base model ends with another token."""
        if self.tokenizer is None or data_cfg.get("name") != "chat" or not data_cfg.get("train_on_eos"):
            return None
        from autolaunch.data.encoders import ChatEncoder  # and numpy, without which prompts are checked

        return ChatEncoder(self.tokenizer, self.chat_template, "last", True, {}).end_of_answers()

    def encode(self, prompt: Any, key: str) -> list[int]:
        """The tokens of a prompt; of messages, as the chat template renders them before an answer.

        Raises:
            ConfigError: there is no tokenizer, or no chat template, for a prompt of this kind.
        """
        if _is_ids(prompt):
            return list(prompt)
        if isinstance(prompt, str) and self.in_bytes:
            return list(prompt.encode())
        if self.tokenizer is None:
            raise ConfigError(
                key,
                "bytes have no chat template" if self.in_bytes else "there is no tokenizer, so a prompt is token ids",
                "a tokenizer, by data.tokenizer or that of model.path" + (", or a text" if self.in_bytes else ""),
            )
        if isinstance(prompt, str):
            ids = list(self.tokenizer(prompt, verbose=False)["input_ids"])
            return ids[:-1] if len(ids) > 1 and ids[-1] in self.ends else ids
        try:
            self.tokenizer.get_chat_template(self.chat_template)
        except ValueError:
            raise ConfigError(
                key,
                f"is a conversation, and the tokenizer {self.name} has no chat template",
                "a text; data.tokenizer with a chat template; with data=chat, data.chat_template: a file with a "
                "jinja template, or the template itself",
                "data=chat data.chat_template=chatml.jinja",
            ) from None
        messages = [dict(message) for message in prompt]
        text = self.tokenizer.apply_chat_template(
            messages, chat_template=self.chat_template, add_generation_prompt=True, tokenize=False
        )
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def decode(self, ids: Sequence[int]) -> str:
        """The text of generated tokens, without special ones; without a tokenizer, the ids themselves."""
        if self.in_bytes:
            return bytes(number for number in ids if number < BYTES_END).decode(errors="replace")
        if self.tokenizer is None:
            return " ".join(map(str, ids))
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    @staticmethod
    def shown(prompt: Any) -> str:
        """A prompt in one line of text: of messages, the last."""
        if isinstance(prompt, str):
            return prompt
        return str(prompt[-1]["content"]) if _is_messages(prompt) else " ".join(map(str, prompt))
