"""A plain LightningModule on any mesh: nothing in it knows about devices; only `strategy=` differs from one process.

python lightning_module.py        # one process
python lightning_module.py 2      # two; parameters, gradients and optimizer state are sharded over them
"""

import sys

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from autolaunch_strategies import MeshStrategy


class Classifier(L.LightningModule):
    """Tells in which quarter of the plane a point lies."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(2, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 4)
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        points, quarters = batch
        loss = nn.functional.cross_entropy(self.net(points), quarters)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        points, quarters = batch
        right = (self.net(points).argmax(-1) == quarters).float().mean()
        self.log("accuracy", right, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def loader(size: int, seed: int) -> DataLoader:
    """Points around the origin, and the quarter of the plane (0 to 3) of each."""
    points = torch.randn(size, 2, generator=torch.Generator().manual_seed(seed))
    quarters = (points[:, 0] > 0) * 2 + (points[:, 1] > 0)
    return DataLoader(TensorDataset(points, quarters.long()), batch_size=64)


if __name__ == "__main__":
    ranks = int(sys.argv[1]) if len(sys.argv) > 1 else 1
    trainer = L.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=MeshStrategy(mesh=ranks, dp={"sharding_level": 3}),
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Classifier(), loader(4096, seed=0), loader(512, seed=1))
    trainer.print(f"accuracy {trainer.callback_metrics['accuracy']:.3f}")
