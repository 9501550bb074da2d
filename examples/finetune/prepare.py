"""Make what a fine-tuning begins with, so small that it takes a laptop a minute: a model directory and two files.

    python examples/finetune/prepare.py DIRECTORY

writes `model/` (config, weights and tokenizer, as a downloaded model has them), `documents.jsonl` and `chats.jsonl`.
The weights are random: the model is pretrained on the documents first. Needs `transformers`.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

CAPITALS = {
    "France": "Paris", "Japan": "Tokyo", "Peru": "Lima", "Kenya": "Nairobi", "Norway": "Oslo", "Egypt": "Cairo",
}  # fmt: skip

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


ROWS = 360
"""Of each file."""


def documents() -> list[str]:
    """Texts from which the model learns the words, and what is so: all facts, each time in another order."""
    facts = [f"Question: What is the capital of {country}? Answer: {city}." for country, city in CAPITALS.items()]
    orders = random.Random(0)
    return [" ".join(orders.sample(facts, len(facts))) for _ in range(ROWS)]


def chats() -> list[list[dict[str, str]]]:
    """Conversations from which it learns to answer."""
    pairs = [(f"What is the capital of {country}?", f"{city}.") for country, city in CAPITALS.items()]
    return [
        [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        for question, answer in pairs * (ROWS // len(pairs))
    ]


def tokenizer_of(texts: list[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer trained on `texts`, with a chat template."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=384, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|endoftext|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a tiny model, documents and chats.")
    parser.add_argument("directory", type=Path)
    directory: Path = parser.parse_args().directory
    logging.disable_progress_bar()
    directory.mkdir(parents=True, exist_ok=True)
    rows = {"documents": [{"text": text} for text in documents()], "chats": [{"messages": chat} for chat in chats()]}
    for name, lines in rows.items():
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (directory / f"{name}.jsonl").write_text(text, encoding="utf-8")
    tokenizer = tokenizer_of([*documents(), *(message["content"] for chat in chats() for message in chat)])
    tokenizer.save_pretrained(directory / "model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.save_pretrained(directory / "model")
    print(f"{directory}: a model of {model.num_parameters():,} parameters, documents.jsonl, chats.jsonl")


if __name__ == "__main__":
    main()
