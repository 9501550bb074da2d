"""Models and LightningModules as people write them, for the tests of cp: nothing in them knows of divided sequences."""

from __future__ import annotations

import math
from collections import UserDict
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchmetrics
from torch import nn

from tests.pipeline.modules import VOCABULARY, WIDTH, hf_causal

LENGTH = 16
HEADS = 4
_ENCODER: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": HEADS,
    "intermediate_size": 24, "max_position_embeddings": 32, "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0, "initializer_range": 0.2,
}  # fmt: skip
_DECODER: dict[str, Any] = {
    "hidden_size": WIDTH, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": HEADS,
    "num_key_value_heads": 2, "vocab_size": VOCABULARY, "max_position_embeddings": 64, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.2,
}  # fmt: skip
_HF: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("MistralForCausalLM", {**_DECODER, "sliding_window": 5}),
    "gemma3": (
        "Gemma3ForCausalLM",
        {
            **_DECODER, "head_dim": 4, "query_pre_attn_scalar": 4, "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "bert": ("BertForMaskedLM", _ENCODER),
    "t5": (
        "T5ForConditionalGeneration",
        {
            "vocab_size": VOCABULARY, "d_model": WIDTH, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": HEADS,
            "num_decoder_layers": 2, "dropout_rate": 0.0, "decoder_start_token_id": 0,
        },
    ),
    "gptj": (
        "GPTJForCausalLM",
        {
            "vocab_size": VOCABULARY, "n_positions": 32, "n_embd": WIDTH, "n_layer": 2, "n_head": HEADS,
            "rotary_dim": 2, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "vit": (
        "ViTForImageClassification",
        {
            "hidden_size": WIDTH, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": HEADS,
            "image_size": 8, "patch_size": 2, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
            "num_labels": 4, "initializer_range": 0.2,
        },
    ),
    "bart": (
        "BartForConditionalGeneration",
        {
            "vocab_size": VOCABULARY, "d_model": WIDTH, "encoder_layers": 2, "decoder_layers": 2,
            "encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS, "encoder_ffn_dim": 24,
            "decoder_ffn_dim": 24, "dropout": 0.0, "max_position_embeddings": 32, "pad_token_id": 0,
            "decoder_start_token_id": 2, "init_std": 0.2,
        },
    ),
}  # fmt: skip


def hf(family: str, attention: str = "sdpa", **changes: Any) -> nn.Module:
    """A tiny model of `transformers`; causal ones of pipeline_modules have four blocks, the others two."""
    if family not in _HF:
        return hf_causal(family, attn_implementation=attention, **changes)
    import transformers

    name, sizes = _HF[family]
    kind = getattr(transformers, name)
    return kind._from_config(kind.config_class(**{**sizes, **changes}), attn_implementation=attention)


def adamw(module: nn.Module, lr: float = 1e-2) -> torch.optim.Optimizer:
    """Its eps lies above rounding errors: Adam divides gradients by their own size, also those of such a size."""
    return torch.optim.AdamW(module.parameters(), lr=lr, weight_decay=0.01, eps=1e-4)


class Trained(pl.LightningModule):
    """What all of them share."""

    def __init__(self, model: nn.Module | None = None) -> None:
        super().__init__()
        if model is not None:
            self.model = model

    def configure_optimizers(self) -> Any:
        return adamw(self)


# --- language models ------------------------------------------------------------------------------------------------


def built_in(**changes: Any) -> pl.LightningModule:
    """The language-model module of this project around its Llama, with its optimizer."""
    from autolaunch.models.language_model import LanguageModel

    optimizer = {"name": "adamw", "lr": 1e-2, "weight_decay": 0.1, "betas": [0.9, 0.95], "eps": 1e-4}
    scheduler = {"name": "cosine", "warmup_steps": 1, "min_lr_ratio": 0.1, "total_steps": 8}

    class Synchronised(LanguageModel):
        """What is logged is the mean over ranks along dp."""

        def log(self, *args: Any, **kwargs: Any) -> None:
            super().log(*args, **{**kwargs, "sync_dist": True})

    return Synchronised(llama(**changes), optimizer, scheduler, 8, labels="next")


def llama(**changes: Any) -> nn.Module:
    """This project's Llama, with fewer key/value heads than query heads."""
    from autolaunch.models.llama import Llama
    from autolaunch.models.llama_config import llama_config

    sizes: dict[str, Any] = {
        "size": "debug", "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 24, "num_layers": 2,
        "num_heads": HEADS, "num_kv_heads": 2, "head_dim": 4, "init_std": 0.2,
    }  # fmt: skip
    return Llama(llama_config({**sizes, **changes}))


class Transformers(Trained):
    """`loss = self.model(**batch).loss`: the loss, and the shift of the labels, are the model's own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.top = torchmetrics.classification.MulticlassAccuracy(VOCABULARY, average="micro", ignore_index=-100)
        self.scores = torchmetrics.SumMetric()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        outputs = self.model(**batch)
        self.log("train_loss", outputs.loss, prog_bar=True, sync_dist=True)
        return outputs.loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        outputs = self.model(**batch)
        self.log("val_loss", outputs.loss, sync_dist=True)
        seen = batch["labels"] != -100
        right = (outputs.logits.argmax(-1) == batch["labels"]) & seen
        self.log("val_accuracy", right.sum() / seen.sum(), sync_dist=True)
        self.log("val_seen", float(len(seen)), reduce_fx="sum", sync_dist=True)
        self.top(outputs.logits.flatten(0, 1), batch["labels"].flatten())
        self.scores.update(outputs.logits.softmax(-1).amax(-1)[seen])
        self.log_dict({"val_top": self.top, "val_scores": self.scores}, on_step=False, on_epoch=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        outputs = self.model(**batch)
        return {"ids": outputs.logits.argmax(-1), "scores": outputs.logits.softmax(-1).amax(-1)}


class Generates(Transformers):
    """Samples while it is validated: a prefix at once, then one token after the other, with a cache of keys."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        said = self.model.generate(batch["input_ids"], max_new_tokens=5, do_sample=False)
        assert said.shape[1] > LENGTH
        self.log("val_said", said[:, LENGTH:].float().mean(), sync_dist=True)


class GivesPositions(Transformers):
    """Positions and a mask are arguments of the model: packed documents, whose positions begin at 0 again."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        ids = batch["input_ids"]
        length = ids.shape[1]
        document = (torch.arange(length, device=ids.device) >= 7).long()
        positions = torch.arange(length, device=ids.device) - 7 * document
        same = document[:, None] == document[None, :]
        mask = (same & torch.ones_like(same).tril())[None, None].expand(len(ids), 1, -1, -1)
        loss = self.model(ids, attention_mask=mask, position_ids=positions[None], labels=ids).loss
        self.log("train_loss", loss, sync_dist=True)
        return loss


class GPT(nn.Module):
    """After nanoGPT: fused projection, learned positions, tied head, the loss computed by the model."""

    class Block(nn.Module):
        def __init__(self, dropout: float, attention_dropout: float) -> None:
            super().__init__()
            self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
            self.attn = GPT.Attention(dropout, attention_dropout)
            self.mlp = nn.Sequential(
                nn.Linear(WIDTH, 24), nn.GELU(), nn.Linear(24, WIDTH), nn.Dropout(dropout)
            )  # fmt: skip

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x + self.attn(self.ln_1(x))
            return x + self.mlp(self.ln_2(x))

    class Attention(nn.Module):
        def __init__(self, dropout: float, attention_dropout: float) -> None:
            super().__init__()
            self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
            self.resid_dropout, self.dropout = nn.Dropout(dropout), attention_dropout

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            B, T, C = x.size()
            q, k, v = self.c_attn(x).split(WIDTH, dim=2)
            q, k, v = (item.view(B, T, HEADS, C // HEADS).transpose(1, 2) for item in (q, k, v))
            y = F.scaled_dot_product_attention(
                q, k, v, attn_mask=None, dropout_p=self.dropout if self.training else 0, is_causal=True
            )
            return self.resid_dropout(self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C)))

    def __init__(self, dropout: float = 0.0, attention_dropout: float = 0.0, layers: int = 2) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(VOCABULARY, WIDTH), "wpe": nn.Embedding(32, WIDTH), "drop": nn.Dropout(dropout),
                "h": nn.ModuleList(GPT.Block(dropout, attention_dropout) for _ in range(layers)),
                "ln_f": nn.LayerNorm(WIDTH),
            }
        )  # fmt: skip
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        nn.init.normal_(self.lm_head.weight, std=0.2)
        self.transformer.wte.weight = self.lm_head.weight

    def forward(
        self, idx: torch.Tensor, targets: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        _, t = idx.size()
        pos = torch.arange(0, t, dtype=torch.long, device=idx.device)
        x = self.transformer.drop(self.transformer.wte(idx) + self.transformer.wpe(pos))
        for block in self.transformer.h:
            x = block(x)
        x = self.transformer.ln_f(x)
        if targets is None:  # only what follows the last position is asked for
            return self.lm_head(x[:, [-1], :]), None
        logits = self.lm_head(x)
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


class NanoGPT(Trained):
    """The loss comes out of the model; a prediction is one token."""

    def __init__(self, **options: Any) -> None:
        super().__init__(GPT(**options))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        ids = batch["input_ids"]
        targets = ids.roll(-1, 1).index_fill(1, torch.tensor([LENGTH - 1], device=ids.device), -1)
        logits, loss = self.model(ids, targets)
        assert logits.shape == (*ids.shape, VOCABULARY)
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        ids = batch["input_ids"]
        self.log("val_loss", self.model(ids, ids)[1], sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        logits, _ = self.model(batch["input_ids"])
        assert logits.shape[1] == 1
        return logits.softmax(-1)


class TellsLengths(Trained):
    """Its blocks are called with the length of the sequence as a number: every length is a call of another kind."""

    class Block(GPT.Block):
        def forward(self, x: torch.Tensor, length: int = 0) -> torch.Tensor:
            return super().forward(x) * (1 + length / 100)

    def __init__(self) -> None:
        super().__init__(GPT())
        self.model.transformer["h"] = nn.ModuleList(self.Block(0.0, 0.0) for _ in range(2))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        ids = batch["input_ids"]
        parts = self.model.transformer
        x = parts.wte(ids) + parts.wpe(torch.arange(ids.shape[1], device=ids.device))
        for block in parts.h:
            x = block(x, ids.shape[1])
        logits = self.model.lm_head(parts.ln_f(x))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class OwnStep(Trained):
    """The step shifts, masks and weighs logits itself, logs what it made of them and returns more than a loss.

    Args:
        linear: log only what the mean over ranks along dp is right for.
    """

    def __init__(self, linear: bool = False) -> None:
        super().__init__(llama())
        self.linear = linear
        self.seen: list[torch.Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, torch.Tensor]:
        ids, mask = batch["input_ids"], batch["attention_mask"]
        logits = self.model(ids)
        shifted, targets, weights = logits[:, :-1], ids[:, 1:], mask[:, 1:].float()
        losses = F.cross_entropy(shifted.reshape(-1, VOCABULARY), targets.reshape(-1), reduction="none")
        loss = (losses.view_as(weights) * weights).sum() / weights.sum()
        penalty = 1e-3 * torch.logsumexp(logits, -1).square().mean()
        right = (shifted.argmax(dim=-1) == targets).float()
        accuracy = (right * weights).sum() / weights.sum()
        self.log_dict({"train_loss": loss, "accuracy": accuracy, "penalty": penalty}, sync_dist=True)
        if not self.linear:
            self.log("perplexity", torch.exp(loss))
        return {"loss": loss + penalty, "logits": logits.detach()}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert outputs["logits"].shape == (*batch["input_ids"].shape, VOCABULARY)
        if not self.linear:
            self.log("largest", outputs["logits"].amax())

    def validation_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        logits = self.model(batch["input_ids"])
        first = logits[:, 0]
        probabilities = logits.float().log_softmax(-1)
        at_targets = probabilities[:, :-1].gather(-1, batch["input_ids"][:, 1:, None]).squeeze(-1)
        self.log("val_loss", -at_targets.mean(), sync_dist=True)
        self.log("val_first", first.square().mean(), sync_dist=True)
        self.log("val_per_position", at_targets.mean(0)[LENGTH // 2], sync_dist=True)
        self.seen.append(logits)
        return logits

    def on_validation_epoch_end(self) -> None:
        self.log("val_all", torch.cat(self.seen).square().mean(), sync_dist=True)
        self.seen.clear()

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.model(batch["input_ids"])
        return logits, {"last": logits[:, -1], "top": logits.topk(2, -1).indices}


class Chosen(Trained):
    """Logits are picked by a mask; the model is called twice in a step, the second time for a target."""

    def __init__(self) -> None:
        super().__init__(GPT())

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        ids, wanted = batch["input_ids"], batch["attention_mask"].bool()
        logits = self.model(ids, ids)[0]
        with torch.no_grad():
            other = self.model(ids.flip(1), ids)[0].softmax(-1)
        loss = F.cross_entropy(logits[wanted], ids[wanted]) + F.kl_div(
            logits.log_softmax(-1), other, reduction="batchmean"
        )
        self.log_dict({"train_loss": loss, "confidence": logits.softmax(-1).max(-1).values[wanted].mean()})
        return loss


class ByHand(Trained):
    """Manual optimization, and calls of the model in hooks: what it says in the middle of training."""

    def __init__(self) -> None:
        super().__init__(llama())
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        ids = batch["input_ids"]
        loss = F.cross_entropy(self.model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        optimizer.step()
        self.log("train_loss", loss, sync_dist=True)
        return loss


class CallsInHooks(Trained):
    """Looks at what the model says outside of steps."""

    def __init__(self) -> None:
        super().__init__(llama())

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        ids = batch["input_ids"]
        loss = F.cross_entropy(self.model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        self.log("train_loss", loss, sync_dist=True)
        return loss

    @torch.no_grad()
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        logits = self.model(batch["input_ids"])
        self.log("afterwards", F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten()))


class Frozen(Trained):
    """Only the second block and the head are trained."""

    def __init__(self) -> None:
        super().__init__(llama())
        self.model.model.embed_tokens.requires_grad_(False)
        self.model.model.layers[0].requires_grad_(False)

    training_step = CallsInHooks.training_step

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([item for item in self.parameters() if item.requires_grad], lr=1e-2, eps=1e-4)


# --- bidirectional ones ---------------------------------------------------------------------------------------------


class Encoder(nn.Module):
    """torch's own encoder with a table of positions of the model's and a padding mask."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        nn.init.normal_(self.embed.weight, std=0.3)
        self.positions = nn.Parameter(torch.randn(32, WIDTH) * 0.1)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 24, dropout, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, nn.LayerNorm(WIDTH), enable_nested_tensor=False)

    def forward(self, ids: torch.Tensor, padding: torch.Tensor | None = None) -> torch.Tensor:
        hidden = self.embed(ids) + self.positions[: ids.shape[1]]
        return F.linear(self.encoder(hidden, src_key_padding_mask=padding), self.embed.weight)


class SequenceFirst(nn.Module):
    """The language model of torch's tutorial in the layout that torch's layers have by default: [s, b, h]."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.decoder = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, HEADS, 24, 0.0), 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids.T) * math.sqrt(WIDTH) + _sines(32)[: ids.shape[1], None]
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        return self.decoder(self.encoder(hidden, mask, is_causal=True)).transpose(0, 1)


class MultiHead(nn.Module):
    """Blocks of one's own around nn.MultiheadAttention, with a causal mask as torch's documentation writes it."""

    class Block(nn.Module):
        def __init__(self, need_weights: bool) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
            self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
            self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)
            self.need_weights = need_weights

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            y = self.norm1(x)
            x = x + self.attention(y, y, y, attn_mask=mask, need_weights=self.need_weights)[0]
            return x + self.down(F.relu(self.up(self.norm2(x))))

    def __init__(self, need_weights: bool = False) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.blocks = nn.ModuleList(MultiHead.Block(need_weights) for _ in range(2))
        self.register_buffer("table", _sines(32))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        length = ids.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=ids.device)
        x = self.embed(ids) * math.sqrt(WIDTH) + self.table[:length]
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x)


def _sines(length: int) -> torch.Tensor:
    angles = torch.arange(length)[:, None] / 10000 ** (torch.arange(0, WIDTH, 2) / WIDTH)
    return torch.stack([angles.sin(), angles.cos()], -1).flatten(1)


class Tokens(Trained):
    """A model of ids to logits under a mean over chosen tokens; `padded` ones are told which are there."""

    def __init__(self, model: nn.Module, padded: bool = False) -> None:
        super().__init__(model)
        self.padded = padded

    def _loss(self, batch: Any) -> torch.Tensor:
        ids, mask = batch["input_ids"], batch["attention_mask"].bool()
        logits = self.model(ids, padding=~mask) if self.padded else self.model(ids)
        return F.cross_entropy(logits.transpose(1, 2), ids.roll(-1, 1).masked_fill(~mask, -100))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self._loss(batch)
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch), sync_dist=True)


class LearnedPositions(nn.Module):
    """A layer with a parameter for each position."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(32, WIDTH) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.table[: x.shape[1]]


class HoldsBlocks(Trained):
    """The blocks belong to the LightningModule itself; there is no module that is the model."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 24, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.scale, self.positions = nn.Parameter(torch.tensor(1.5)), LearnedPositions()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], device=ids.device)
        return self.head(self.encoder(self.positions(self.embedding(ids)), mask=mask, is_causal=True)) * self.scale

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        ids = batch["input_ids"]
        loss = F.cross_entropy(self(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        self.log("train_loss", loss, sync_dist=True)
        return loss


class Bent(nn.Module):
    """Between its blocks the sequence grows by learned tokens, is thinned out, and is put together with an earlier one;
    attention has a learned bias by distance.
    """

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
            q, k, v = (item.unflatten(-1, (HEADS, -1)).transpose(1, 2) for item in self.qkv(self.norm(x)).chunk(3, -1))
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
            return x + self.out(y.transpose(1, 2).flatten(2))

    def __init__(self, learned: bool = True) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(2 * WIDTH, VOCABULARY)
        self.prompt = nn.Parameter(torch.randn(1, 4, WIDTH))
        self.bias = nn.Embedding(64, HEADS).requires_grad_(learned)
        self.blocks = nn.ModuleList(Bent.Block() for _ in range(4))

    def _bias(self, length: int) -> torch.Tensor:
        places = torch.arange(length)
        return self.bias(places[:, None] - places[None, :] + 32).permute(2, 0, 1)[None]

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        start = self.blocks[0](self.embed(ids), self._bias(ids.shape[1]))
        x = torch.cat([self.prompt.expand(len(ids), -1, -1), start], 1)
        x = self.blocks[1](x, self._bias(x.shape[1]))[:, 4:]
        half = self.blocks[2](x[:, ::2], self._bias(ids.shape[1] // 2))
        x = self.blocks[3](half.repeat_interleave(2, 1) + x, self._bias(ids.shape[1]))
        return self.head(torch.cat([x, start], -1))


class Viewed(Bent.Block):
    """Sees batch and sequence as one dim by a `view`, which tensors that are not contiguous refuse."""

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return super().forward(x.view(-1, WIDTH).view(x.shape), bias)


class FailsOnOneRank(Bent.Block):
    """Refuses a part of the sequence on one of the ranks alone, when attention has run."""

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        out = super().forward(x, bias)
        if x.shape[1] != LENGTH and dist.get_rank() == 1:
            raise ValueError("a length that this rank does not take")
        return out


class Plainly(nn.Module):
    """Two blocks of a kind, with nothing between them."""

    def __init__(self, kind: type[Bent.Block]) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.blocks = nn.ModuleList(kind() for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, None)
        return self.head(x)


# --- tokens that are born inside of the model -----------------------------------------------------------------------


class ImageAttention(nn.Module):
    """Fused projection in timm's manner: [b, n, 3 * h] seen as [3, b, heads, n, size]."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, n, width = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4).unbind(0)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, width))


class DiT(nn.Module):
    """A diffusion transformer: patches of an image, blocks that are modulated by the time, patches put together."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = (nn.LayerNorm(WIDTH, elementwise_affine=False) for _ in range(2))
            self.attn, self.modulation = ImageAttention(), nn.Linear(WIDTH, 6 * WIDTH)
            self.mlp = nn.Sequential(nn.Linear(WIDTH, 24), nn.GELU(), nn.Linear(24, WIDTH))

        def forward(self, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
            shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(F.silu(condition)).chunk(6, dim=1)
            x = x + gate1[:, None] * self.attn(self.norm1(x) * (1 + scale1[:, None]) + shift1[:, None])
            return x + gate2[:, None] * self.mlp(self.norm2(x) * (1 + scale2[:, None]) + shift2[:, None])

    def __init__(self) -> None:
        super().__init__()
        self.patchify = nn.Conv2d(3, WIDTH, 2, 2)
        self.time = nn.Sequential(nn.Linear(1, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.positions = nn.Parameter(torch.randn(1, LENGTH, WIDTH) * 0.1)
        self.blocks = nn.ModuleList(DiT.Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 12)

    def forward(self, images: torch.Tensor, when: torch.Tensor) -> torch.Tensor:
        x = self.patchify(images).flatten(2).transpose(1, 2) + self.positions
        condition = self.time(when[:, None])
        for block in self.blocks:
            x = block(x, condition)
        x = self.head(self.norm(x))
        side = int(x.shape[1] ** 0.5)
        x = x.reshape(len(x), side, side, 2, 2, 3)
        return torch.einsum("nhwpqc->nchpwq", x).reshape(len(x), 3, 2 * side, 2 * side)


class Diffusion(Trained):
    """Noise drawn in the step is what the model has to find in an image."""

    def __init__(self) -> None:
        super().__init__(DiT())

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        images = batch["images"]
        noise, when = torch.randn_like(images), torch.rand(len(images), device=images.device)
        share = when[:, None, None, None]
        loss = F.mse_loss(self.model((1 - share) * images + share * noise, when), noise)
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.model(batch["images"], torch.full((len(batch["images"]),), 0.5))


class ViT(nn.Module):
    """Classifies by a token of its own (one more than patches) or by the mean of all."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.attn, self.norm2 = nn.LayerNorm(WIDTH), ImageAttention(), nn.LayerNorm(WIDTH)
            self.mlp = nn.Sequential(nn.Linear(WIDTH, 24), nn.GELU(), nn.Linear(24, WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x + self.attn(self.norm1(x))
            return x + self.mlp(self.norm2(x))

    def __init__(self, pool: str = "mean") -> None:
        super().__init__()
        self.pool = pool
        self.patches = nn.Conv2d(3, WIDTH, 2, 2)
        self.class_token = nn.Parameter(torch.randn(1, 1, WIDTH) * 0.1) if pool == "token" else None
        self.positions = nn.Parameter(torch.randn(1, LENGTH + (pool == "token"), WIDTH) * 0.1)
        self.blocks = nn.Sequential(ViT.Block(), ViT.Block())
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        if self.class_token is not None:
            x = torch.cat([self.class_token.expand(len(x), -1, -1), x], 1)
        x = self.norm(self.blocks(x + self.positions))
        return self.head(x.mean(1) if self.class_token is None else x[:, 0])


class ClassifiesImages(nn.Module):
    """A classifier of `transformers` as a module from images to logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.model(images).logits


class Images(Trained):
    """The classifier of the tutorials."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        logits = self.model(batch["images"])
        loss = F.cross_entropy(logits, batch["target"])
        self.log_dict({"train_loss": loss, "accuracy": (logits.argmax(-1) == batch["target"]).float().mean()})
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self.model(batch["images"]), batch["target"]), sync_dist=True)


# --- positions that meet outside of attention -------------------------------------------------------------------------


class Mixing(nn.Module):
    """Blocks whose second half mixes positions in a way that is no attention call: `kind` says in which."""

    class Block(nn.Module):
        def __init__(self, kind: str) -> None:
            super().__init__()
            self.kind = kind
            self.norm, self.attn = nn.LayerNorm(WIDTH), GPT.Attention(0.0, 0.0)
            self.mixer = nn.Conv1d(WIDTH, WIDTH, 3) if kind == "convolution" else nn.Linear(WIDTH, WIDTH)
            self.batch_norm = nn.BatchNorm1d(WIDTH) if kind == "batch-norm" else None
            if kind in ("closed", "faint"):
                self.gate = nn.Parameter(torch.full((WIDTH,), 0.0 if kind == "closed" else 1e-5))
            if kind == "gated":
                nn.init.normal_(self.mixer.weight, std=0.02)
                nn.init.normal_(self.mixer.bias, std=0.02)
            self.register_buffer("mask", torch.ones(64, 64, dtype=torch.bool).tril(), persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.kind == "own-mask":  # made from the length that it sees
                q = k = v = self.norm(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
                y = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask[: x.shape[1], : x.shape[1]])
                return x + self.mixer(y.transpose(1, 2).flatten(2))
            if self.kind != "own-attention":
                x = x + self.attn(self.norm(x))
            if self.kind == "convolution":
                return x + self.mixer(F.pad(x.transpose(1, 2), (2, 0))).transpose(1, 2)
            if self.kind == "batch-norm":  # in training mode only
                return x + self.batch_norm(self.mixer(x).transpose(1, 2)).transpose(1, 2)
            if self.kind == "loop":  # a recurrence, position by position
                state, states = torch.zeros_like(x[:, 0]), []
                for position in range(x.shape[1]):
                    state = torch.tanh(0.5 * state + self.mixer(x[:, position]))
                    states.append(state)
                return x + torch.stack(states, 1)
            if self.kind == "far":  # nearer positions have nothing to do with each other
                return x + F.pad(self.mixer(x), (0, 0, 9, 0))[:, :-9]
            if self.kind in ("closed", "faint"):  # nothing of it is seen in what a block returns at first
                return x + self.gate * self.mixer(x).cumsum(1)
            if self.kind == "gated":  # products of small numbers, as in gated convolutions
                return x + self.mixer(F.pad(self.mixer(x).pow(3), (0, 0, 1, 0))[:, :-1])
            if self.kind == "cumsum":
                return x + 0.1 * self.mixer(x).cumsum(1)
            if self.kind == "own-attention":
                scores = x @ x.transpose(1, 2) / math.sqrt(WIDTH)
                later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
                return x + scores.masked_fill(later, -math.inf).softmax(-1) @ self.mixer(x)
            if self.kind == "positions":  # each part would begin at 0
                return x + 0.1 * torch.arange(x.shape[1], device=x.device)[:, None]
            assert self.kind == "last"
            return x + self.mixer(x[:, -1:])

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.blocks = nn.ModuleList(Mixing.Block(kind) for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class CallsAttention(nn.Module):
    """Blocks that mix positions, so that their own code sees whole sequences, and call attention by themselves."""

    class Block(nn.Module):
        def __init__(self, multi_head: bool) -> None:
            super().__init__()
            self.norm, self.mixer = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
            self.heads = nn.MultiheadAttention(WIDTH, HEADS) if multi_head else None
            self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

        def forward(self, x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
            y = self.norm(x)
            x = x + (self._attention(y) if self.heads is None else self._multi_head(y, padding))
            return x + 0.1 * self.mixer(x).cumsum(1)

        def _attention(self, y: torch.Tensor) -> torch.Tensor:
            q, k, v = (part(y).unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
            return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))

        def _multi_head(self, y: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
            assert self.heads is not None
            y, own = y.transpose(0, 1), self.heads
            out, _ = F.multi_head_attention_forward(
                y, y, y, WIDTH, HEADS, own.in_proj_weight, own.in_proj_bias, None, None, False, 0.0,
                own.out_proj.weight, own.out_proj.bias, key_padding_mask=padding, need_weights=False,
            )  # fmt: skip
            return out.transpose(0, 1)

    def __init__(self, multi_head: bool = False) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.blocks = nn.ModuleList(CallsAttention.Block(multi_head) for _ in range(2))

    def forward(self, ids: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, padding)
        return self.head(x)


class WrittenOut(nn.Module):
    """Causal attention by products and a softmax, with a learned bias by distance, as T5 and its kin have it."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
            self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
            self.out, self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)
            self.bias = nn.Embedding(64, HEADS)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            batch, length, width = x.shape
            y = self.norm1(x)
            q, k, v = (part(y).view(batch, length, HEADS, -1).transpose(1, 2) for part in (self.q, self.k, self.v))
            places = torch.arange(length, device=x.device)
            bias = self.bias((places[:, None] - places[None, :]).abs()).permute(2, 0, 1)
            scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]) + bias
            scores = scores.masked_fill(places[None, :] > places[:, None], -math.inf)
            x = x + self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, width))
            return x + self.down(F.gelu(self.up(self.norm2(x))))

    def __init__(self, largest: float = 0.0) -> None:
        """
        Args:
            largest: a value of what runs through all blocks, beside which that of attention is small.
        """
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.blocks = nn.ModuleList(WrittenOut.Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        if largest:
            nn.init.constant_(self.embed.weight[:, 3], largest)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class InWindows(nn.Module):
    """Attention within windows of positions that follow each other: of a sequence no longer than one, in all of it."""

    class Block(nn.Module):
        def __init__(self, window: int) -> None:
            super().__init__()
            self.window, self.norm = window, nn.LayerNorm(WIDTH)
            self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            batch, length, width = x.shape
            window = min(self.window, length)
            y = self.qkv(self.norm(x)).reshape(batch * (length // window), window, 3, HEADS, width // HEADS)
            q, k, v = y.permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return x + self.out(y.transpose(1, 2).reshape(batch, length, width))

    def __init__(self, window: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.blocks = nn.ModuleList(InWindows.Block(window) for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class SharesKeys(nn.Module):
    """Blocks that leave their keys and values in a mapping, from which later ones take them, as those of Gemma 3n."""

    class Block(nn.Module):
        def __init__(self, owns: bool) -> None:
            super().__init__()
            self.q, self.out, self.norm = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
            self.kv = nn.Linear(WIDTH, 2 * WIDTH) if owns else None

        def forward(self, x: torch.Tensor, shared: UserDict[str, torch.Tensor]) -> torch.Tensor:
            batch, length, width = x.shape
            y = self.norm(x)
            if self.kv is not None:
                shared["kv"] = self.kv(y).view(batch, length, 2, HEADS, -1).permute(2, 0, 3, 1, 4)
            q = self.q(y).view(batch, length, HEADS, -1).transpose(1, 2)
            y = F.scaled_dot_product_attention(q, *shared["kv"], is_causal=True)
            return x + self.out(y.transpose(1, 2).reshape(batch, length, width))

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.blocks = nn.ModuleList(SharesKeys.Block(owns) for owns in (True, False, True, False))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x, shared = self.embed(ids), UserDict()
        for block in self.blocks:
            x = block(x, shared)
        return self.head(x)


class NormalisedByHand(nn.Module):
    """Blocks without attention that are normalised over all positions, in training only."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)
            self.register_buffer("mean", torch.zeros(WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            mean = x.mean((0, 1)) if self.training else self.mean
            if self.training:
                with torch.no_grad():
                    self.mean.lerp_(mean, 0.1)
            return x + self.down(torch.tanh(self.up(x - mean)))

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.blocks = nn.ModuleList(NormalisedByHand.Block() for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class NoAttention(nn.Module):
    """Every position for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(3))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)
