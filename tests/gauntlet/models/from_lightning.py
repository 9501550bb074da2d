"""Models of lightning's demos, and of torch itself."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from tests.gauntlet.row import Batch, Field, Loss, Row, classes, classified, fitted, fitted_in_order, floats

TOKENS, WIDTH = 64, 32


def _demo_transformer() -> nn.Module:
    from lightning.pytorch.demos import Transformer

    return Transformer(vocab_size=TOKENS, ninp=WIDTH, nhead=4, nhid=48, dropout=0.0)


def _translated(model: nn.Module, batch: Batch) -> torch.Tensor:
    """As the demo's own training step."""
    return F.nll_loss(model(batch["inputs"], batch["target"]), batch["target"].view(-1))


def _demo_lstm() -> nn.Module:
    from lightning.pytorch.demos.lstm import SimpleLSTM

    return SimpleLSTM(vocab_size=TOKENS, ninp=16, nhid=16, nlayers=2, dropout=0.0)


def _remembered(model: nn.Module, batch: Batch) -> torch.Tensor:
    """As the demo's own training step, which makes the first hidden state from a weight."""
    scores, _ = model(batch["inputs"], model.init_hidden(batch["inputs"].size(0)))
    return F.nll_loss(scores, batch["target"].view(-1))


def _encoder(**switches: bool) -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 48, 0.0, batch_first=True, **switches)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def _decoder() -> nn.Module:
    return nn.TransformerDecoder(nn.TransformerDecoderLayer(WIDTH, 4, 48, 0.0, batch_first=True), 2)


class Recurrent(nn.Module):
    """An LSTM or GRU between an embedding and a head, as in countless scripts."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.embedding, self.rnn = nn.Embedding(TOKENS, 16), kind(16, 16, 2, batch_first=True)
        self.head = nn.Linear(16, TOKENS)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(self.embedding(ids))[0])


def _of(library: str, name: str, make: Callable[[], nn.Module], batch: dict[str, Field], loss: Loss) -> Row:
    return Row(library, name, make, batch, loss, sequence=name not in ("LSTM", "GRU", "demos.LSTM"))


_PAIR, _LABELLED = (
    {"inputs": classes(TOKENS, 12), "target": classes(TOKENS, 12)},
    {"ids": classes(TOKENS, 12), "labels": classes(TOKENS, 12)},
)

ROWS = [
    _of("lightning", "demos.Transformer", _demo_transformer, _PAIR, _translated),
    _of("lightning", "demos.LSTM", _demo_lstm, _PAIR, _remembered),
    _of("torch", "TransformerEncoder", _encoder, {"src": floats(12, WIDTH)}, fitted),
    _of("torch", "TransformerEncoder-norm-first", lambda: _encoder(norm_first=True), {"src": floats(12, WIDTH)},
        fitted),
    _of("torch", "TransformerDecoder", _decoder, {"tgt": floats(12, WIDTH), "memory": floats(8, WIDTH)}, fitted),
    _of("torch", "Transformer", lambda: nn.Transformer(WIDTH, 4, 2, 2, 48, 0.0, batch_first=True),
        {"src": floats(8, WIDTH), "tgt": floats(12, WIDTH)}, fitted),
    _of("torch", "LSTM", lambda: Recurrent(nn.LSTM), _LABELLED, classified),
    _of("torch", "GRU", lambda: Recurrent(nn.GRU), _LABELLED, classified),
    Row("torch", "MLP", lambda: nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(),
                                              nn.Linear(32, 10)),
        {"x": floats(16), "labels": classes(10)}, classified, sequence=False),
    Row("torch", "bilinear", lambda: nn.Bilinear(8, 8, 8), {"x": floats(8), "y": floats(8)}, fitted_in_order,
        sequence=False),
]  # fmt: skip
