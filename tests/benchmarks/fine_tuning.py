"""Step time of `autolaunch model=hf data=chat` beside TRL's SFTTrainer: same tiny model, tokenizer, chats and batch.

    pip install trl
    python tests/benchmarks/fine_tuning.py [--ranks 1 2] [--rounds 3] [--steps 30]

Both are run as people run them, in new processes (the command; torchrun for SFTTrainer on several ranks), in fp32 on
the CPU with AdamW, clipping and one log line per step, and replicas on several ranks. They take turns, so that the
machine's drift hits both. Every row is as long as the model is trained on, so that neither gains by padding less.

Printed are medians over rounds, the least and the largest: the median step without the first five, and the processor
time of a step over all ranks, by which a long run takes more than a short one (what a busy machine is measured by); and
the median ratios of neighbouring runs: below 1, autolaunch is faster. The losses of the last step come last.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
BATCH, LENGTH, LEARNING_RATE = 8, 128, 1e-3
"""Rows of an optimizer step over all ranks, and tokens of a row."""
FIRST = 5
"""Steps that do not count."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--trl", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if find_spec("trl") is None:
        sys.exit("TRL is not installed, and no part of this package: pip install trl")
    if arguments.trl is not None:
        train_with_trl(arguments.trl, arguments.steps)
        return
    with tempfile.TemporaryDirectory() as directory:
        make_model_and_chats(Path(directory))
        print(f"{'ranks':>5} {'':>10} {'TRL':>27} {'autolaunch':>27} {'ratio':>7}", flush=True)
        for ranks in arguments.ranks:
            compare(Path(directory), ranks, arguments.rounds, arguments.steps)


class Measured(NamedTuple):
    """A run: the median seconds of a step, processor seconds of one over all ranks, and the loss of the last."""

    wall: float
    processor: float
    loss: float


def compare(directory: Path, ranks: int, rounds: int, steps: int) -> None:
    theirs, ours = [], []
    for _ in range(rounds):
        theirs.append(measured(run_trl, directory, ranks, steps))
        ours.append(measured(run_autolaunch, directory, ranks, steps))
    for name in ("wall", "processor"):
        pairs = [(getattr(before, name), getattr(after, name)) for before, after in zip(theirs, ours, strict=True)]
        ratio = statistics.median(after / before for before, after in pairs)
        shown = [_shown(list(seconds)) for seconds in zip(*pairs, strict=True)]
        print(f"{ranks:>5} {name:>10} {shown[0]:>27} {shown[1]:>27} {ratio:>7.2f}", flush=True)
    print(f"{'':>5} {'loss':>10} {theirs[-1].loss:>27.3f} {ours[-1].loss:>27.3f}", flush=True)


def measured(run: Callable[..., tuple[float, float]], directory: Path, ranks: int, steps: int) -> Measured:
    before = _processor_seconds()
    run(directory, ranks, FIRST)
    between = _processor_seconds()
    wall, loss = run(directory, ranks, FIRST + steps)
    added = (_processor_seconds() - between) - (between - before)
    return Measured(wall, added / steps, loss)


def _processor_seconds() -> float:
    """Of all processes that were started here and have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _shown(seconds: list[float]) -> str:
    low, middle, high = (value * 1e3 for value in (min(seconds), statistics.median(seconds), max(seconds)))
    return f"{middle:.0f} ms ({low:.0f} to {high:.0f})"


def make_model_and_chats(directory: Path) -> None:
    """A llama of 0.9 M parameters with random weights, a tokenizer, and chats of more than `LENGTH` tokens."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    sys.path.insert(0, str(ROOT))
    from tests.support.chats import chat_tokenizer, save_tokenizer

    shape: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": LENGTH}
    torch.manual_seed(0)
    tokenizer = chat_tokenizer()
    special = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **shape, **special)).save_pretrained(directory / "model")
    save_tokenizer(directory / "model")
    with (directory / "chats.jsonl").open("w") as file:
        for number in range(500):
            answer = {"role": "assistant", "content": f"answer {number} is " * LENGTH}
            file.write(json.dumps({"messages": [{"role": "user", "content": f"what {number}"}, answer]}) + "\n")


def run_autolaunch(directory: Path, ranks: int, steps: int) -> tuple[float, float]:
    """(median seconds per step, loss of the last step) of the command."""
    out = directory / "ours"
    shutil.rmtree(out, ignore_errors=True)
    _run(
        directory, "-m", "autolaunch", "model=hf", "model.path=model", "data=chat", "data.path=chats.jsonl",
        "data.train_on=all", f"data.seq_len={LENGTH}", f"data.batch_size={BATCH}", f"trainer.max_steps={steps}",
        "data.validation_fraction=0", "trainer.accelerator=cpu", "trainer.gradient_clip_val=1.0", f"mesh={ranks}",
        f"optimizer.lr={LEARNING_RATE}", "optimizer.weight_decay=0", "dp=ddp", f"output_dir={out}",
    )  # fmt: skip
    with (out / "metrics.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["loss"]]
    seconds = statistics.median(float(row["step_time_s"]) for row in rows[FIRST:] or rows)
    return seconds, float(rows[-1]["loss"])


def run_trl(directory: Path, ranks: int, steps: int) -> tuple[float, float]:
    """(median seconds per step, loss of the last step) of SFTTrainer."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    _run(directory, *launch, __file__, "--trl", str(directory), "--steps", str(steps))
    told = json.loads((directory / "trl.json").read_text())
    return statistics.median(told["seconds"][FIRST:] or told["seconds"]), told["loss"]


def _run(directory: Path, *words: str) -> None:
    paths = [str(ROOT / "launcher"), str(ROOT / "strategies"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
    environment |= {"HF_HUB_OFFLINE": "1", "XDG_CACHE_HOME": str(directory / "cache"), "HF_HOME": str(directory / "hf")}
    done = subprocess.run([sys.executable, *words], cwd=directory, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(words)} ended with {done.returncode}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")


def train_with_trl(directory: Path, steps: int) -> None:
    """What a user of TRL writes; notes when each step ended."""
    from datasets import load_dataset
    from transformers import TrainerCallback
    from trl import SFTConfig, SFTTrainer

    ends: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            if not ends:
                ends.append(time.perf_counter())

        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.perf_counter())

    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    settings = SFTConfig(
        output_dir=str(directory / "theirs"), max_steps=steps, max_length=LENGTH, learning_rate=LEARNING_RATE,
        per_device_train_batch_size=BATCH // world_size, max_grad_norm=1.0, lr_scheduler_type="cosine", logging_steps=1,
        gradient_checkpointing=False, bf16=False, use_cpu=True, save_strategy="no", report_to=[], disable_tqdm=True,
    )  # fmt: skip
    data = load_dataset("json", data_files=str(directory / "chats.jsonl"), split="train")
    trainer = SFTTrainer(str(directory / "model"), args=settings, train_dataset=data, callbacks=[Clock()])
    trainer.train()
    if os.environ.get("RANK", "0") == "0":
        seconds = [after - before for before, after in pairwise(ends)]
        losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
        (directory / "trl.json").write_text(json.dumps({"seconds": seconds, "loss": losses[-1]}))


if __name__ == "__main__":
    main()
