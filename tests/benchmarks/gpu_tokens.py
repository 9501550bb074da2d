"""Tokens per second of llama-1b in bf16, compiled: MeshStrategy under lightning's Trainer, beside a loop by hand.

    python tests/benchmarks/gpu_tokens.py [--gpus 1] [--size 1b] [--length 4096] [--batch 4] [--rounds 8] [--torchtitan]

Both take turns of five steps in the same processes, so that what clocks and neighbours do hits both. The loop by hand
is what torch's examples write: FSDP2 (`fully_shard` on each block and the root, bf16 parameters, sums of gradients in
fp32), each block compiled, fused AdamW, clipping. Printed are medians over the turns, without the first two.
`--torchtitan` runs torchtitan 0.3.0 afterwards (`pip install torchtitan==0.3.0`) with the same model, tokens per step,
FSDP2 in bf16 and compiled blocks, and prints the median of what it logs. `--cpu` runs it where there is no GPU, to see
that it works; its figures mean nothing then.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

STEPS_PER_TURN = 5
TURNS_TO_WARM_UP = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--size", default="1b")
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=4, help="sequences of each rank")
    parser.add_argument("--rounds", type=int, default=8, help="turns of each; the first two are warm-up")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--torchtitan", action="store_true")
    parser.add_argument("--cpu", action="store_true")
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        run_rank(arguments)
        return
    root = Path(__file__).resolve().parents[2]
    paths = [str(root / "launcher"), str(root / "strategies"), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(arguments.gpus), "--standalone"]
    subprocess.run([*command, __file__, *sys.argv[1:]], check=True, env=env)
    if arguments.torchtitan:
        with tempfile.TemporaryDirectory() as directory:
            rate = torchtitan(arguments, Path(directory), command, env)
        print(f"{'torchtitan':>12}: {rate * arguments.gpus:33,.0f} tokens/s", flush=True)


TORCHTITAN = """
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.models.llama3 import model_registry
from torchtitan.models.llama3.config_registry import llama3_debugmodel


def bench():
    config = llama3_debugmodel()
    config.model_spec = model_registry("{flavor}")
    loss = CrossEntropyLoss.Config(global_vocab_size=config.model_spec.model.vocab_size)
    config.loss = ChunkedLossWrapper.Config(loss_fn=loss)
    config.hf_assets_path = config.dataloader.dataset_path = "{directory}/assets"
    config.training.local_batch_size, config.training.seq_len = {batch}, {length}
    config.training.steps = {steps}
    config.compile.enable = {compiled}
    config.activation_checkpoint = None
    config.validator.freq, config.validator.steps = 1_000_000, 1
    config.checkpoint.enable = False
    return config
"""
"""A module with a config of torchtitan's: its Llama 3 of a size, on a file of our own."""


