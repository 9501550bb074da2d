"""Cases for the tests of random numbers by position: models that draw, on meshes; `one` is a mesh of one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from tests.pipeline import modules
from tests.pipeline.cases import HF_KEYS, Items, Setting, fit, only, texts, vectors
from tests.support.cases import serve


class DrawingBlock(nn.Module):
    """Dropout by a module, twice by a function, and of whole samples in two usual ways."""

    def __init__(self, width: int = modules.WIDTH) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(width, 24), nn.Linear(24, width), nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.dropout(F.gelu(self.up(x)), 0.3, self.training)
        hidden = F.dropout(self.drop(self.down(hidden)), 0.1, self.training, inplace=True)
        if self.training:
            hidden = hidden * x.new_empty(len(x), 1).bernoulli_(0.7) / 0.7
            hidden = hidden * (torch.rand((len(x), 1), device=x.device) < 0.8)
        return x + hidden


class Drawing(modules.Classifier):
    """Numbers are drawn in blocks, in the model between them, and in the step."""

    def __init__(self) -> None:
        model = modules.Mlp()
        model.blocks = nn.ModuleList(DrawingBlock() for _ in range(modules.BLOCKS))
        super().__init__(model)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        level = torch.randint(4, (len(x), 1)) + 0.1 * torch.rand_like(x)
        x = F.dropout(x, 0.1) + 0.1 * level * torch.randn_like(x)
        loss = F.cross_entropy(F.dropout(self(x), 0.05), y)
        self.log("train_loss", loss, sync_dist=True)
        return {"loss": loss}


def gpt2(attention: str = "sdpa") -> pl.LightningModule:
    drops = {"attn_pdrop": 0.2, "resid_pdrop": 0.2, "embd_pdrop": 0.2}
    return modules.Transformers(modules.hf_causal("gpt2", attn_implementation=attention, **drops))


def llama() -> pl.LightningModule:
    return modules.Transformers(modules.hf_causal("llama", attention_dropout=0.3))


def layerdrop() -> pl.LightningModule:
    """Half of the layers are skipped in a step, as the host decides; nothing else draws."""
    return modules.Transformers(modules.hf_causal("opt", layerdrop=0.5))


def checkpointed() -> pl.LightningModule:
    """The model's own checkpointing, of which the engine knows nothing."""
    module = gpt2()
    module.model.gradient_checkpointing_enable()
    return module


def bart() -> pl.LightningModule:
    """Decoders see sequences of another length than their own."""
    from transformers import BartConfig, BartForConditionalGeneration

    config = BartConfig(
        vocab_size=modules.VOCABULARY, d_model=modules.WIDTH, encoder_ffn_dim=24, decoder_ffn_dim=24, encoder_layers=1,
        decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4, max_position_embeddings=32,
        dropout=0.1, attention_dropout=0.2, activation_dropout=0.1, init_std=0.2, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, decoder_start_token_id=2,
    )  # fmt: skip
    return modules.Transformers(BartForConditionalGeneration(config))


class Dropping(modules.Block):
    """Numbers for each sample, and for positions with the samples flattened into them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.dropout((super().forward(x) - x).flatten(0, 1), 0.2, self.training).view_as(x)
        return x + hidden * x.new_empty(len(x), 1, 1).bernoulli_(0.7) if self.training else x + hidden


class Asking(nn.Module):
    """Attention outside of blocks: to keys that are no sequence, by torch's function and by its layer."""

    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.embedding = nn.Embedding(modules.VOCABULARY, modules.WIDTH)
        self.blocks = nn.ModuleList(Dropping() for _ in range(2))
        self.known = nn.Parameter(torch.randn(5, modules.WIDTH))
        self.ask, self.head = nn.Linear(modules.WIDTH, modules.WIDTH), nn.Linear(modules.WIDTH, modules.VOCABULARY)
        self.attention = nn.MultiheadAttention(modules.WIDTH, heads, 0.3, batch_first=True)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x)
        known = self.known.expand(len(x), -1, -1)
        q, k = (item.unflatten(-1, (self.heads, -1)).transpose(1, 2) for item in (self.ask(x), known))
        drops = 0.3 if self.training else 0.0
        x = x + F.scaled_dot_product_attention(q, k, k, dropout_p=drops).transpose(1, 2).flatten(2)
        return self.head(x + self.attention(x, known, known, need_weights=False)[0])


