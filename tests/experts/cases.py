"""Mixtures whose experts are shared out: three steps on a mesh beside the same steps of one process.

A case is `<model>:<mesh>:<settings>`. Run by `test_experts.py` through `tests.support.ranks.Group`.
"""

from __future__ import annotations

import functools
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from autolaunch_strategies import ExpertBias, MeshStrategy
from tests.support.cases import OUT, no_compiler, serve
from tests.support.zoo import VOCABULARY, WIDTH, gradients, whole

EXPERTS, STEPS, BATCH, LENGTH, CLIP, RATE = 8, 3, 8, 6, 0.5, 0.1
_SIZES: dict[str, Any] = {
    "hidden_size": WIDTH, "intermediate_size": 16, "moe_intermediate_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCABULARY, "max_position_embeddings": 32,
    "num_experts_per_tok": 2, "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False,
}  # fmt: skip
_DEEPSEEK: dict[str, Any] = {
    "num_key_value_heads": 4, "n_routed_experts": EXPERTS, "n_group": 2, "topk_group": 1, "q_lora_rank": 8,
    "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8, "first_k_dense_replace": 1,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": EXPERTS},
    "qwen3_moe": {"num_experts": EXPERTS, "head_dim": 8},
    "deepseek_v3": _DEEPSEEK,
    "olmoe": {"num_experts": EXPERTS},
    "gpt_oss": {"num_local_experts": EXPERTS, "head_dim": 8},
    "glm4_moe": {"n_routed_experts": EXPERTS, "head_dim": 8, "first_k_dense_replace": 1},
    "granitemoe": {"num_local_experts": EXPERTS},
    "jamba": {
        "num_experts": EXPERTS, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 1,
        "expert_layer_offset": 0, "mamba_d_state": 4, "mamba_d_conv": 2, "mamba_dt_rank": 4,
    },
    "nemotron_h": {
        "n_routed_experts": EXPERTS, "layers_block_type": ["mamba", "moe", "attention", "moe"], "num_hidden_layers": 4,
        "mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 1, "conv_kernel": 2,
        "chunk_size": 4, "head_dim": 8, "moe_shared_expert_intermediate_size": 16,
    },
}  # fmt: skip


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


