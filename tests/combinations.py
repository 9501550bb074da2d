"""Models, data and options drawn at random, on meshes drawn at random: what nobody has put together yet.

    python -m tests.combinations --minutes 30 [--seed 0] [--trials 1]

A trial trains a tiny model on one process and on a mesh, and goes on with a checkpoint of the mesh on another mesh.
Losses, gradient norms, learning rates and tokens of every step are compared with those of one process. Printed is a
line for each trial, with its seed, which draws the same again: `same`, `refused` (by a message and exit code 2),
`differs` or `crashes`; the exit code is the number of the last two. Weights are updated by SGD: Adam makes large steps
of gradients that are nothing but rounding.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support import warm
from tests.support.commands import Commands, Run, assert_same_curve

STEPS, BATCH = 4, 12
AS_LLAMA = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
AS_GPT2 = {"n_embd": 32, "n_head": 4, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
AS_NEOX = {"hidden_size": 32, "num_attention_heads": 4}
WINDOW = {"sliding_window": 8}
MODELS: dict[str, dict[str, object]] = {
    "bloom": {"hidden_size": 32, "n_head": 4, "hidden_dropout": 0.0, "attention_dropout": 0.0},
    "cohere2": AS_LLAMA | WINDOW,
    "ernie4_5": AS_LLAMA,
    "falcon": AS_NEOX | {"alibi": "false", "bias": "false"},
    "gemma2": AS_LLAMA | WINDOW | {"query_pre_attn_scalar": 8},
    "gemma3_text": AS_LLAMA | WINDOW | {"query_pre_attn_scalar": 8},
    "glm4": AS_LLAMA | {"pad_token_id": 0},
    "gpt2": AS_GPT2,
    "gpt_neox": AS_NEOX,
    "granite": AS_LLAMA,
    "mistral": AS_LLAMA | WINDOW,
    "mixtral": AS_LLAMA | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "olmo2": AS_LLAMA,
    "opt": AS_NEOX | {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0, "pad_token_id": 1},
    "phi": AS_NEOX | {"resid_pdrop": 0.0, "embd_pdrop": 0.0},
    "qwen2": AS_LLAMA,
    "qwen3": AS_LLAMA,
    "qwen3_moe": AS_LLAMA | {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "smollm3": AS_LLAMA | {"pad_token_id": 0},
}
"""Of `transformers`: type -> its sizes; the number of layers is `_LAYERS` of it, else num_hidden_layers."""
_LAYERS = {"bloom": "n_layer", "gpt2": "n_layer"}
SCHEDULES = (
    "gpipe", "1f1b", "looped_bfs", "interleaved_1f1b", "interleaved_zero_bubble", "zbv_zero_bubble", "dualpipev",
)  # fmt: skip


@dataclass(frozen=True)
class Trial:
    """What one seed draws."""

    everywhere: list[str]
    """Arguments of every run."""
    first: list[str]
    """Those of the run on a mesh."""
    second: list[str]
    """Those of the run that goes on with its checkpoint."""

    def __str__(self) -> str:
        return f"{shlex.join(self.everywhere)} | {shlex.join(self.first)} | {shlex.join(self.second)}"


class Draws:
    """Draws trials.

    Args:
        documents: a file of documents.
    """

    def __init__(self, seed: int, documents: Path) -> None:
        self._random, self._documents = random.Random(seed), documents

    def trial(self) -> Trial:
        """One of them."""
        everywhere = [*self._model(), *self._data(), f"data.batch_size={BATCH}", f"trainer.max_steps={STEPS}"]
        everywhere += ["optimizer=sgd", "optimizer.lr=0.05"]
        clips = ([], ["trainer.gradient_clip_val=0.1"], ["trainer.gradient_clip_algorithm=value"])
        everywhere += self._random.choice(clips)
        everywhere += self._sometimes(0.2, f"adapter={self._random.choice(('lora', 'dora'))}")
        everywhere += self._sometimes(0.15, "callbacks=ema")
        asynchronous = self._sometimes(0.3, "checkpoint.asynchronous=true")
        return Trial(everywhere, [*self._mesh(), *asynchronous], self._mesh())

    def _sometimes(self, share: float, argument: str) -> list[str]:
        return [argument] if self._random.random() < share else []

    def _model(self) -> list[str]:
        layers, rows = self._random.choice((3, 4, 4, 6, 8)), self._random.choice((48, 49, 51))
        vocabulary = self._random.choice((257, 263))
        kind = self._random.choice(["llama", *MODELS])
        if kind == "llama":
            sizes = {"vocab_size": vocabulary, "hidden_size": 32, "intermediate_size": rows, "num_layers": layers}
            sizes |= {"num_heads": 4, "num_kv_heads": self._random.choice((2, 4)), "max_seq_len": 64}
            return ["model=llama", *(f"model.{name}={size}" for name, size in sizes.items())]
        config = {"model_type": kind, "vocab_size": vocabulary, **MODELS[kind]}
        config[_LAYERS.get(kind, "num_hidden_layers")] = layers
        if MODELS[kind] in (AS_LLAMA, AS_NEOX):
            config["intermediate_size"] = rows
        return ["model=hf", f"model.config={{{', '.join(f'{name}: {value}' for name, value in config.items())}}}"]

    def _data(self) -> list[str]:
        data = [f"data.seq_len={self._random.choice((16, 17, 24, 32))}"]
        if self._random.random() < 0.5:
            return data
        data += ["data=documents", f"data.path={self._documents}", "data.tokenizer=bytes"]
        packing = self._random.choice(("none", "documents"))
        return [*data, f"data.packing={packing}", *self._sometimes(0.3, "data.streaming=true")]

    def _mesh(self) -> list[str]:
        axes = dict.fromkeys(("dp", "mp", "pp", "cp"), 1)
        for factor in self._random.choice(((2,), (3,), (2, 2), (2, 2), (4,), (2, 3), (2, 2, 2))):
            axes[self._random.choice(("dp", "cp", "pp") if factor == 3 else tuple(axes))] *= factor
        arguments = ["mesh=" + "x".join(f"{axis}{size}" for axis, size in axes.items() if size > 1)]
        if axes["dp"] > 1:
            levels = ("ddp", "zero1", "zero2", "fsdp", "fsdp", *(["hsdp"] if axes["dp"] == 4 else []))
            arguments.append(f"dp={self._random.choice(levels)}")
        if axes["mp"] > 1:
            arguments.append(f"mp={self._random.choice(('auto', 'tensor_parallel', 'seq_parallel'))}")
        if axes["pp"] > 1:
            schedule = self._random.choice(("exact", *SCHEDULES))
            arguments.append(f"pp={schedule}")
            if schedule != "exact":
                arguments.append(f"pp.microbatches={self._random.choice((2, 3, 4, 6))}")
        if axes["cp"] > 1:
            arguments += [f"cp={self._random.choice(('gather', 'ring', 'ulysses'))}", "cp.pad=true"]
        return arguments + self._sometimes(0.4, f"recompute={self._random.choice(('full', '2', 'selective'))}")


def tried(trial: Trial, command: Commands) -> str:
    """What came of a trial, in a line."""
    try:
        whole = _ended(command(*trial.everywhere, code=None))
        half = _ended(command(*trial.everywhere, *trial.first, "checkpoint.every_n_steps=2", code=None))
        assert_same_curve(half, whole)
        rest = _ended(command(*trial.everywhere, *trial.second, f"ckpt_path={half.checkpoint_at(2)}", code=None))
        assert_same_curve(rest, whole, after=2)
    except Unfit as said:
        return str(said)
    except AssertionError as difference:
        return f"differs: {_line(difference)}"
    except Exception as error:  # a time limit, or files that are not there
        return f"crashes: {type(error).__name__}: {_line(error)}"
    return "same"


class Unfit(Exception):
    """A run that did not end well."""


def _ended(run: Run) -> Run:
    if run.code:
        said = re.sub(r"\s*\n\s*", " / ", run.screen.strip())[-500:]
        raise Unfit(f"{'refused' if run.code == 2 else 'crashes'}: {said}")
    return run


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def _write_documents(path: Path) -> None:
    drawn, words = random.Random(0), ("a", "cat", "sat", "on", "the", "mat", "and", "ran", "over", "old", "hills")
    texts = (" ".join(drawn.choice(words) for _ in range(drawn.randint(1, 20))) for _ in range(600))
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the trials of the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.combinations", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--trials", type=int, default=10**6)
    parser.add_argument("--seed", type=int, default=0, help="of the first trial; each has the next")
    options = parser.parse_args(arguments)
    end, bad = time.monotonic() + 60 * options.minutes, 0
    server, _listener = warm.start_server("transformers")
    try:
        for seed in range(options.seed, options.seed + options.trials):
            if time.monotonic() > end:
                break
            with tempfile.TemporaryDirectory() as directory:
                documents = Path(directory, "documents.jsonl")
                _write_documents(documents)
                trial = Draws(seed, documents).trial()
                result = tried(trial, Commands(Path(directory), timeout=300))
            bad += result.startswith(("differs", "crashes"))
            print(f"{seed} {result.partition(':')[0]} | {trial} {result.partition(':')[2]}".rstrip(), flush=True)
    finally:
        server.terminate()
        server.wait()
    return min(bad, 100)


if __name__ == "__main__":
    sys.exit(main())