class AskingModule(pl.LightningModule):
    """`Asking` as a language model."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Asking()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.cross_entropy(self.model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def sequences() -> Items:
    return only(texts(24, even=True), *HF_KEYS)


def pairs() -> Items:
    """Sequences, and shorter ones to be made of them."""
    return Items([{**item, "labels": item["labels"][:6]} for item in sequences().items])


MODELS: dict[str, tuple[Callable[[], pl.LightningModule], Callable[[], Items]]] = {
    "drawing": (Drawing, lambda: vectors(24)),
    "gpt2": (gpt2, sequences),
    "llama": (llama, sequences),
    "layerdrop": (layerdrop, sequences),
    "gpt2-eager": (lambda: gpt2("eager"), sequences),
    "bart": (bart, pairs),
    "asking": (AskingModule, sequences),
}


def train(
    model: str, mesh: str, make: Any = None, size: int = 8, random_numbers: str = "by_position", **changes: Any
) -> Any:
    """Train a model on the batches of one process, with other `changes` as arguments of the Trainer or the strategy."""
    usual, items = MODELS[model]
    data = items()
    options = {name: changes.pop(name) for name in ("dp", "mp", "pp", "cp", "recompute") if name in changes}
    return fit(
        Setting(mesh, {**options, "random_numbers": random_numbers}), make or usual,
        lambda _: DataLoader(data, batch_size=size), use_distributed_sampler=True, **changes,
    )  # fmt: skip


BY_SCHEDULE = {"schedule": "1f1b", "loss": "microbatch"}
GATHER, ULYSSES = ({"backend": backend, "pad": True} for backend in ("gather", "ulysses"))
OWN_PLAN = {"base": "none", "plan": {"model.blocks.*.up": "ColWiseParallel", "model.blocks.*.down": "RowWiseParallel"}}
MESHES: dict[str, tuple[str, dict[str, Any]]] = {
    "dp2": ("two", {"mesh": "2"}),
    "dp2-level3-recompute": ("two", {"mesh": "2", "dp": 3, "recompute": "full"}),
    "mp2": ("two", {"mesh": "1x2", "mp": "tensor_parallel"}),
    "mp2-seq": ("two", {"mesh": "1x2", "mp": "seq_parallel"}),
    "pp2": ("two", {"mesh": "1x1x2"}),
    "pp2-recompute": ("two", {"mesh": "1x1x2", "recompute": "full"}),
    "pp2-1f1b": ("two", {"mesh": "1x1x2", "pp": {**BY_SCHEDULE, "microbatches": 4}}),
    "cp2": ("two", {"mesh": "1x1x1x2", "cp": GATHER}),
    "cp2-ulysses": ("two", {"mesh": "1x1x1x2", "cp": ULYSSES}),
    "dp2pp2-1f1b": ("four", {"mesh": "2x1x2", "dp": 3, "recompute": "full", "pp": BY_SCHEDULE}),
    "dp2mp2": ("four", {"mesh": "2x2", "dp": 3, "mp": "seq_parallel"}),
    "mp2cp2": ("four", {"mesh": "1x2x1x2", "mp": "tensor_parallel", "cp": GATHER}),
    "mp2cp2-ulysses": ("four", {"mesh": "1x2x1x2", "mp": "tensor_parallel", "cp": ULYSSES}),
}
LESS = {"llama": {"dp2mp2", "mp2cp2"}, "gpt2-eager": {"dp2pp2-1f1b", "mp2cp2-ulysses"}}
"""Meshes of four ranks that a model leaves to the others, which differ from it in their attention only."""
ONLY = {
    "drawing": ("dp2", "pp2-recompute", "pp2-1f1b", "dp2pp2-1f1b"),
    "bart": ("cp2", "cp2-ulysses", "mp2cp2"),
    "asking": ("cp2", "mp2cp2"),
    "layerdrop": ("dp2",),
}
"""The meshes on which a model runs that is not like the others; of those with other attention, the ones with cp."""

GROUPS: dict[str, dict[str, Any]] = {"one": {}, "two": {}, "four": {}}


def add(group: str, name: str, model: str, **changes: Any) -> None:
    GROUPS[group][name] = lambda: train(model, **changes)


for _model in MODELS:
    add("one", _model, _model, mesh="1")
    for _mesh, (_group, _changes) in MESHES.items():
        if _mesh in ONLY.get(_model, MESHES) and _mesh not in LESS.get(_model, ()):
            add(_group, f"{_model}@{_mesh}", _model, **_changes)
add("two", "drawing@mp2", "drawing", mesh="1x2", mp=OWN_PLAN)
add("two", "gpt2@dp2-own-checkpoints", "gpt2", mesh="2", make=checkpointed)
add("two", "gpt2@pp2-1f1b-own-checkpoints", "gpt2", mesh="1x1x2", make=checkpointed, pp=BY_SCHEDULE)
add("one", "square", "gpt2", mesh="1", size=6)  # as many samples as each of two ranks holds positions
add("two", "square@cp2", "gpt2", mesh="1x1x1x2", size=6, cp=GATHER)
add("two", "square@cp2-ulysses", "gpt2", mesh="1x1x1x2", size=6, cp=ULYSSES)
add("one", "asking-square", "asking", mesh="1", size=6)
add("two", "asking-square@cp2", "asking", mesh="1x1x1x2", size=6, cp=GATHER)
add("two", "gpt2@cp2-own-checkpoints", "gpt2", mesh="1x1x1x2", make=checkpointed, cp=GATHER)
add("one", "uneven", "drawing", mesh="1", size=7)
add("two", "uneven@dp2", "drawing", mesh="2", size=7)
add("one", "accumulated", "drawing", mesh="1", size=4, accumulate_grad_batches=2)
add("two", "accumulated@dp2", "drawing", mesh="2", size=4, accumulate_grad_batches=2)
for _level in (0, 1, 3):
    add("two", f"layerdrop@dp2-level{_level}-by-rank", "layerdrop", mesh="2", dp=_level, random_numbers="by_rank")
add(
    "two", "layerdrop@dp2-level3-recompute-by-rank", "layerdrop", mesh="2", dp=3, recompute="full",
    random_numbers="by_rank",
)  # fmt: skip
add("one", "drawing-by-rank", "drawing", mesh="1", random_numbers="by_rank")


if __name__ == "__main__":
    serve(GROUPS)
