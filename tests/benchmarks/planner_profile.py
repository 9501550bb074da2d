"""How long it takes to profile a model on meta, in a process of its own, without its weights or a device.

    python tests/benchmarks/planner_profile.py [--models llama-8b llama-70b llama-405b gpt2 mixtral] [--runs 3]

Printed are, per model, the least seconds of the runs, with the processor time of that one (all of it is one thread's),
the growth of the process's memory, and what the profile says: parameters, forward FLOPs, bytes kept per block.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

MODELS = ("llama-8b", "llama-70b", "llama-405b", "gpt2", "mixtral")
POSITIONS = {"gpt2": 1024}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--once", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.once:
        print(json.dumps(profiled(arguments.once)))
        return
    print(
        f"{'model':>10} {'seconds':>8} {'cpu s':>7} {'MiB':>6} {'parameters':>15} {'TFLOP':>9} {'kept MiB/block':>15}"
    )
    for model in arguments.models:
        command = [sys.executable, __file__, "--once", model]
        runs = [
            json.loads(subprocess.run(command, check=True, env=_environment(), capture_output=True, text=True).stdout)
            for _ in range(arguments.runs)
        ]
        best = min(runs, key=lambda run: run["seconds"])
        print(
            f"{model:>10} {best['seconds']:>8.2f} {best['cpu']:>7.2f} {best['memory'] / 2**20:>6.0f} "
            f"{best['parameters']:>15,} {best['flops'] / 1e12:>9.2f} {best['kept'] / 2**20:>15.1f}",
            flush=True,
        )


def _environment() -> dict[str, str]:
    root = Path(__file__).resolve().parents[2]
    paths = [str(root / "launcher"), str(root / "strategies"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}


def profiled(model: str) -> dict[str, Any]:
    sys.path[:0] = _environment()["PYTHONPATH"].split(os.pathsep)
    from autolaunch.config.schema import LLAMA_PLANS
    from autolaunch_strategies.planner.module_profile import profile_module

    module, plan = _module(model), None
    if model.startswith("llama"):
        plan = LLAMA_PLANS["tensor_parallel"]
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin, processor = time.perf_counter(), time.process_time()
    profile = profile_module(module, POSITIONS.get(model, 8192), own_plan=plan, precision="bf16-true")
    return {
        "seconds": time.perf_counter() - begin,
        "cpu": time.process_time() - processor,
        "memory": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory) * 1024,
        "parameters": profile.parameters,
        "flops": profile.flops,
        "kept": profile.kinds[0].saved_bytes,
    }


def _module(model: str) -> Any:
    import torch

    with torch.device("meta"):
        if model.startswith("llama"):
            from autolaunch.models.llama import Llama
            from autolaunch.models.llama_config import llama_config

            return Llama(llama_config({"size": model.removeprefix("llama-")}))
        from transformers import AutoConfig, AutoModelForCausalLM

        # The default configs are those of GPT-2 small and Mixtral 8x7B.
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(model))


if __name__ == "__main__":
    main()
