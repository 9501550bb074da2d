"""Ask an exported model, with transformers alone: python examples/finetune/ask.py DIRECTORY QUESTION ..."""

from __future__ import annotations

import argparse
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging


def main() -> None:
    parser = argparse.ArgumentParser(description="Print what a model answers.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("questions", nargs="+")
    asked = parser.parse_args()
    if not (asked.directory / "config.json").exists():
        parser.error(f"{asked.directory}: no model is exported there")
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(asked.directory)
    model = AutoModelForCausalLM.from_pretrained(asked.directory)
    for question in asked.questions:
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        answer = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0, prompt["input_ids"].shape[1] :]
        print(f"{question} {tokenizer.decode(answer, skip_special_tokens=True)}")


if __name__ == "__main__":
    main()
