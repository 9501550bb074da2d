"""What a row of the table is: a model, its batches and its loss; pure data until its model is made."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Field:
    """A tensor of a batch: its shape for one sample, and the number of classes if it holds integers."""

    shape: tuple[int, ...]
    classes: int | None = None
    value: float | None = None

    def draw(self, count: int, generator: torch.Generator) -> torch.Tensor:
        """`count` samples, [count, *shape]."""
        if self.value is not None:
            kind = torch.float32 if self.classes is None else torch.long
            return torch.full((count, *self.shape), self.value, dtype=kind)
        if self.classes is None:
            return torch.randn(count, *self.shape, generator=generator)
        return torch.randint(0, self.classes, (count, *self.shape), generator=generator)


def floats(*shape: int) -> Field:
    """Normally distributed numbers."""
    return Field(shape)


def classes(count: int, *shape: int) -> Field:
    """Integers from 0 to `count` - 1: tokens, or labels."""
    return Field(shape, count)


def ones(*shape: int) -> Field:
    """Integers, all of them 1: a mask that hides nothing."""
    return Field(shape, 2, 1)


Loss = Callable[[nn.Module, Batch], torch.Tensor]


def own(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The loss that the model computes itself."""
    return model(**batch).loss


def classified(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Cross entropy of scores [..., classes] with `labels`; everything else of the batch goes to the model in order."""
    labels = batch["labels"]
    scores = first_tensor(model(*(value for key, value in batch.items() if key != "labels")))
    return F.cross_entropy(scores.flatten(0, -2), labels.flatten())


def next_token(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Cross entropy of the next token, where the model gives scores [batch, positions, classes] of `ids`."""
    scores = first_tensor(model(batch["ids"][:, :-1]))
    return F.cross_entropy(scores.flatten(0, 1), batch["ids"][:, 1:].flatten())


def fitted(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Mean squared distance of the output from numbers that rise from -1 to 1 within each sample, by keyword."""
    return _rising(first_tensor(model(**batch)))


def fitted_in_order(model: nn.Module, batch: Batch) -> torch.Tensor:
    """As `fitted`, with the tensors of the batch in order."""
    return _rising(first_tensor(model(*batch.values())))


def _rising(output: torch.Tensor) -> torch.Tensor:
    target = torch.linspace(-1, 1, output[0].numel()).view(output[0].shape)
    return F.mse_loss(output, target.expand(output.shape))


def itself(model: nn.Module, batch: Batch) -> torch.Tensor:
    """What the model returns is the loss."""
    return model(*batch.values())


def first_tensor(output: Any) -> torch.Tensor:
    """The first tensor of what a model returns, which may be a dataclass, a mapping or a tuple."""
    if isinstance(output, torch.Tensor):
        return output
    values: Iterator[Any] = iter(output.values() if isinstance(output, Mapping) else _values(output))
    return first_tensor(next(value for value in values if value is not None))


def _values(output: Any) -> Any:
    return output if isinstance(output, list | tuple) else vars(output).values()


@dataclass(frozen=True)
class Row:
    """One model of the table.

    Args:
        library: the distribution that the model comes from.
        name: of the model, unique within its library.
        make: makes the model; imports its library.
        batch: the tensors of a sample by name.
        loss: what a training step computes.
        sequence: whether it has a sequence to shard along cp.
    """

    library: str
    name: str
    make: Callable[[], nn.Module]
    batch: dict[str, Field]
    loss: Loss
    sequence: bool = True

    @property
    def dtype(self) -> torch.dtype:
        """What it is trained in: 64 bits where norms over few samples may amplify rounding a thousandfold.

        On one process MobileNetV2 has after two steps another gradient norm in 32 bits than in 64, by half.
        """
        return torch.float32 if self.sequence else torch.float64

    @property
    def key(self) -> str:
        """Its name in commands and results."""
        return f"{self.library}:{self.name}"

    def samples(self, count: int) -> list[Batch]:
        """The same samples at every call."""
        generator = torch.Generator().manual_seed(7)
        fields = {name: field.draw(count, generator) for name, field in self.batch.items()}
        fields = {
            name: values.to(self.dtype) if values.is_floating_point() else values for name, values in fields.items()
        }
        return [{name: values[index] for name, values in fields.items()} for index in range(count)]


def without_dropout(model: nn.Module) -> nn.Module:
    """Set every probability of dropping something to 0: masks are no matter of meshes here."""
    for module in model.modules():
        names = ["dropout_prob", "drop_prob", "class_dropout_prob"]
        if "Drop" in type(module).__name__ or "StochasticDepth" in type(module).__name__:
            names.append("p")
        for name in names:
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model
