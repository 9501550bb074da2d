"""Ask an exported model, with transformers alone: python ask.py DIRECTORY QUESTION ..."""

from __future__ import annotations

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    directory, *questions = sys.argv[1:]
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory)
    for question in questions:
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        answer = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0, prompt["input_ids"].shape[1] :]
        print(f"{question}  {tokenizer.decode(answer, skip_special_tokens=True)}")


if __name__ == "__main__":
    main()
