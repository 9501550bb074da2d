"""Cases for test_adapter_meshes.py: adapters in many families of models, trained on meshes; a case is `family@mesh`.

The whole product is here; the test runs a choice of it.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from torch.distributed.tensor import DTensor

from autolaunch.config.schema import Adapter, Job
from autolaunch.tasks.run_parts import construct_module
from autolaunch_strategies import MeshStrategy
from tests.lightning.cases import make_trainer, whole
from tests.models.label_cases import CONSTANT, LLAMA, schedule
from tests.support.cases import no_compiler, serve
from tests.support.zoo import CAUSAL, MORE

LENGTH, STEPS, SAMPLES = 12, 3, 8
ADAM = {"name": "adamw", "_target_": None, "lr": 0.02, "weight_decay": 0.1, "betas": [0.9, 0.95], "eps": 1e-4,
        "momentum": 0.0}  # fmt: skip
EXPERTS = {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"], "target_modules": "all-linear"}

ADAPTED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-dora": ("llama", {"name": "dora", "modules_to_save": ["lm_head", "model.norm"]}),
    "qwen3": ("qwen3", {"modules_to_save": ["embed_tokens"], "exclude": ["k_proj"]}),
    "mistral": ("mistral", {"rslora": True}),
    "gemma3": ("gemma3_text", {}),
    "gpt2": ("gpt2", {}),
    "gpt2-dora": ("gpt2", {"name": "dora"}),
    "phi3": ("phi3", {"modules_to_save": ["embed_tokens", "lm_head"]}),
    "qwen3_moe": ("qwen3_moe", EXPERTS),
    "mixtral": ("mixtral", {**EXPERTS, "target_modules": ["q_proj", "v_proj"]}),
    "deepseek_v3": ("deepseek_v3", EXPERTS),
    "bert": ("bert", {}),
    "llama-qlora": ("llama", {"name": "qlora"}),
    "qwen3_moe-qlora": ("qwen3_moe", {"name": "qlora", **EXPERTS, "modules_to_save": ["o_proj"]}),
    "llama-dropout": ("llama", {"dropout": 0.3}),
}
"""Name -> (family of the zoo, what is said about the adapter)."""


def family_model(family: str) -> Any:
    from tests.support.zoo import made

    return made(family)


def job(name: str) -> dict[str, Any]:
    family, keys = ADAPTED[name]
    if family in CAUSAL or family == "deepseek_v3":
        sizes = CAUSAL[family] if family in CAUSAL else MORE[family][1]
        model: dict[str, Any] = {"name": "hf", "config": {**sizes, "model_type": family}}
    else:
        model = {"_target_": "tests.models.adapter_cases.family_model", "family": family, "loss": "output"}
    adapter = {**dataclasses.asdict(Adapter()), "r": 4, **keys}
    config = {**dataclasses.asdict(Job()), "model": model, "adapter": adapter, "optimizer": ADAM, "scheduler": CONSTANT}
    config["data"] = {"name": "documents", "labels": "same"}
    config["trainer"] = {**config["trainer"], "max_steps": -1}
    return config


def samples(count: int = STEPS * SAMPLES) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(3, 32, (count, LENGTH), generator=generator)
    return [{"input_ids": row, "labels": row} for row in ids]


def adapted(name: str, strategy: dict[str, Any]) -> dict[str, Any]:
    if job(name)["adapter"]["dropout"]:
        strategy = {**strategy, "random_numbers": "by_position"}
    with no_compiler() if strategy.get("compile") else contextlib.nullcontext():
        return train(job(name), strategy, samples())


class Thaws(pl.callbacks.BaseFinetuning):
    """Lightning's own: everything but the last block and what follows it is frozen in the first epoch."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze([pl_module.model.model.embed_tokens, pl_module.model.model.layers[0]])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.model.model.layers[0], optimizer)


class Switches(pl.Callback):
    """A user's: the first block, which the optimizer has from the start, is trained in the second epoch only."""

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.model.model.layers[0].requires_grad_(trainer.current_epoch == 1)


UNFROZEN: dict[str, Callable[[], pl.Callback]] = {"thaws": Thaws, "switches": Switches}


def unfrozen(name: str, strategy: dict[str, Any]) -> dict[str, Any]:
    config = {**job("llama"), "adapter": None, "model": LLAMA}
    return train(config, strategy, samples(), UNFROZEN[name](), max_epochs=2)


