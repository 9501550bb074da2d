"""Make what a fine-tuning begins with, small enough for a laptop: a model directory, and a file of chats.

    python prepare.py DIRECTORY

writes `model/` (config, weights and tokenizer, as they come from a hub), `documents.jsonl` and `chats.jsonl`. The
weights are random: the tutorial pretrains them on the documents first. Needs `transformers` and `tokenizers`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

NUMBERS = "zero one two three four five six seven eight nine ten eleven twelve".split()

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def documents() -> list[str]:
    """Sentences of which the model learns the words."""
    counted = [f"{NUMBERS[i]} comes before {NUMBERS[i + 1]}." for i in range(12)]
    opposites = [f"{NUMBERS[i + 1]} comes after {NUMBERS[i]}." for i in range(12)]
    return [" ".join(counted[i % 12 :] + opposites[: i % 12 + 1]) for i in range(120)]


def chats() -> list[list[dict[str, str]]]:
    """Questions with their answers, as messages."""
    rows = []
    for number in range(240):
        i = number % 12
        after = (number // 12) % 2 == 0
        question = f"What comes {'after' if after else 'before'} {NUMBERS[i] if after else NUMBERS[i + 1]}?"
        answer = NUMBERS[i + 1] if after else NUMBERS[i]
        rows.append([{"role": "user", "content": question}, {"role": "assistant", "content": f"It is {answer}."}])
    return rows


def tokenizer_of(texts: list[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer trained on `texts`, with a chat template."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=384, special_tokens=special, initial_alphabet=alphabet)
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|endoftext|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def main() -> None:
    directory = Path(sys.argv[1])
    directory.mkdir(parents=True, exist_ok=True)
    texts, rows = documents(), chats()
    tokenizer = tokenizer_of([*texts, *(message["content"] for row in rows for message in row)])
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(directory / "model")
    tokenizer.save_pretrained(directory / "model")
    for name, lines in (("documents", [{"text": text} for text in texts]), ("chats", [{"messages": row} for row in rows])):
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    print(f"{directory}: a model of {sum(p.numel() for p in LlamaForCausalLM(config).parameters()):,} parameters")


if __name__ == "__main__":
    main()
