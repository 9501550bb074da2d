"""How far fine-tuning on a mesh is from one process: chats, packed chats, LoRA and classification, by the command.

    python tests/benchmarks/fine_tuning_meshes.py [--kinds chat packing lora classification] [--meshes "mesh=2" ...]

Printed is the largest relative difference of the loss and of the gradient norm over all steps, of a tiny llama of
`transformers` in fp32 on the CPU.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
STEPS = 5
USUAL = (
    *("model=hf", "model.path=model", "data.batch_size=8"),
    *("data.validation_fraction=0", f"trainer.max_steps={STEPS}", "trainer.accelerator=cpu", "optimizer.lr=1e-3"),
)
CHATS = ("data=chat", "data.path=chats.jsonl")
KINDS = {
    "chat": (*CHATS, "data.seq_len=48"),
    "packing": (*CHATS, "data.seq_len=128", "data.packing=documents"),  # several chats in a row
    "lora": (*CHATS, "data.seq_len=48", "adapter=lora"),
    "classification": (
        *("data=classification", "data.path=labels.jsonl", "data.seq_len=48"),
        "model.task=sequence_classification",
    ),
}
MESHES = (
    "mesh=2 dp=fsdp", "mesh=mp2 mp=tensor_parallel", "mesh=mp2 mp=seq_parallel", "mesh=pp2 pp=exact",
    "mesh=pp2 pp=1f1b data.microbatches=2", "mesh=cp2 cp=gather", "mesh=cp2 cp=ring", "mesh=cp2 cp=ulysses",
    "mesh=cp4 cp=usp", "mesh=mp2xpp2xcp2 mp=seq_parallel cp=ring",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--meshes", nargs="+", default=list(MESHES))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        make_model_and_chats(directory)
        alone = {kind: run(directory, kind, "mesh=1") for kind in arguments.kinds}
        print(f"| mesh | {' | '.join(arguments.kinds)} |\n|---{'|---' * len(arguments.kinds)}|", flush=True)
        for mesh in arguments.meshes:
            cells = [difference(alone[kind], run(directory, kind, mesh)) for kind in arguments.kinds]
            print(f"| `{mesh}` | " + " | ".join(f"{cell:.0e}" for cell in cells) + " |", flush=True)


def make_model_and_chats(directory: Path) -> None:
    """A tiny llama with random weights, its tokenizer, and short chats of different lengths."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    sys.path.insert(0, str(ROOT))
    from tests.support.chats import chat_tokenizer, save_tokenizer

    shape: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(vocab_size=len(chat_tokenizer()), **shape)).save_pretrained(directory / "model")
    save_tokenizer(directory / "model")
    with (directory / "chats.jsonl").open("w") as file:
        for number in range(100):
            answer = {"role": "assistant", "content": "two " * (1 + number % 7)}
            file.write(json.dumps({"messages": [{"role": "user", "content": f"what {number}"}, answer]}) + "\n")
    with (directory / "labels.jsonl").open("w") as file:
        for number in range(100):
            file.write(json.dumps({"text": "what " + "two " * (1 + number % 7), "label": number % 2}) + "\n")


def run(directory: Path, kind: str, mesh: str) -> list[tuple[float, float]]:
    """(loss, gradient norm) of every step."""
    out = directory / f"{kind} {mesh}".replace(" ", "_").replace("=", "-")
    paths = [str(ROOT / "launcher"), str(ROOT / "strategies"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
    environment |= {"HF_HUB_OFFLINE": "1", "XDG_CACHE_HOME": str(directory / "cache")}
    words = [sys.executable, "-m", "autolaunch", *USUAL, *KINDS[kind], *mesh.split(), f"output_dir={out}"]
    done = subprocess.run(words, cwd=directory, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(words)} ended with {done.returncode}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    with (out / "metrics.csv").open(newline="") as file:
        rows = [(float(row["loss"]), float(row["grad_norm"])) for row in csv.DictReader(file) if row["loss"]]
    assert len(rows) == STEPS
    return rows


def difference(expected: list[tuple[float, float]], found: list[tuple[float, float]]) -> float:
    pairs = [pair for before, after in zip(expected, found, strict=True) for pair in zip(before, after, strict=True)]
    return max(abs(after / before - 1) for before, after in pairs)


if __name__ == "__main__":
    main()
