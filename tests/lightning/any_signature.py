"""LightningModules whose model is called with what nobody can guess; only a step with a batch shows it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

WIDTH = 16


class Series(Dataset):
    """Dicts with a past [6, 4], statics [3], lengths and a future [2]."""

    def __init__(self, count: int = 24) -> None:
        generator = torch.Generator().manual_seed(5)
        self.items = [
            {
                "past": torch.randn(6, 4, generator=generator),
                "static": torch.randn(3, generator=generator),
                "length": 3 + index % 4,
                "future": torch.randn(2, generator=generator),
            }
            for index in range(count)
        ]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.items[index]


def series(**options: Any) -> DataLoader:
    return DataLoader(Series(), batch_size=8, **options)


class OneWay(IterableDataset):
    """Samples that are gone once they have been handed out."""

    def __init__(self) -> None:
        self.samples = iter(Series())

    def __iter__(self) -> Any:
        return self.samples


def stream() -> DataLoader:
    return DataLoader(OneWay(), batch_size=8)


class Block(nn.Module):
    """A residual pair of linear layers, scaled by something that is made for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x)))) * scale


class _Forecast(pl.LightningModule):
    def loss(self, forecast: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = F.mse_loss(forecast, batch["future"])
        self.log("train_loss", loss, sync_dist=True)
        if loss.item() != loss.item():  # a value: shapes alone have none
            raise ArithmeticError("not a number")
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Conditioned(_Forecast):
    """As diffusion models: several inputs, one of them in a dict, none that a layer's size would tell."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inward, self.time = nn.Linear(24, WIDTH), nn.Linear(3, WIDTH)
            self.blocks = nn.ModuleList([Block() for _ in range(4)])
            self.outward = nn.Linear(WIDTH, 2)

        def forward(self, sample: torch.Tensor, *, added: dict[str, torch.Tensor]) -> torch.Tensor:
            x, scale = self.inward(sample.flatten(1)), self.time(added["static"]).tanh()
            for block in self.blocks:
                x = block(x, scale)
            return self.outward(x)

    def __init__(self) -> None:
        super().__init__()
        self.model = self.Net()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.loss(self.model(batch["past"], added={"static": batch["static"]}), batch)


class UNet(_Forecast):
    """Skips from the way down to the way up; called with an image, a time and a context."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down = nn.ModuleList([Block() for _ in range(2)])
            self.up = nn.ModuleList([Block() for _ in range(2)])
            self.inward, self.outward = nn.Conv1d(4, WIDTH, 1), nn.Conv1d(WIDTH, 4, 1)
            self.time = nn.Linear(1, WIDTH)

        def forward(self, sample: torch.Tensor, timestep: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
            x = self.inward(sample).transpose(1, 2)
            scale = self.time(timestep[:, None]).unsqueeze(1) + context.mean(-1).view(-1, 1, 1)
            skips = []
            for block in self.down:
                x = block(x, scale)
                skips.append(x)
            for block in self.up:
                x = block(x + skips.pop(), scale)
            return self.outward(x.transpose(1, 2))

    def __init__(self) -> None:
        super().__init__()
        self.net = self.Net()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        noise = self.net(batch["past"].transpose(1, 2), batch["length"].float(), batch["static"])
        return self.loss(noise.mean((1, 2))[:, None].expand(-1, 2), batch)


class NBeats(_Forecast):
    """Blocks of fully connected layers, each of which forecasts and leaves a residual to the next one."""

    class BlockOfLayers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU())
            self.theta = nn.Linear(32, 6, bias=False)
            self.register_buffer("back", torch.linspace(-1, 1, 3 * 24).view(3, 24), persistent=False)
            self.register_buffer("fore", torch.linspace(0, 1, 3 * 2).view(3, 2), persistent=False)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            theta = self.theta(self.layers(x))
            return theta[:, :3] @ self.back, theta[:, 3:] @ self.fore

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([self.BlockOfLayers() for _ in range(3)])

    def forward(self, x: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        residual = x["past"].flatten(1)
        forecast = residual.new_zeros(len(residual), 2)
        for block in self.blocks:
            backcast, part = block(residual)
            residual, forecast = residual - backcast, forecast + part
        return {"prediction": forecast}

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.loss(self(batch)["prediction"], batch)


class Gated(nn.Module):
    """A gated residual network of temporal fusion transformers."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.fc1, self.fc2, self.gate = nn.Linear(inputs, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.skip = nn.Linear(inputs, WIDTH) if inputs != WIDTH else nn.Identity()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(F.glu(self.gate(self.fc2(F.elu(self.fc1(x)))), -1) + self.skip(x))


class Fusion(_Forecast):
    """As temporal fusion transformers: variables chosen by networks, an LSTM over packed sequences, attention."""

    def __init__(self) -> None:
        super().__init__()
        self.variables = nn.ModuleDict({f"v{place}": Gated(1) for place in range(4)})
        self.static = Gated(3)
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.after = Gated(WIDTH)
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: dict[str, torch.Tensor]) -> torch.Tensor:
        chosen = sum(net(x["past"][..., [place]]) for place, net in enumerate(self.variables.values()))
        packed = nn.utils.rnn.pack_padded_sequence(chosen, x["length"].cpu(), True, enforce_sorted=False)
        states, _ = nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0], batch_first=True, total_length=6)
        states = states + self.static(x["static"]).unsqueeze(1)
        return self.head(self.after(self.attention(states, states, states, need_weights=False)[0][:, -1]))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.loss(self(batch), batch)


class Recurrent(_Forecast):
    """Layers directly on the module, and no forward."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.l1, self.l2 = nn.LSTM(4, WIDTH, 2, batch_first=True), nn.Linear(WIDTH, 32), nn.Linear(32, 2)

    def training_step(self, batch: Any) -> torch.Tensor:
        states, _ = self.lstm(batch["past"])
        return self.loss(self.l2(self.l1(states[:, -1]).relu()), batch)


class Net(nn.Module):
    """Blocks between two layers."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.inward, self.outward = nn.Linear(inputs, WIDTH), nn.Linear(WIDTH, outputs)
        self.blocks = nn.ModuleList([Block() for _ in range(2)])

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        x = self.inward(x)
        for block in self.blocks:
            x = block(x, scale)
        return self.outward(x)


class Adversaries(pl.LightningModule):
    """Two modules that train against each other, by hand; each of them is called several times."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.discriminator = Net(3, 2), Net(2, 1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        ours, theirs = self.optimizers()
        scale = batch["static"][:, :1]
        made = self.generator(batch["static"], scale)
        loss = self.discriminator(made.detach(), scale).square().mean()
        loss = loss + (self.discriminator(batch["future"], scale) - 1).square().mean()
        theirs.zero_grad()
        self.manual_backward(loss)
        theirs.step()
        fooled = (self.discriminator(made, scale) - 1).square().mean()
        ours.zero_grad()
        self.manual_backward(fooled)
        ours.step()
        self.log_dict({"discriminates": loss, "fools": fooled}, sync_dist=True)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.generator, self.discriminator)]


class Taught(_Forecast):
    """A student learns from a frozen teacher."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = Net(3, 2), Net(3, 2).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        scale = batch["static"][:, 1:2]
        with torch.no_grad():
            target = self.teacher(batch["static"], scale)
        answer = self.student(batch["static"], scale)
        return self.loss(answer, batch) + F.mse_loss(answer, target)


KINDS: dict[str, Callable[[], pl.LightningModule]] = {
    "conditioned": Conditioned,
    "unet": UNet,
    "n-beats": NBeats,
    "fusion": Fusion,
    "recurrent": Recurrent,
    "adversaries": Adversaries,
    "taught": Taught,
}
