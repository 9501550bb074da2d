"""A model and data of one's own: plain PyTorch and plain Lightning; autolaunch is not imported anywhere."""

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class ResidualNet(nn.Module):
    """Classifies points; its repeated blocks are what a sharded run gathers one after the other."""

    def __init__(self, width: int, depth: int, classes: int) -> None:
        super().__init__()
        self.enter = nn.Linear(2, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(depth))
        self.leave = nn.Linear(width, classes)

    def forward(self, points: Tensor) -> Tensor:
        """points (batch, 2) -> logits (batch, classes)."""
        x = self.enter(points)
        for block in self.blocks:
            x = x + block(x)
        return self.leave(x)


class Spirals(L.LightningDataModule):
    """Points on the interleaved arms of a spiral; the class of a point is its arm."""

    def __init__(self, arms: int, points: int, batch_size: int) -> None:
        super().__init__()
        self.arms, self.points, self.batch_size = arms, points, batch_size

    def _loader(self, seed: int, size: int) -> DataLoader:
        generator = torch.Generator().manual_seed(seed)
        arm = torch.randint(self.arms, (size,), generator=generator)
        radius = torch.rand(size, generator=generator) * 2
        angle = 2.5 * radius + arm * (2 * torch.pi / self.arms) + 0.1 * torch.randn(size, generator=generator)
        points = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)
        return DataLoader(TensorDataset(points, arm), batch_size=self.batch_size)

    def train_dataloader(self) -> DataLoader:
        return self._loader(seed=0, size=self.points)

    def val_dataloader(self) -> DataLoader:
        return self._loader(seed=1, size=512)
