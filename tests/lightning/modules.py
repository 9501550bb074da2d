"""LightningModules as people write them, for the tests of MeshStrategy: nothing in them knows of a mesh."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
import torchmetrics
from torch import nn


class AutoEncoder(pl.LightningModule):
    """The first example of Lightning's documentation, in its style: the parts are called directly in the step."""

    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(nn.Linear(16, 9), nn.ReLU(), nn.Linear(9, 3))
        self.decoder = nn.Sequential(nn.Linear(3, 9), nn.ReLU(), nn.Linear(9, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.encoder(x)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, _ = batch
        loss = F.mse_loss(self.decoder(self.encoder(x)), x)
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, _ = batch
        self.log("val_loss", F.mse_loss(self.decoder(self(x)), x), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


class Classifier(pl.LightningModule):
    """A convolutional classifier with batch statistics and torchmetrics."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
            nn.Linear(16, 4),
        )  # fmt: skip
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(4, average="micro")
        self.predictions = torchmetrics.CatMetric()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x)

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        x, y = batch
        logits = self(x.view(-1, 1, 4, 4))
        return {"loss": F.cross_entropy(logits, y), "logits": logits.detach()}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        logits = self(x.view(-1, 1, 4, 4))
        self.accuracy(logits, y)
        self.predictions.update(logits.argmax(-1).float())
        self.log("val_accuracy", self.accuracy, on_epoch=True)
        self.log("val_seen", float(len(y)), reduce_fx="sum", sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        self.log("val_sum", self.predictions.compute().sum())
        self.predictions.reset()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)]


class LanguageModel(pl.LightningModule):
    """nn.TransformerEncoder with parameters of the module's own, a tied head, a scalar, frozen and unused ones."""

    def __init__(self, width: int = 12, dropout: float = 0.0, lr: float = 1e-2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.embedding = nn.Embedding(16, width)
        self.positions = nn.Parameter(torch.randn(8, width) * 0.02)
        layer = nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=dropout, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(width, 16, bias=False)
        self.head.weight = self.embedding.weight
        self.temperature = nn.Parameter(torch.tensor(1.0))
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.unused = nn.Linear(3, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        hidden = self.embedding(tokens) + self.positions[:length]
        hidden = self.encoder(hidden, mask=mask, is_causal=True)
        return F.linear(hidden + self.frozen(hidden), self.head.weight) * self.temperature

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        tokens = _tokens(batch)
        loss = F.cross_entropy(self(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        self.log("train_loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        tokens = _tokens(batch)
        loss = F.cross_entropy(self(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        self.log("val_loss", loss, sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self(_tokens(batch)).argmax(-1)

    def configure_optimizers(self) -> Any:
        decayed = [parameter for parameter in self.parameters() if parameter.dim() > 1]
        plain = [parameter for parameter in self.parameters() if parameter.dim() <= 1]
        optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}],
            lr=self.hparams["lr"],
            eps=1e-5,  # the gradient of a key's bias is zero but for rounding, which Adam would blow up
        )
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class LateLanguageModel(LanguageModel):
    """The same, built in `configure_model`."""

    def __init__(self, **kwargs: Any) -> None:
        pl.LightningModule.__init__(self)
        self.save_hyperparameters()
        self.kwargs = kwargs

    def configure_model(self) -> None:
        if not hasattr(self, "embedding"):
            built = LanguageModel(**self.kwargs)
            self.hparams.update(built.hparams)
            for name, part in built.named_children():
                setattr(self, name, part)
            self.positions, self.temperature = built.positions, built.temperature


class Gan(pl.LightningModule):
    """Manual optimization with two optimizers that take turns."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 16))
        self.discriminator = nn.Sequential(nn.Linear(16, 8), nn.LeakyReLU(), nn.Linear(8, 1))
        self.gain = nn.Parameter(torch.ones(16))

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        return self.generator(z) * self.gain

    def training_step(self, batch: Any, batch_idx: int) -> None:
        real, _ = batch
        z = real[:, :4]
        g_optimizer, d_optimizer = self.optimizers()
        self.toggle_optimizer(g_optimizer)
        fooled = self.discriminator(self(z))
        g_loss = F.binary_cross_entropy_with_logits(fooled, torch.ones_like(fooled))
        g_optimizer.zero_grad()
        self.manual_backward(g_loss)
        self.clip_gradients(g_optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        g_optimizer.step()
        self.untoggle_optimizer(g_optimizer)
        self.toggle_optimizer(d_optimizer)
        true, false = self.discriminator(real), self.discriminator(self(z).detach())
        d_loss = F.binary_cross_entropy_with_logits(true, torch.ones_like(true))
        d_loss = d_loss + F.binary_cross_entropy_with_logits(false, torch.zeros_like(false))
        d_optimizer.zero_grad()
        self.manual_backward(d_loss)
        d_optimizer.step()
        self.untoggle_optimizer(d_optimizer)
        self.log_dict({"g_loss": g_loss, "d_loss": d_loss}, sync_dist=True)

    def configure_optimizers(self) -> Any:
        own = [*self.generator.parameters(), self.gain]
        return torch.optim.Adam(own, lr=1e-2), torch.optim.SGD(self.discriminator.parameters(), lr=0.1)


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))


class Forces(pl.LightningModule):
    """A potential: forces are the gradient of the energy within the forward of the model, and what is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Layer(16) for _ in range(3)))
        self.energy = nn.Linear(16, 1)
        self.scale = nn.Parameter(torch.rand(16))

    def forward(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.enable_grad():
            positions = positions.detach().requires_grad_()
            energy = self.energy(self.layers(positions * self.scale)).squeeze(-1)
            (slope,) = torch.autograd.grad(energy.sum(), positions, create_graph=True)
        return energy, -slope

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        positions, _ = batch
        _, forces = self(positions)
        loss = F.mse_loss(forces, torch.sin(positions))
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        energy, forces = self(batch[0])
        self.log("val_loss", energy.mean() + forces.square().mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Critic(pl.LightningModule):
    """Losses by hand, of which one is a penalty on a gradient that is used before and after the pass of another one."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.layers = nn.Sequential(*(Layer(16) for _ in range(3)))
        self.score = nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.score(self.layers(x))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer, x = self.optimizers(), batch[0].clone().requires_grad_()
        (slope,) = torch.autograd.grad(self(x).sum(), x, create_graph=True)
        loss = self(x.detach().flip(-1)).mean() - self(x).mean()
        penalty = (slope.norm(dim=1) - 1).square().mean()
        optimizer.zero_grad()
        self.manual_backward(loss + penalty, retain_graph=True)
        self.manual_backward(self(x.detach()).square().mean())
        self.manual_backward(penalty)
        optimizer.step()
        self.log_dict({"loss": loss, "penalty": penalty}, sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _tokens(batch: Any) -> torch.Tensor:
    """Batches of the shared data set are (floats, labels); token ids are made from both."""
    x, y = batch
    return (x[:, :8].mul(7).long().abs() + y[:, None]) % 16
