"""A LightningModule and data of a user's own, whose inputs nothing but the data shows."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

SIZE = 20


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(32, 32, batch_first=True)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.cell(rows.unflatten(1, (16, 32)))[0].flatten(1)


class Classifier(pl.LightningModule):
    def __init__(self, manual: bool = False, kinds: bool = False, apart: bool = False) -> None:
        super().__init__()
        self.apart = apart  # parts of the net are called by themselves
        norm, behind = (nn.BatchNorm2d(32), Recurrent()) if kinds else (nn.Identity(), nn.Identity())
        self.net = nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1), norm, nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), behind,
            nn.Linear(512, 10),
        )  # fmt: skip
        self.automatic_optimization = not manual

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        images, classes = batch
        for part in self.net if self.apart else (self.net,):
            images = part(images)
        loss = nn.functional.cross_entropy(images, classes)
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
