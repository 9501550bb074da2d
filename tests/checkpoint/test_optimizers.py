"""Whatever an optimizer keeps for its parameters comes back from a checkpoint; what can't is told."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from autolaunch_strategies import ConfigError, MeshStrategy
from autolaunch_strategies.mesh.process_group import leave_process_group
from tests.support.messages import assert_told


@pytest.fixture(scope="module", autouse=True)
def process_group() -> Iterator[None]:
    yield
    leave_process_group()


class Whitened(torch.optim.Optimizer):
    """A list of factors for each parameter, as Shampoo has, and other containers, all made in the first step."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = closure()
        for parameter in self.param_groups[0]["params"]:
            state, update = self.state[parameter], parameter.grad
            if not state:
                state["factors"] = [torch.eye(size) for size in parameter.shape]
                state["means"] = {"first": torch.zeros_like(parameter), "steps": 0}
                state["history"] = [None, [torch.zeros(()), {"last.of": torch.zeros(2)}]]
            for dim, factor in enumerate(state["factors"]):
                flat = parameter.grad.transpose(0, dim).flatten(1)
                factor.mul_(0.9).add_(flat @ flat.T, alpha=0.1)
                update = torch.tensordot(factor, update, ([1], [dim])).movedim(0, dim)
            state["means"]["first"].lerp_(update, 0.3)
            state["means"]["steps"] += 1
            state["history"][1][0] += 1
            state["history"][1][1]["last.of"] += state["history"][1][0]
            scale = state["means"]["steps"] + state["history"][1][1]["last.of"].sum()
            parameter.sub_(state["means"]["first"], alpha=0.01 / float(scale))
        return loss


class Halves(pl.LightningModule):
    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two, self.kind = nn.Linear(4, 3, bias=False), nn.Linear(3, 1, bias=False), kind
        self.automatic_optimization = "manual" not in kind

    def loss(self, batch: Any) -> torch.Tensor:
        return (self.two(self.one(batch[0])) - batch[0][:, :1] * 2).square().mean()

    def training_step(self, batch: Any, number: int) -> Any:
        loss = self.loss(batch)
        if not self.automatic_optimization:
            self.manual_backward(loss)
            for optimizer in self.optimizers():  # type: ignore[union-attr]  # there are two
                optimizer.step()
                optimizer.zero_grad()
            return None
        return loss

    def configure_optimizers(self) -> Any:
        if self.kind == "whitened":
            return Whitened(self.parameters())
        if self.kind == "lbfgs":
            return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)
        if self.kind == "stray":
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            optimizer.state["shared"] = {"count": 1}  # type: ignore[index]  # some have such keys
            return optimizer
        both = [torch.optim.Adam(part.parameters(), lr=0.1) for part in (self.one, self.two)]
        return both[::-1] if self.kind == "manual-swapped" else both


def trained(kind: str, steps: int, resumed: Path | None = None, saved: Path | None = None) -> list[float]:
    """The weights after so many steps."""
    module = Halves(kind)
    trainer = pl.Trainer(
        strategy=MeshStrategy(mesh="1"), accelerator="cpu", max_steps=steps, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    data = torch.utils.data.TensorDataset(torch.randn(32, 4, generator=torch.Generator().manual_seed(1)))
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=4), ckpt_path=resumed)
    if saved is not None:
        trainer.save_checkpoint(saved)
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()]).tolist()


@pytest.mark.parametrize("kind", ["whitened", "lbfgs"])
def test_state_in_lists_and_dicts_comes_back(kind: str, tmp_path: Path) -> None:
    whole = trained(kind, 6)
    trained(kind, 3, saved=tmp_path / "three.ckpt")
    assert trained(kind, 6, resumed=tmp_path / "three.ckpt") == whole


def test_optimizers_in_another_order_are_refused(tmp_path: Path) -> None:
    whole = trained("manual", 8)  # two optimizers count as two steps
    trained("manual", 4, saved=tmp_path / "two.ckpt")
    assert trained("manual", 8, resumed=tmp_path / "two.ckpt") == whole
    with pytest.raises(ConfigError) as refused:
        trained("manual-swapped", 8, resumed=tmp_path / "two.ckpt")
    assert_told(
        refused.value,
        f"ckpt_path={tmp_path / 'two.ckpt'}",
        "optimizer 1 trained two.weight there, and optimizer 0 does here",
    )


def test_state_of_no_parameter_is_told(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"optimizer 0 \(SGD\) keeps state under 'shared'"):
        trained("stray", 1, saved=tmp_path / "one.ckpt")
