"""LightningModules as people write them, for the tests of pp: nothing in them knows that their model is cut."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
import torchmetrics
from lightning.pytorch.utilities import grad_norm
from torch import nn

VOCABULARY, WIDTH, BLOCKS = 32, 16, 4


def sgd(module: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    """Its step is proportional to the gradient: an error in one shows in the weights at its own size."""
    return torch.optim.SGD(module.parameters(), lr=lr, momentum=0.9)


# --- language models -----------------------------------------------------------------------------------------------

_SIZES: dict[str, Any] = {
    "hidden_size": WIDTH, "intermediate_size": 24, "num_hidden_layers": BLOCKS, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": VOCABULARY, "max_position_embeddings": 32, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.2,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {**_SIZES, "tie_word_embeddings": True},
    "qwen3": {**_SIZES, "head_dim": 4, "tie_word_embeddings": False},
    "gpt2": {
        "n_embd": WIDTH, "n_layer": BLOCKS, "n_head": 4, "vocab_size": VOCABULARY, "n_positions": 32,
        "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2,
        "initializer_range": 0.2,
    },
    "gpt_neox": {
        **{key: value for key, value in _SIZES.items() if key != "num_key_value_heads"},
        "attention_dropout": 0.0, "hidden_dropout": 0.0, "tie_word_embeddings": False,
    },
    "opt": {
        "hidden_size": WIDTH, "ffn_dim": 24, "num_hidden_layers": BLOCKS, "num_attention_heads": 4, "dropout": 0.0,
        "vocab_size": VOCABULARY, "max_position_embeddings": 32, "word_embed_proj_dim": WIDTH, "pad_token_id": 0,
        "init_std": 0.2, "layerdrop": 0.0,
    },
}  # fmt: skip
"""Causal models of `transformers` by model_type: llama, gpt2 and opt tie their embeddings."""


def hf_causal(family: str, **changes: Any) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**FAMILIES[family], **changes}))


def hf_t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCABULARY, d_model=WIDTH, d_kv=4, d_ff=24, num_layers=2, num_decoder_layers=2, num_heads=4,
            dropout_rate=0.0, decoder_start_token_id=0,
        )
    )  # fmt: skip


def hf_albert() -> nn.Module:
    from transformers import AlbertConfig, AlbertForSequenceClassification

    return AlbertForSequenceClassification(
        AlbertConfig(
            vocab_size=VOCABULARY, embedding_size=8, hidden_size=WIDTH, num_hidden_layers=BLOCKS,
            num_attention_heads=4, intermediate_size=24, max_position_embeddings=32, num_labels=4,
            initializer_range=0.2, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
            classifier_dropout_prob=0.0,
        )
    )  # fmt: skip


def hf_bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(
        BertConfig(
            vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=BLOCKS, num_attention_heads=4,
            intermediate_size=24, max_position_embeddings=32, hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0, num_labels=4, initializer_range=0.2,
        )
    )  # fmt: skip


class Transformers(pl.LightningModule):
    """The LightningModule of the text examples: `loss = self.model(**batch).loss`, two groups, warm-up."""

    def __init__(self, model: nn.Module, lr: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters(ignore="model")
        self.model = model

    def forward(self, **inputs: Any) -> Any:
        return self.model(**inputs)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        outputs = self(**batch)
        self.log("train_loss", outputs.loss, prog_bar=True, sync_dist=True)
        return outputs.loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> dict[str, torch.Tensor]:
        outputs = self.model(**batch)
        val_loss, logits = outputs[:2]
        self.log("val_loss", val_loss, prog_bar=True, sync_dist=True)
        return {"loss": val_loss, "preds": logits.argmax(-1)}

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits.argmax(-1)

    def configure_optimizers(self) -> Any:
        no_decay = ("bias", "norm.weight", "layernorm.weight", "ln_f.weight")
        named = [(name, item) for name, item in self.model.named_parameters() if item.requires_grad]
        optimizer = torch.optim.SGD(
            [
                {"params": [item for name, item in named if not name.endswith(no_decay)], "weight_decay": 0.05},
                {"params": [item for name, item in named if name.endswith(no_decay)], "weight_decay": 0.0},
            ],
            lr=self.hparams["lr"],
            momentum=0.9,
        )
        warm = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))
        return [optimizer], [{"scheduler": warm, "interval": "step", "frequency": 1}]


class TransformersAdamW(Transformers):
    def configure_optimizers(self) -> Any:
        # an eps far above rounding errors: Adam divides tiny gradients by their own size
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-3)


class WithHiddenStates(Transformers):
    """The loss uses what every layer made."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        outputs = self.model(**batch, output_hidden_states=True)
        states = torch.stack(outputs.hidden_states)
        assert len(states) == BLOCKS + 1
        loss = outputs.loss + 0.01 * states.square().mean()
        self.log("train_loss", loss, sync_dist=True)
        return loss