def train(
    config: dict[str, Any], strategy: dict[str, Any], data: list[Any], *callbacks: pl.Callback, **options: Any
) -> dict[str, Any]:
    """Train as the command does: loss and norm of every step, and what was trained at the end."""
    from torch.utils.data import DataLoader

    from autolaunch.report.metrics import StepMetrics

    pl.seed_everything(1, verbose=False)
    steps, norms = StepMetrics(), []

    class Norms(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if steps.latest is not None and len(steps.steps) > len(norms):
                norms.append(steps.latest.grad_norm)

    trainer = make_trainer(
        MeshStrategy(timeout=60, **strategy), steps, Norms(), *callbacks, use_distributed_sampler=True, **options
    )
    module = construct_module(config, trainer.strategy, trainer.precision_plugin, torch.device("cpu"))
    trainer.fit(module, DataLoader(data, batch_size=SAMPLES))
    trained = {name: item for name, item in module.named_parameters() if item.requires_grad and item.numel()}
    frozen = [item for item in module.parameters() if not item.requires_grad]
    states = [state for optimizer in trainer.optimizers for state in optimizer.state.values()]
    return {
        "losses": list(steps.losses), "norms": norms,
        "weights": {name: whole(value).flatten().tolist() for name, value in trained.items()},
        "numbers": {
            "trained": held(trained.values()), "frozen": held(frozen),
            "gradients_of_frozen": held(item.grad for item in frozen if item.grad is not None),
            "state": held(value for state in states for value in state.values() if value.dim()),
        },
    }  # fmt: skip


def held(tensors: Iterable[torch.Tensor]) -> int:
    """How many numbers of them this rank has."""
    return sum((item.to_local() if isinstance(item, DTensor) else item).numel() for item in tensors)


MESHES: dict[str, dict[str, dict[str, Any]]] = {
    "one": {"1": {"mesh": "1"}},
    "two": {
        **{f"dp2-level{level}": {"mesh": "2", "dp": level} for level in (0, 1, 2, 3)},
        "dp2-recompute": {"mesh": "2", "dp": 3, "recompute": "full"},
        "dp2-compile": {"mesh": "2", "dp": 3, "compile": True, "recompute": "full"},
        "dp2-ep2": {"mesh": "2", "dp": 3, "ep": 2, "recompute": "full"},
        "mp2": {"mesh": "1x2", "mp": "tensor_parallel"},
        "mp2-ep2": {"mesh": "1x2", "mp": "tensor_parallel", "ep": 2},
        "sp2": {"mesh": "1x2", "mp": "seq_parallel"},
        "pp2-exact": {"mesh": "1x1x2", "pp": {"loss": "exact", "microbatches": 2}},
        "pp2-1f1b": {"mesh": "1x1x2", "pp": schedule("1f1b", 4)},
        "cp2-gather": {"mesh": "cp2", "cp": "gather"},
        "cp2-ring": {"mesh": "cp2", "cp": "ring"},
        "cp2-ulysses": {"mesh": "cp2", "cp": "ulysses"},
    },
    "four": {
        "dp2xmp2": {"mesh": "2x2", "mp": "seq_parallel", "dp": 3},
        "dp2xmp2-ep4": {"mesh": "2x2", "mp": "seq_parallel", "dp": 3, "ep": 4},
        "dp4-ep2": {"mesh": "4", "dp": 1, "ep": 2},
        "dp2xpp2-ep2": {"mesh": "2x1x2", "dp": 2, "pp": schedule("1f1b", 2), "ep": 2},
        "dp2xpp2": {"mesh": "2x1x2", "dp": 2, "pp": schedule("1f1b", 2), "recompute": "selective"},
        "mp2xpp2": {"mesh": "1x2x2", "mp": "tensor_parallel", "pp": "exact", "recompute": "full"},
        "dp2xcp2": {"mesh": "dp2xcp2", "dp": 3, "cp": "gather"},
        "mp2xcp2": {"mesh": "mp2xcp2", "mp": "tensor_parallel", "cp": "ring"},
    },
}
GROUPS: dict[str, dict[str, Callable[[], Any]]] = {
    group: {f"{name}@{mesh}": partial(adapted, name, strategy) for mesh, strategy in meshes.items() for name in ADAPTED}
    for group, meshes in MESHES.items()
}
for group, meshes in MESHES.items():
    for mesh, strategy in meshes.items():
        GROUPS[group] |= {f"{name}@{mesh}": partial(unfrozen, name, strategy) for name in UNFROZEN}

if __name__ == "__main__":
    serve(GROUPS)