def torchtitan(arguments: argparse.Namespace, directory: Path, command: list[str], env: dict[str, str]) -> float:
    """Tokens per second of each GPU that torchtitan logs, the median without its first steps."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    assets = directory / "assets"
    assets.mkdir()
    words = {f"w{number}": number for number in range(1000)}
    tokenizer = Tokenizer(models.WordLevel({**words, "<unk>": 1000, "<s>": 1001, "</s>": 1002}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(assets / "tokenizer.json"))
    special = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (assets / "tokenizer_config.json").write_text(json.dumps(special))
    lines = (
        json.dumps({"text": " ".join(f"w{(7 * row + place) % 1000}" for place in range(2000))}) for row in range(200)
    )
    (assets / "data.json").write_text("\n".join(lines))
    flavor = {"1b": "1B", "3b": "3B", "8b": "8B"}.get(arguments.size, "debugmodel")
    steps = arguments.rounds * STEPS_PER_TURN
    (directory / "titan_bench.py").write_text(
        TORCHTITAN.format(
            flavor=flavor,
            directory=directory,
            batch=arguments.batch,
            length=arguments.length,
            steps=steps,
            compiled=not arguments.no_compile,
        )
    )
    env = {**env, "PYTHONPATH": os.pathsep.join([str(directory), env["PYTHONPATH"]]), "NO_COLOR": "1"}
    words_of_run = ["-m", "torchtitan.train", "--module", "titan_bench", "--config", "bench"]
    done = subprocess.run(
        [*command, *words_of_run], cwd=directory, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    rates = [
        float(rate.replace(",", "")) for rate in re.findall(r"tps: ([\d,]+)", re.sub(r"\x1b\[\d*m", "", done.stdout))
    ]
    if done.returncode or len(rates) <= STEPS_PER_TURN * TURNS_TO_WARM_UP:
        raise SystemExit(f"torchtitan ended with {done.returncode}:\n{done.stdout[-4000:]}")
    return statistics.median(rates[STEPS_PER_TURN * TURNS_TO_WARM_UP :])


def run_rank(arguments: argparse.Namespace) -> None:
    import lightning.pytorch as pl
    import torch
    from torch.nn import functional as F

    from autolaunch.models.llama import Llama
    from autolaunch.models.llama_config import llama_config
    from autolaunch_strategies import MeshStrategy

    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cpu") if arguments.cpu else torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    if not arguments.cpu:
        torch.cuda.set_device(device)
    sizes = {"size": arguments.size, "max_seq_len": arguments.length}
    vocabulary = llama_config(sizes).vocab_size
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randint(0, vocabulary, (arguments.batch, arguments.length + 1), generator=generator)

    def loss_of(model: Any, batch: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Llama(llama_config(sizes))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return loss_of(self.model, batch)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-5)

    def by_hand() -> Callable[[], None]:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        torch.manual_seed(0)
        model: Any = Llama(llama_config(sizes)).to(device)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for layer in model.model.layers:
            if not arguments.no_compile:
                layer.compile()
            fully_shard(layer, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        optimizer, batch = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True), tokens.to(device)

        def step() -> None:
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

        return step

    class TakeTurns(pl.Callback):
        def __init__(self) -> None:
            self.seconds: dict[str, list[float]] = {"by hand": [], "autolaunch": []}
            self.step: Callable[[], None] | None = None
            self.began = 0.0

        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx % STEPS_PER_TURN == 0:
                self.step = self.step or by_hand()
                self.began = now()
                for _ in range(STEPS_PER_TURN):
                    self.step()
                self.end("by hand")

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if (batch_idx + 1) % STEPS_PER_TURN == 0:
                self.end("autolaunch")

        def end(self, who: str) -> None:
            self.seconds[who].append((now() - self.began) / STEPS_PER_TURN)
            self.began = now()

    def now() -> float:
        if not arguments.cpu:
            torch.cuda.synchronize()
        return time.perf_counter()

    turns, steps = TakeTurns(), arguments.rounds * STEPS_PER_TURN
    trainer = pl.Trainer(
        strategy=MeshStrategy(mesh=str(world_size), dp=3, compile=not arguments.no_compile),
        accelerator="cpu" if arguments.cpu else "cuda",
        precision="bf16-mixed",
        max_steps=steps,
        gradient_clip_val=1.0,
        callbacks=[turns],
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), torch.utils.data.DataLoader([tokens] * steps, batch_size=None))
    if rank == 0:
        medians = {who: statistics.median(values[TURNS_TO_WARM_UP:]) for who, values in turns.seconds.items()}
        for who, seconds in medians.items():
            rate = world_size * arguments.batch * arguments.length / seconds
            print(f"{who:>12}: {seconds:8.4f} s per step, {rate:12,.0f} tokens/s", flush=True)
        print(f"{'ratio':>12}: {medians['by hand'] / medians['autolaunch']:8.3f} of the tokens/s by hand (goal >= 1.0)")
        if not arguments.cpu:
            print(f"{'memory':>12}: {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB at the peak of both together")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
