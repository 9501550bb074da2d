"""Cases in which parameters are used outside of the call of the block that they belong to; `one` is plain Lightning."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from autolaunch_strategies import MeshStrategy, ProcessMesh, parallelize
from autolaunch_strategies.config import ConfigError
from autolaunch_strategies.pipeline.failure import StageFailedError
from tests.support.cases import RANK, serve

WIDTH, TOKENS = 8, 12


class TimeNorm(nn.Module):
    """A norm that is shifted and scaled by an embedding of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        return self.norm(x) * (1 + self.emb(time))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1 = TimeNorm()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.o_proj = nn.Linear(WIDTH, WIDTH)
        self.up_proj, self.down_proj = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        hidden = self.norm1(x, time)
        q, k, v = (
            proj(hidden).unflatten(-1, (2, WIDTH // 2)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        x = x + self.o_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down_proj(F.gelu(self.up_proj(x)))


class Diffusion(nn.Module):
    """As diffusers' DiT: the embedding within the first block is called by the model, too."""

    before, behind = False, False

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, TOKENS)
        self.example_input_array = torch.zeros(2, 4, dtype=torch.long)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        time = x.detach().mean(1, keepdim=True)
        if self.before:
            x = x + self.blocks[0].norm1.emb(time)
        for block in self.blocks:
            x = block(x, time)
        if self.behind:
            x = x * (1 + self.blocks[0].norm1.emb(time))
        return self.head(x)


class Before(Diffusion):
    before = True


class Behind(Diffusion):
    behind = True


class Both(Diffusion):
    before = behind = True


Penalty = Callable[[nn.Module], Any]


class Trains(pl.LightningModule):
    """Cross entropy of the next token, and what `penalty` makes of the model."""

    def __init__(self, model: type[Diffusion] = Diffusion, penalty: Penalty | None = None, first: bool = False) -> None:
        super().__init__()
        self.model, self.penalty, self.first = model(), penalty, first

    def _loss(self, tokens: torch.Tensor) -> torch.Tensor:
        more = self.penalty(self.model) if self.penalty is not None and self.first else 0.0
        logits = self.model(tokens[:, :-1])
        if self.penalty is not None and not self.first:
            more = self.penalty(self.model)
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()) + more

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self._loss(batch[0])
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch[0]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def squares(model: nn.Module) -> torch.Tensor:
    return 0.01 * sum(parameter.square().sum() for parameter in model.parameters())


def sizes(model: nn.Module) -> torch.Tensor:
    return 0.01 * torch.cat([parameter.abs().flatten() for parameter in model.parameters()]).mean()


def norms(model: nn.Module) -> torch.Tensor:
    return 0.01 * torch.stack([parameter.norm() for parameter in model.parameters()]).sum()


def orthogonal(model: nn.Module) -> torch.Tensor:
    weight = model.blocks[1].q_proj.weight
    return 0.01 * (weight @ weight.T - torch.eye(WIDTH)).square().sum()


def embedding(model: nn.Module) -> torch.Tensor:
    return 0.01 * model.embed.weight.square().sum()


def by_hand(model: nn.Module) -> torch.Tensor:
    """A penalty on what a layer of a block makes of data that differ between ranks."""
    return 0.1 * F.linear(model.embed.weight, model.blocks[2].up_proj.weight).square().mean()


PENALTIES = {item.__name__: item for item in (squares, sizes, norms, orthogonal, embedding, by_hand)}
MODULES: dict[str, Callable[[], Trains]] = {
    **{item.__name__.lower(): partial(Trains, item) for item in (Before, Behind, Both)},
    **{name: partial(Trains, Diffusion, penalty) for name, penalty in PENALTIES.items()},
    **{f"{name}-first": partial(Trains, Diffusion, penalty, True) for name, penalty in PENALTIES.items()},
    "both-squares": partial(Trains, Both, squares),
}
MESHES: dict[str, dict[str, Any]] = {
    **{f"dp2-{level}": {"mesh": "dp2", "dp": level} for level in (0, 1, 2, 3)},
    "mp2": {"mesh": "mp2", "mp": "tensor_parallel"},
    "sp2": {"mesh": "mp2", "mp": "seq_parallel"},
    "pp2": {"mesh": "pp2"},
    "pp2-1f1b": {"mesh": "pp2", "pp": {"schedule": "1f1b", "loss": "microbatch", "microbatches": 2}},
    "pp2-one": {"mesh": "pp2", "pp": {"schedule": "gpipe", "loss": "microbatch", "microbatches": 1}},
    "cp2": {"mesh": "cp2", "dp": 3},
    "dp2mp2": {"mesh": "dp2xmp2", "dp": 3},
    "dp2pp2": {"mesh": "dp2xpp2", "dp": 3},
}


class Rows(pl.Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        weight = getattr(trainer.strategy, "batch_weight", 1.0)
        self.losses.append(float(trainer.strategy.reduce(outputs["loss"].detach() * weight)))

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        if isinstance(trainer.strategy, MeshStrategy):
            self.norms.append(float(trainer.strategy._norm_of(module.parameters())))
        else:
            grads = [item.grad for item in module.parameters() if item.grad is not None]
            self.norms.append(float(torch.stack([item.norm() for item in grads]).norm()))


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def train(make: Callable[[], Trains], strategy: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Train on three batches, of which two ranks can't share the last one evenly."""
    pl.seed_everything(1, verbose=False)
    module, rows = make(), Rows()
    data = DataLoader(TensorDataset(torch.randint(TOKENS, (11, 5))), batch_size=4)
    chosen = MeshStrategy(timeout=40, **{"dp": 0, **strategy}) if strategy else "auto"
    trainer = pl.Trainer(
        strategy=chosen, accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0, callbacks=[rows], **options,
    )  # fmt: skip
    try:
        trainer.fit(module, data, data)
    except (ConfigError, StageFailedError) as error:
        return {"refused": str(error)}
    state = {name: whole(value).detach().flatten().tolist() for name, value in module.state_dict().items()}
    metrics = {key: float(value) for key, value in trainer.callback_metrics.items()}
    return {"losses": rows.losses, "norms": rows.norms, "weights": state, "metrics": metrics}


def loop(level: int | None, apart: bool = False) -> dict[str, Any]:
    """A plain loop on two halves of each batch; the penalty is differentiated by itself, or with the rest."""
    torch.manual_seed(1)
    model = Both()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = torch.randint(TOKENS, (3, 4, 5))
    if level is not None:
        mesh = ProcessMesh([0, 1], ["dp"])
        parallelize(model, optimizer, mesh, {"dp_config": {"sharding_level": level}})
        data = data[:, 2 * RANK : 2 * RANK + 2]
    losses = []
    for tokens in data:
        first = sizes(model)
        if apart:
            first.backward()
        with torch.no_grad():
            model(tokens[:, :-1])
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()) + norms(model)
        total = (loss + first).detach()
        if level is not None:
            dist.all_reduce(total)
        losses.append(float(total) / (1 if level is None else 2))
        (loss if apart else loss + first).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "weights": {k: whole(v).flatten().tolist() for k, v in model.state_dict().items()}}


def _options(name: str) -> dict[str, Any]:
    return {"accumulate_grad_batches": 2} if name == "accumulate" else {}


GROUPS: dict[str, dict[str, Callable[[], Any]]] = {"one": {}, "two": {}, "four": {}}
for _name, _make in MODULES.items():
    for _extra in ("", "accumulate"):
        _end = f"+{_extra}" if _extra else ""
        GROUPS["one"][_name + _end] = partial(train, _make, {}, **_options(_extra))
        for _mesh, _strategy in MESHES.items():
            _group = "four" if _mesh in ("dp2mp2", "dp2pp2") else "two"
            GROUPS[_group][f"{_name}@{_mesh}{_end}"] = partial(train, _make, _strategy, **_options(_extra))

for _apart in (False, True):
    GROUPS["one"][f"loop-{_apart}"] = partial(loop, None, _apart)
    for _level in (0, 1, 2, 3):
        GROUPS["two"][f"loop-{_apart}@{_level}"] = partial(loop, _level, _apart)

if __name__ == "__main__":
    serve(GROUPS)