class OwnLlama(pl.LightningModule):
    """This project's Llama under a plain next-token loss."""

    def __init__(self, tie: bool = False, layers: int = BLOCKS) -> None:
        super().__init__()
        from autolaunch.models.llama import Llama
        from autolaunch.models.llama_config import llama_config

        sizes: dict[str, Any] = {
            "size": "debug", "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 24,
            "num_layers": layers, "num_heads": 4, "num_kv_heads": 2, "head_dim": 4, "tie_embeddings": tie,
            "init_std": 0.2,
        }  # fmt: skip
        self.model = Llama(llama_config(sizes))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        tokens = batch["input_ids"]
        logits = self.model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        self.log("train_loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        tokens = batch["input_ids"]
        logits = self.model(tokens[:, :-1])
        self.log("val_loss", F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()), sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.model(batch["input_ids"])

    def configure_optimizers(self) -> Any:
        return sgd(self)


# --- models with other shapes than a decoder's -----------------------------------------------------------------------


class Block(nn.Module):
    """A residual block; what it takes and gives back is one tensor."""

    def __init__(self, width: int = WIDTH, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 24), nn.Linear(24, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Mlp(nn.Module):
    """Stem, blocks, head."""

    def __init__(self, classes: int = 4, blocks: int = BLOCKS, dropout: float = 0.0, inputs: int = WIDTH) -> None:
        super().__init__()
        self.stem = nn.Linear(inputs, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout=dropout) for _ in range(blocks))
        self.head = nn.Linear(WIDTH, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class CallsCounted(Mlp):
    """Counts its calls, as a number, as a buffer and as one that is replaced, and weighs by what it has counted."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.register_buffer("added", torch.zeros(()))
        self.register_buffer("replaced", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.added += 1
        self.replaced = self.replaced + 1
        return super().forward(x * (self.calls + self.added)) * (1 + 0.1 * self.replaced)


class KeepsPenalty(Mlp):
    """Keeps a penalty on what its blocks add, which the loss of `Penalised` reads."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        self.penalty = x.new_zeros(())
        for block in self.blocks:
            added = block(x)
            self.penalty = self.penalty + (added - x).square().mean()
            x = added
        return self.head(x)


class InputHalved(Mlp):
    """Changes its input in place."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.mul_(0.5)) + x.mean(1, keepdim=True)


class StartsFromBatch(Block):
    """Centres what it sees first, as activation normalisation does."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.zeros(WIDTH))
        self.register_buffer("started", torch.tensor(False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.started:
            with torch.no_grad():
                self.offset.copy_(-x.mean(0))
                self.started.fill_(True)
        return super().forward(x + self.offset)


class NormalisedInTraining(nn.Module):
    """A block normalised by hand: by the mean of the batch in training, and else by what is left of those."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH), nn.Dropout(dropout)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.mean(0) if self.training else self.mean
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(mean, 0.1)
        return x + self.drop(self.down(torch.tanh(self.up(x - mean))))


class BlockCounted(Block):
    """Counts its calls, and returns more each time."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x) * self.calls


def with_blocks(kind: Callable[[], nn.Module]) -> Mlp:
    """An `Mlp` of other blocks."""
    model = Mlp()
    model.blocks = nn.ModuleList(kind() for _ in model.blocks)
    return model


class ReadingBlock(Block):
    """Looks at values, so that only running shows that it returns more than one tensor."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, float]:
        return super().forward(x), float(x.mean())


class ReadingMlp(Mlp):
    """Its blocks are stepped over, and then `[0]` is the first of a dimension: there are enough of them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ReadingBlock() for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x).view(-1, *[1] * BLOCKS, WIDTH)
        for block in self.blocks:
            x = block(x)[0]
        return self.head(x).flatten(0, -2)


class TupleBlock(nn.Module):
    """Takes a mask and positions by keyword, gives back its state, a penalty and a dict of statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.value, self.shift = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Embedding(16, WIDTH)

    def forward(
        self, hidden: torch.Tensor, *, mask: torch.Tensor, positions: torch.Tensor, penalty: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        moved = hidden + self.shift(positions)
        scores = self.query(moved) @ moved.transpose(1, 2) / math.sqrt(WIDTH)
        weights = scores.masked_fill(~mask[:, None, :], -1e9).softmax(-1)
        hidden = hidden + weights @ self.value(moved)
        own = hidden.square().mean((1, 2))
        return hidden, own if penalty is None else penalty + own, {"top": weights.amax(-1)}


class TupleModel(nn.Module):
    """Blocks that return tuples; the model returns a dict with tensors of several blocks and things that are none."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(TupleBlock() for _ in range(BLOCKS))
        self.out = nn.Linear(WIDTH, VOCABULARY)
        self.example_input_array = {
            "ids": torch.zeros(2, 10, dtype=torch.long),
            "mask": torch.ones(2, 10, dtype=torch.bool),
        }

    def forward(self, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor | None = None) -> dict[str, Any]:
        if positions is None:
            positions = torch.arange(ids.shape[1], device=ids.device).unsqueeze(0)
        hidden, penalty, tops = self.embed(ids), None, []
        for layer in self.layers:
            hidden, penalty, seen = layer(hidden, mask=mask, positions=positions, penalty=penalty)
            tops.append(seen["top"])
        return {"logits": self.out(hidden), "penalty": penalty, "tops": tops, "count": len(ids), "name": "tuple"}


class Encoder(nn.Module):
    """torch's own encoder with a padding mask, a table of positions of the model's own and a tied head."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        nn.init.normal_(self.embed.weight, std=0.3)
        self.positions = nn.Parameter(torch.randn(16, WIDTH) * 0.1)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 24, dropout, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, BLOCKS, nn.LayerNorm(WIDTH), enable_nested_tensor=False)

    def forward(self, ids: torch.Tensor, padding: torch.Tensor | None = None) -> torch.Tensor:
        hidden = self.embed(ids) + self.positions[: ids.shape[1]]
        hidden = self.encoder(hidden, src_key_padding_mask=padding)
        return F.linear(hidden, self.embed.weight)


class SkipModel(nn.Module):
    """What early blocks made is used by late ones, as in a U-Net."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2 * BLOCKS))
        self.merge = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(BLOCKS))
        self.head = nn.Linear(2 * WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        start = x = self.stem(x)
        kept = []
        for index, block in enumerate(self.blocks):
            if index >= BLOCKS:
                x = self.merge[index - BLOCKS](torch.cat([x, kept.pop()], -1))
            x = block(x)
            if index < BLOCKS:
                kept.append(x)
        return self.head(torch.cat([x, start], -1))


class ConvBlock(nn.Module):
    def __init__(self, channels: int, stride: int = 1, norm: str = "group") -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = (
            nn.GroupNorm(2, channels) if norm == "group" else nn.BatchNorm2d(channels) for _ in range(2)
        )
        self.shortcut = nn.Identity() if stride == 1 else nn.Conv2d(channels, channels, 1, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(out + self.shortcut(x))


class ResNet(nn.Module):
    def __init__(self, norm: str = "group") -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, 3, padding=1)
        self.layer = nn.Sequential(*(ConvBlock(4, 2 if index == 1 else 1, norm) for index in range(BLOCKS)))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(F.relu(self.conv1(x)))
        return self.fc(torch.flatten(self.avgpool(x), 1))


class NoBlocks(nn.Module):
    """Stages of one layer each: nothing in it is repeated."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.trunk = nn.Sequential(nn.Linear(WIDTH, 24), nn.Tanh(), Block(24))
        self.recurrent = nn.LSTM(24, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.trunk(F.gelu(self.stem(x)))
        out, (state, _) = self.recurrent(torch.stack([x, -x], 1))
        return self.head(out[:, -1] + state[-1])


# --- LightningModules around them -------------------------------------------------------------------------------------


class SequenceFirst(pl.LightningModule):
    """Takes [positions, batch, width], as torch's own transformer and LSTM do by default; a state goes in, too."""

    def __init__(self, recurrent: bool) -> None:
        super().__init__()
        self.model = Recurrent() if recurrent else MixesPositions()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        x = x.view(len(x), 4, 4).transpose(0, 1)
        state = (x.new_zeros(1, len(y), 4),) if isinstance(self.model, Recurrent) else ()
        loss = F.cross_entropy(self.model(x, *state).mean(0), y)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return sgd(self)


class MixesPositions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(4, 2, 8, 0.0) for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class RecurrentBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.norm = nn.GRU(4, 4), nn.LayerNorm(4)

    def forward(self, x: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        output, state = self.rnn(x, state)
        return x + self.norm(output), state


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(RecurrentBlock() for _ in range(BLOCKS))
        self.example_input_array = torch.zeros(4, 2, 4), torch.zeros(1, 2, 4)

    def forward(self, x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x, state = block(x, state)
        return x


class Classifier(pl.LightningModule):
    """The classifier of the tutorials: `self(x)`, cross entropy, accuracy by torchmetrics."""

    def __init__(self, model: nn.Module | None = None, shape: tuple[int, ...] = (WIDTH,), lr: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters(ignore="model")
        self.model = model or Mlp()
        self.shape = shape
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(4, average="macro")
        self.scores = torchmetrics.CatMetric()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x.view(-1, *self.shape))

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        self.log("train_loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return {"loss": loss, "logits": logits.detach(), "index": batch_idx}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        logits = self(x)
        self.accuracy(logits, y)
        self.scores.update(logits.softmax(-1).amax(-1))
        self.log("val_accuracy", self.accuracy, on_step=False, on_epoch=True)
        self.log("val_seen", float(len(y)), reduce_fx="sum", sync_dist=True)
        self.log("val_loss", F.cross_entropy(logits, y), sync_dist=True)

    test_step = validation_step

    def on_validation_epoch_end(self) -> None:
        self.log("val_score", self.scores.compute().sum())
        self.scores.reset()

    on_test_epoch_end = on_validation_epoch_end

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> torch.Tensor:
        return self(batch[0]).softmax(-1)

    def configure_optimizers(self) -> Any:
        optimizer = sgd(self, self.hparams["lr"])
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)]


class Tuples(pl.LightningModule):
    """A batch that is a dict with nested parts, passed to the model by position and by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.net = TupleModel()

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        out = self.net(batch["inputs"]["ids"], mask=batch["inputs"]["mask"])
        assert out["count"] == len(batch["target"]) and out["name"] == "tuple"
        loss = F.cross_entropy(out["logits"][:, -1], batch["target"]) + 0.01 * out["penalty"].mean()
        self.log_dict({"train_loss": loss, "top": torch.stack(out["tops"]).mean()}, sync_dist=True)
        return loss + 0.1 * torch.stack(out["tops"]).mean()

    def configure_optimizers(self) -> Any:
        return sgd(self)


class Masked(pl.LightningModule):
    """A masked language model: the mean over the masked tokens only, which each sample has another number of."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.model = Encoder(dropout)

    def _loss(self, batch: Any) -> torch.Tensor:
        ids, wanted = batch["input_ids"], batch["wanted"]
        logits = self.model(ids.masked_fill(wanted, 3), padding=~batch["attention_mask"].bool())
        each = F.cross_entropy(logits.transpose(1, 2), ids, reduction="none")
        return (each * wanted).sum() / wanted.sum()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self._loss(batch)
        self.log("train_loss", loss, sync_dist=True)
        self.log("perplexity", loss.exp(), sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = self._loss(batch)
        self.log_dict({"val_loss": loss, "val_perplexity": loss.exp()}, sync_dist=True)

    def configure_optimizers(self) -> Any:
        return sgd(self)


class Causal(pl.LightningModule):
    """The language model of torch's tutorial: a square mask and a vector of positions are arguments of the model."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.table = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(16, WIDTH)
            layer = nn.TransformerEncoderLayer(WIDTH, 4, 24, 0.0, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, BLOCKS)
            self.decoder = nn.Linear(WIDTH, VOCABULARY)
            self.example_input_array = torch.zeros(2, 8, dtype=torch.long), torch.arange(8), torch.zeros(8, 8)

        def forward(self, ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            hidden = self.embed(ids) * math.sqrt(WIDTH) + self.table(positions)
            return self.decoder(self.encoder(hidden, mask, is_causal=True))

    def __init__(self) -> None:
        super().__init__()
        self.transformer = self.Model()

    def _loss(self, batch: Any) -> torch.Tensor:
        ids, targets = batch["input_ids"][:, :8], batch["input_ids"][:, 1:9]
        length = ids.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=ids.device)
        logits = self.transformer(ids, torch.arange(length, device=ids.device), mask)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.log("before_the_call", float(batch_idx))
        loss = self._loss(batch)
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return sgd(self, 0.01)


class Contrastive(pl.LightningModule):
    """Two views of a sample in one call; every other sample of the batch is a negative."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Mlp(classes=8)
        self.projection = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        self.scale = nn.Parameter(torch.tensor(1.0))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, _ = batch
        z = F.normalize(self.projection(self.encoder(torch.cat([x, x.flip(1)]))), dim=-1)
        first, second = z.chunk(2)
        scores = self.scale.exp() * first @ second.T
        target = torch.arange(len(x), device=x.device)
        loss = (F.cross_entropy(scores, target) + F.cross_entropy(scores.T, target)) / 2
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        return sgd(self)


class Sandwich(pl.LightningModule):
    """Trainable modules before and after the one that is cut, parameters of its own, frozen and unused ones."""

    def __init__(self, frozen: str = "") -> None:
        super().__init__()
        self.before = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.backbone = Mlp(classes=WIDTH)
        self.after = nn.Linear(WIDTH, 4)
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.unused = nn.Linear(3, 3)
        self.fixed = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.backbone.never = nn.Linear(2, 2)
        for name, item in self.named_parameters():
            if frozen and name.startswith(tuple(frozen.split())):
                item.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.backbone(self.before(x))
        return self.after(hidden + self.fixed(hidden)) * self.temperature

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([item for item in self.parameters() if item.requires_grad], lr=0.1, momentum=0.9)


class Unfreezes(Sandwich):
    """Fine-tuning in two phases: the backbone joins after the first epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone.requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        self.backbone.requires_grad_(self.current_epoch > 0)

    def configure_optimizers(self) -> Any:
        return sgd(self)


class UnfreezesFirst(Classifier):
    """Nothing on the first stage is trained before the second epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.first = [self.model.stem, *self.model.blocks[:2]]

    def on_train_epoch_start(self) -> None:
        for part in self.first:
            part.requires_grad_(self.current_epoch > 0)


class FreezesBetweenBatches(Classifier):
    """The first stage is trained in the first batch, and then in every third one."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        for part in (self.model.stem, *self.model.blocks[:2]):
            part.requires_grad_(batch_idx % 3 == 0)


class HoldsBlocks(pl.LightningModule):
    """The blocks belong to the LightningModule itself; its own forward is the model."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, 4)
        self.bias = nn.Parameter(torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x) + self.bias

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        return sgd(self)


class Diffusion(pl.LightningModule):
    """Noise drawn in the step goes through the model and is its target."""

    def __init__(self) -> None:
        super().__init__()
        self.denoiser = Mlp(classes=WIDTH, inputs=WIDTH + 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, _ = batch
        noise = torch.randn_like(x)
        when = torch.rand(len(x), 1, device=x.device)
        mixed = (1 - when) * x + when * noise
        loss = F.mse_loss(self.denoiser(torch.cat([mixed, when], 1)), noise)
        later = torch.rand((), device=x.device)  # what a step draws after the call goes on in the same stream
        self.log_dict({"train_loss": loss, "drawn_later": later}, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        return sgd(self)


class EpochEnds(Classifier):
    """The documented idiom: outputs of steps are kept in a list and evaluated at the end of the epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.outs: list[torch.Tensor] = []
        self.losses: list[torch.Tensor] = []
        self.printed: list[str] = []
        self.steps = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.steps += 1
        out = super().training_step(batch, batch_idx)
        self.losses.append(out["loss"].detach())
        return out

    def on_train_epoch_end(self) -> None:
        self.log("train_mean", torch.stack(self.losses).mean())
        self.losses.clear()

    def validation_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        logits = self(batch[0])
        if batch_idx == 0:
            self.print("first prediction", float(logits.sum()) > -1e9)
        self.outs.append(logits)
        return logits

    def on_validation_epoch_end(self) -> None:
        logits = torch.cat(self.outs)
        self.log("val_top", logits.amax(-1).mean(), prog_bar=True)
        self.log("val_count", float(len(logits)))
        self.outs.clear()


class Distilled(Classifier):
    """A frozen teacher of the same kind beside the model."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = Mlp().requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        with torch.no_grad():
            target = self.teacher(batch[0]).softmax(-1)
        loss = F.cross_entropy(self(batch[0]), target)
        self.log("train_loss", loss)
        return loss


class Keyed(Mlp):
    """Takes a dict."""

    def forward(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        return super().forward(inputs["features"])


class ShowsExample(Classifier):
    """Its own forward takes something else than its model; the example is for the former."""

    def __init__(self) -> None:
        super().__init__(Keyed())
        self.example_input_array = torch.zeros(2, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model({"features": x})


class ShowsExampleWithoutForward(pl.LightningModule):
    """Nothing but the model could take the example."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Keyed()
        self.example_input_array = ({"features": torch.zeros(2, WIDTH)},)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return F.cross_entropy(self.model({"features": batch[0]}), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class PartsByThemselves(ShowsExampleWithoutForward):
    """As autoencoders in tutorials: nothing calls the model as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = None

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x = self.model.stem(batch[0])
        for block in self.model.blocks:
            x = block(x)
        return F.cross_entropy(self.model.head(x), batch[1])


class Noisy(Classifier):
    """Dropout in every block."""

    def __init__(self, p: float = 0.5) -> None:
        super().__init__(Mlp(dropout=p))


# --- what can't work ----------------------------------------------------------------------------------------------


class ManualOptimization(Classifier):
    """Two batches for each optimizer step, clipped, with a scheduler that is stepped by hand."""

    def __init__(self, model: nn.Module | None = None) -> None:
        super().__init__(model)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)["loss"]
        optimizer = self.optimizers()
        if batch_idx % 2 == 0:
            optimizer.zero_grad()
        self.manual_backward(loss / 2)
        if batch_idx % 2:
            self.clip_gradients(optimizer, 0.1, "norm")
            optimizer.step()
            self.lr_schedulers().step()
        if loss > 1e-3:  # what depends on values goes the same way everywhere
            self.log("by_hand", 2 * loss, sync_dist=True)
        return loss


class Scored(Classifier):
    """Metrics of every batch that are no means over its parts, logged in each of the usual ways."""

    def __init__(self) -> None:
        super().__init__()
        scores = torchmetrics.classification
        self.f1, self.recall = scores.MulticlassF1Score(4, average="macro"), scores.MulticlassRecall(4, average="macro")
        self.several = torchmetrics.MetricCollection(
            {"auroc": scores.MulticlassAUROC(4), "precision": scores.MulticlassPrecision(4)}, prefix="several_"
        )
        self.largest = torchmetrics.MaxMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        logits = self(x)
        self.f1(logits, y)
        self.largest(logits.amax(-1))
        self.log("f1", self.f1, on_step=True, on_epoch=True)
        self.log("recall", self.recall(logits, y), on_step=True, on_epoch=True)
        self.log_dict(self.several(logits, y), on_step=True, on_epoch=False)
        self.log("largest", self.largest, on_step=True, on_epoch=True)
        return F.cross_entropy(logits, y)


class GradNorms(TransformersAdamW):
    """Logs norms of gradients by Lightning's utility, of everything and of a part, which one stage holds."""

    def __init__(self) -> None:
        super().__init__(hf_causal("llama"))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log_dict(grad_norm(self, norm_type=2))
        part = grad_norm(self.model.model.layers[0].mlp, norm_type="inf", group_separator="_")
        assert len(part) == 4
        self.log_dict({f"part_{name}": norm for name, norm in part.items()})


class TiedByHand(Transformers):
    """Accumulates over two batches the gradient of an embedding that both stages hold."""

    def __init__(self) -> None:
        super().__init__(hf_causal("llama"))
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        if batch_idx % 2:
            self.optimizers().step()
            self.optimizers().zero_grad()
        return loss


class Adversarial(pl.LightningModule):
    """A generator and a critic, each with an optimizer; the one that has blocks is cut."""

    def __init__(self, cut: str = "generator") -> None:
        super().__init__()
        self.automatic_optimization = False
        plain = [nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, size)) for size in (WIDTH, 1)]
        self.generator = Mlp(WIDTH) if cut == "generator" else plain[0]
        self.critic = Mlp(1) if cut == "critic" else plain[1]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, _ = batch
        of_generator, of_critic = self.optimizers()
        self.toggle_optimizer(of_generator)
        loss = F.softplus(-self.critic(self.generator(x.flip(1)))).mean()
        self.log("generator", loss, on_step=True, sync_dist=True)
        self.manual_backward(loss)
        of_generator.step()
        of_generator.zero_grad()
        self.untoggle_optimizer(of_generator)
        self.toggle_optimizer(of_critic)
        other = F.softplus(-self.critic(x)).mean() + F.softplus(self.critic(self.generator(x.flip(1)).detach())).mean()
        self.log("critic", other, on_step=True, sync_dist=True)
        self.manual_backward(other)
        of_critic.step()
        of_critic.zero_grad()
        self.untoggle_optimizer(of_critic)
        return loss + other

    def configure_optimizers(self) -> Any:
        return [sgd(self.generator), sgd(self.critic)]


class TwoModels(pl.LightningModule):
    """Two models with blocks, each with an optimizer and called once."""

    def __init__(self, by_hand: bool) -> None:
        super().__init__()
        self.automatic_optimization = not by_hand
        self.small, self.large = Mlp(WIDTH, blocks=2), Mlp(blocks=4)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = F.cross_entropy(self.large(self.small(x)), y)
        if not self.automatic_optimization:
            self.manual_backward(loss)
            for optimizer in self.optimizers():
                optimizer.step()
                optimizer.zero_grad()
        return loss

    def configure_optimizers(self) -> Any:
        return sgd(self) if self.automatic_optimization else [sgd(self.small), sgd(self.large)]


class OwnBackward(Classifier):
    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        (2 * loss).backward()


class TwoCalls(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return F.cross_entropy(self.model(x) + self.model(x.flip(0)), y)


class Penalty(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return F.cross_entropy(self(x), y) + 0.01 * sum(item.square().sum() for item in self.model.parameters())


class Penalised(Classifier):
    def __init__(self) -> None:
        super().__init__(KeepsPenalty())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return F.cross_entropy(self(x), y) + self.model.penalty


class ThroughItself(ManualOptimization):
    """One call of the model takes what another one returned."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        logits = self.model(x)
        self.manual_backward(F.cross_entropy(self.model(logits.repeat(1, 4)), y))


class TwiceByHand(ManualOptimization):
    """Two backward passes through one call."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        logits = self(x)
        self.manual_backward(F.cross_entropy(logits, y), retain_graph=True)
        self.manual_backward(logits.square().mean())


class PenaltyByHand(ManualOptimization):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        self.manual_backward(F.cross_entropy(self(x), y) + 0.01 * self.model.blocks[0].up.weight.square().sum())


class CallsForward(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return F.cross_entropy(self.model.forward(x), y)


class SecondOrder(Classifier):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


class NeverCalls(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return (batch[0] * self.scale).square().mean()
