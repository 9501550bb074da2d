"""A LightningModule and data of a user's own, whose inputs nothing but the data shows."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

SIZE = 20


class Classifier(pl.LightningModule):
    def __init__(self, manual: bool = False) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(512, 10)
        )
        self.automatic_optimization = not manual

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        images, classes = batch
        loss = nn.functional.cross_entropy(self.net(images), classes)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Images(pl.LightningDataModule):
    def __init__(self, batch_size: int, fails: bool = False) -> None:
        super().__init__()
        self.batch_size, self.fails = batch_size, fails

    def train_dataloader(self) -> Any:
        if self.fails:
            raise OSError("no images here")
        images = TensorDataset(torch.randn(64, 3, SIZE, SIZE), torch.randint(0, 10, (64,)))
        return DataLoader(images, batch_size=self.batch_size)