class Mixture(nn.Module):
    """As people write one: a list of experts, and a loop that leaves out those without tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        nn.init.constant_(self.router.bias[-1:], -20)  # nobody's: it has no gradient, and no step
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.reshape(-1, WIDTH)
        weights, chosen = self.router(tokens).softmax(dim=-1).topk(2)
        mixed = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            rows, places = torch.where(chosen == number)
            if len(rows):
                mixed.index_add_(0, rows, expert(tokens[rows]) * weights[rows, places, None])
        return mixed.view_as(x)


class Block(nn.Module):
    def __init__(self, mixture: type[nn.Module]) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), mixture()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))


class StackedExperts(nn.Module):
    """All experts in one module, with the index behind the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 16) * 0.2)
        self.down = nn.Parameter(torch.randn(EXPERTS, 16, WIDTH) * 0.2)

    def forward(self, x: torch.Tensor, w: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        mixed = torch.zeros_like(x)
        for number in range(self.num_experts):
            rows, places = torch.where(i == number)
            made = torch.tanh(x[rows] @ self.up[number]) @ self.down[number]
            mixed = mixed.index_add(0, rows, made * w[rows, places, None])
        return mixed


class Stacked(nn.Module):
    """Calls them by keywords."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, EXPERTS), StackedExperts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.reshape(-1, WIDTH)
        weights, chosen = self.router(tokens).softmax(dim=-1).topk(2)
        return self.experts(tokens, i=chosen, w=weights).view_as(x)


class Own(nn.Module):
    def __init__(self, mixture: type[nn.Module] = Mixture) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(mixture) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def made(name: str, changes: dict[str, Any]) -> nn.Module:
    torch.manual_seed(3)
    if name == "own":
        return Own()
    if name == "stacked":
        return Own(Stacked)
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **{**_SIZES, **MODELS[name], **changes}))
    for key, value in model.named_parameters():  # biases and sinks begin with zeros, which hides mistakes
        if key.endswith(("bias", "sinks")):
            nn.init.normal_(value, std=0.1)
    return model


def loss_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    if isinstance(model, Own):
        return nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
    return model(input_ids=ids, labels=ids).loss


def data(tail: int = BATCH) -> torch.Tensor:
    """Tokens by row; the last batch has `tail` rows."""
    generator = torch.Generator().manual_seed(0)
    # The same few tokens in half of the rows: some experts get many, some ranks none.
    ids = torch.randint(3, VOCABULARY, (STEPS * BATCH, LENGTH), generator=generator)
    ids[::2] = ids[0, 0]
    return ids[: len(ids) - BATCH + tail]


def alone(name: str, changes: dict[str, Any], rate: float = 0, tail: int = BATCH) -> dict[str, Any]:
    model = made(name, changes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    losses, norms, first = [], [], {}
    load, before = counted(model), dict[str, Any]()
    for ids in data(tail).split(BATCH):
        loss = loss_of(model, ids)
        loss.backward()
        first = first or gradients(model)
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP))
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        for key, count in (since(load, before) if rate else {}).items():
            router = model.get_submodule(key.removeprefix("model.").removesuffix("experts") + "gate")
            router.e_score_correction_bias += rate * torch.sign(count.float().mean() - count)
    found = {"losses": losses, "norms": norms, "gradients": first, "weights": weights(model)}
    return found | ({"load": worst(load)} if load else {})


def counted(model: nn.Module) -> dict[str, torch.Tensor]:
    """How many tokens each expert of each layer gets from now on."""
    counts: dict[str, torch.Tensor] = {}

    def count(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        index = next(item for item in (*args, *kwargs.values()) if not item.is_floating_point())
        counts[name] = counts.get(name, 0) + torch.bincount(index.flatten(), minlength=EXPERTS)

    for name, module in model.named_modules():
        if name.endswith(".experts"):
            module.register_forward_pre_hook(functools.partial(count, f"model.{name}"), with_kwargs=True)
    return counts


def since(counts: dict[str, torch.Tensor], before: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    new = {name: count - before.get(name, 0) for name, count in counts.items()}
    before.update(counts)
    return new


def worst(counts: dict[str, torch.Tensor]) -> tuple[str, float]:
    ratios = {name: float(count.max() / count.float().mean()) for name, count in counts.items()}
    return max(ratios.items(), key=lambda item: item[1])


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    biases = {name: item.clone() for name, item in model.named_buffers() if name.endswith("correction_bias")}
    return {name: whole(item) for name, item in model.named_parameters()} | biases


class Module(pl.LightningModule):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.losses: list[torch.Tensor] = []
        self.norms: list[torch.Tensor] = []
        self.seen = 0
        self.first: dict[str, torch.Tensor] = {}

    def training_step(self, ids: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = loss_of(self.model, ids)
        self.log("loss", loss, sync_dist=True, on_step=True)
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.first = self.first or gradients(self.model)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-4)


class Watch(pl.Callback):
    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        if trainer.global_step > module.seen:
            module.seen = trainer.global_step
            module.losses.append(trainer.callback_metrics["loss"].clone())
            module.norms.append(trainer.strategy._grad_norm.clone())


def trained(module: Module, mesh: str, steps: int, ckpt_path: str | None = None, **settings: Any) -> pl.Trainer:
    accumulate, rate = settings.pop("accumulate", 1), settings.pop("rate", 0)
    rows = list(data(settings.pop("tail", BATCH)))
    callbacks: list[pl.Callback] = [Watch(), *([ExpertBias(rate)] if rate else [])]
    trainer = pl.Trainer(
        strategy=MeshStrategy(mesh=mesh, timeout=60, **settings), accelerator="cpu", max_steps=steps, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, callbacks=callbacks,
        gradient_clip_val=CLIP, accumulate_grad_batches=accumulate,
    )  # fmt: skip
    trainer.fit(module, DataLoader(rows, batch_size=BATCH // accumulate), ckpt_path=ckpt_path)
    return trainer


def on_mesh(name: str, changes: dict[str, Any], mesh: str, **settings: Any) -> dict[str, Any]:
    module = Module(made(name, changes))
    if replicas := settings.pop("replicate", 0):
        settings["dp"] = {"sharding_level": 3, "replicate": replicas}
    trainer = trained(module, mesh, STEPS, **settings)
    load = trainer.strategy.worst_expert_load()
    return found_in(module) | ({} if load is None else {"load": load})


def resumed(name: str, first: tuple[str, int], then: tuple[str, int]) -> dict[str, Any]:
    """A step on one mesh, the others on another: (mesh, ep)."""
    path = str(OUT / f"{name}{first}{then}.ckpt")
    trained(Module(made(name, {})), first[0], 1, ep=first[1]).save_checkpoint(path)
    module = Module(made(name, {}))
    trained(module, then[0], STEPS, path, ep=then[1])
    expected = alone(name, {})
    for key in ("losses", "norms"):
        expected[key] = expected[key][1:]
    return {"expected": expected | {"gradients": {}}, "found": found_in(module) | {"gradients": {}}}


def found_in(module: Module) -> dict[str, Any]:
    held = sum(
        (item.to_local() if isinstance(item, DTensor) else item).numel()
        for key, item in module.model.named_parameters()
        if ".experts." in key and not item.is_meta
    )
    mine = {name: tensor for name, tensor in weights(module.model).items() if not tensor.is_meta}
    return {
        "losses": module.losses, "norms": module.norms, "gradients": module.first, "weights": mine, "held": held,
    }  # fmt: skip


def case(name: str, mesh: str, changes: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    expected = alone(name, changes, settings.get("rate", 0), settings.get("tail", BATCH))
    with patch.object(dist, "all_to_all_single", wraps=dist.all_to_all_single) as exchange:
        found = on_mesh(name, changes, mesh, **settings)
    return {"expected": expected, "found": found | {"exchanges": exchange.call_count}}


def parsed(text: str) -> Any:
    """`name:mesh:setting=value,...`; with `aux=1` routers have a loss of their own."""
    name, mesh, *rest = text.split(":")
    if name.startswith("resume"):
        (one, first), (other, then) = (part.split("ep") for part in (mesh, rest[0]))
        return functools.partial(resumed, name.partition("-")[2] or "gpt_oss", (one, int(first)), (other, int(then)))
    pairs = dict(item.split("=") for item in rest[0].split(",")) if rest else {}
    settings: dict[str, Any] = {key: int(value) if value.isdigit() else value for key, value in pairs.items()}
    if settings.pop("bias", 0):
        settings["rate"] = RATE
    settings["compile"] = bool(settings.get("compile"))
    changes = {"output_router_logits": True, "router_aux_loss_coef": 0.5} if settings.pop("aux", 0) else {}
    return functools.partial(case, name, mesh, changes, settings)


GROUPS: dict[str, list[str]] = {
    "2": [
        "own:2:ep=2,dp=0,recompute=full", "own:2:ep=2,compile=1", "resume-own:2ep2:2ep1",
        "deepseek_v3:2:ep=2,dp=3,recompute=selective", "deepseek_v3:2:ep=2,dp=1,recompute=selective",
        "olmoe:dp1xcp2:ep=2,cp=ring", "jamba:2:ep=2,aux=1", "nemotron_h:2:ep=2,recompute=full",
        "gpt_oss:1x2:ep=1,mp=seq_parallel", "stacked:2:ep=2,dp=3", "stacked:1x2:ep=1,mp=auto",
    ],
    "4": [
        "own:2x2:ep=4,dp=3,mp=auto", "own:4:ep=2,dp=3,accumulate=2,recompute=selective", "own:2x1x2:ep=2,pp=1f1b",
        "qwen3_moe:4:ep=2,dp=3,accumulate=2,recompute=full", "deepseek_v3:4:ep=4,dp=2,bias=1", "olmoe:4:ep=2,dp=0",
        "deepseek_v3:4:ep=4,dp=2,bias=1,compile=1", "glm4_moe:4:ep=2,replicate=2,bias=1,recompute=full,accumulate=2",
        "gpt_oss:2x2:ep=4,mp=seq_parallel,aux=1,compile=1",
        "mixtral:1x4:ep=2,recompute=selective,accumulate=8",
        "gpt_oss:2x2:ep=1,dp=3,recompute=selective", "qwen3_moe:1x2x2:ep=1,pp=1f1b",
        "mixtral:1x2x1x2:ep=1,cp=ring,recompute=full,aux=1",
        "granitemoe:2x1x2:ep=2,pp=1f1b", "mixtral:2x1x2:ep=2,aux=1", "mixtral:2x1x1x2:ep=4,cp=ulysses,aux=1",
        "mixtral:4:ep=2,aux=1,tail=3", "deepseek_v3:4:ep=4,bias=1,tail=3",  # one rank only keeps step at the end
        "resume:4ep2:2x2ep4", "resume:2x2ep2:4ep1",
    ],
    "8": ["qwen3_moe:2x2x2:ep=4,aux=1"],
}  # fmt: skip
"""Ranks -> cases."""

_MESHES = [
    ("2", "2", 2), ("4", "4", 2), ("4", "4", 4), ("2", "1x2", 2), ("4", "2x2", 2), ("4", "2x2", 4), ("2", "1x1x2", 1),
    ("2", "dp1xcp2", 2), ("4", "2x1x2", 2), ("8", "2x2x2", 2), ("8", "2x2x2", 4),
]  # fmt: skip
"""(ranks, mesh, ep); with one rank of dp x cp x mp there is no other degree than 1."""


def _product() -> dict[tuple[int, int], tuple[str, str]]:
    """(model, mesh), by their places -> (ranks, case): every model on every mesh, what else there is in turns."""
    product = {}
    for row, name in enumerate(model for model in ("own", *MODELS) if model != "nemotron_h"):
        for column, (ranks, mesh, ep) in enumerate(_MESHES):
            turn, stages = row + column, mesh.endswith("x2") and mesh.count("x") == 2
            settings = [f"ep={ep}", f"dp={(turn + column) % 4}"]
            settings += [f"pp={('1f1b', 'exact', 'gpipe')[turn % 3]}"] if stages else []
            settings += [f"mp={('auto', 'seq_parallel')[row % 2]}"] if mesh.startswith(("1x2", "2x2")) else []
            settings += [f"cp={('gather', 'ring', 'ulysses')[turn % 3]}"] if "cp" in mesh else []
            product[row, column] = ranks, f"{name}:{mesh}:{','.join(settings)}"
    return product


PRODUCT = _product()
DAILY = [case for (row, column), (_, case) in PRODUCT.items() if row == column]
"""Each model once, each on another mesh."""
for number, case_of in PRODUCT.values():
    GROUPS[number].append(case_of)

if __name__ == "__main__":
    with no_compiler():
        serve({ranks: {case: parsed(case) for case in cases} for ranks, cases in GROUPS.items()}, tensors=True)
