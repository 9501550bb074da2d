"""What the last stage has to say to the others: numbers, an object, or an error."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autolaunch_strategies.torch_private.collectives import host_device

_NEW, _FAILED = -1, -2

_MOST_KNOWN_STRUCTURES = 512


class StageBroadcast:
    """Broadcasts from the last stage. Every call is collective over `group`; what other ranks pass is ignored.

    Values stay on the device, and nobody waits for it. What the host needs travels between hosts: [number of the
    structure, numbers...]. Messages are always as long as the longest structure known to all needs: the receivers
    have to know their length beforehand. Where the device is the host, both are one message.

    Args:
        group: the ranks that hold the stages of one replica.
        last: the rank within it that holds the last stage.
        device: where values are.
    """

    def __init__(self, group: dist.ProcessGroup, last: int, device: torch.device) -> None:
        self.group, self.last, self.device = group, last, device
        self._host = host_device(device, group)
        self._structures: list[Hashable] = []
        self._places: dict[Hashable, int] = {}
        self._most_values = self._most_numbers = 0

    def values(
        self, structure: Hashable = None, values: Sequence[Tensor | float] = (), numbers: Sequence[float] = ()
    ) -> tuple[Any, Tensor, list[float]]:
        """A structure, which says what the rest is, values, [n] in fp64 on the device, and numbers, on every rank.

        There may be more values and numbers than were sent. More is sent when the structure is a new one.

        Raises:
            Exception: on the other ranks, what the last stage passed to `fail` instead.
        """
        return self._send(structure, values, numbers) if self.group.rank() == self.last else self._receive()

    def fail(self, error: Exception) -> None:
        """In place of `values`, on the last stage: the others raise `error`, which has to survive pickling."""
        self._exchange([_FAILED])
        self.object(error)

    def object(self, item: Any = None) -> Any:
        """An object on every rank."""
        objects = [item]
        dist.broadcast_object_list(objects, group=self.group, group_src=self.last, device=self._host)
        return objects[0]

    def _send(
        self, structure: Hashable, values: Sequence[Tensor | float], numbers: Sequence[float]
    ) -> tuple[Hashable, Tensor, list[float]]:
        content = torch.zeros(0, dtype=torch.float64, device=self.device)
        if values:
            content = torch.stack([self._value(value) for value in values])
        place = self._places.get(structure, _NEW)
        if place == _NEW:
            self._exchange([_NEW])
            self.object((structure, list(numbers), len(values)))
            self._broadcast(content)
            self._learn(structure, len(values), len(numbers))
        else:
            self._exchange([place, *numbers], content)
        return structure, content, list(numbers)

    def _receive(self) -> tuple[Hashable, Tensor, list[float]]:
        place, numbers, content = self._exchange()
        if place == _FAILED:
            raise self.object()
        if place != _NEW:
            return self._structures[place], content, numbers
        structure, numbers, length = self.object()
        content = torch.zeros(length, dtype=torch.float64, device=self.device)
        self._broadcast(content)
        self._learn(structure, length, len(numbers))
        return structure, content, numbers

    def _value(self, value: Tensor | float) -> Tensor:
        if isinstance(value, Tensor):
            return value.to(self.device, torch.float64)
        return torch.full((), value, dtype=torch.float64, device=self.device)

    def _exchange(self, header: Sequence[float] = (), content: Tensor | None = None) -> tuple[int, list[float], Tensor]:
        """(the place of a structure, the numbers, the values) that the last stage passes here."""
        sent = torch.zeros(1 + self._most_numbers, dtype=torch.float64)
        sent[: len(header)] = torch.tensor(header, dtype=torch.float64)
        values = torch.zeros(self._most_values, dtype=torch.float64, device=self.device)
        if content is not None:
            values[: len(content)] = content
        if self._host == self.device:
            packet = torch.cat([sent.to(self.device), values])
            self._broadcast(packet)
            sent, values = packet.split([len(sent), len(values)])
        else:
            self._broadcast(sent)
        place, *numbers = (int(number) if number.is_integer() else number for number in sent.tolist())
        if place >= 0 and self._host != self.device:
            self._broadcast(values)
        return place, numbers, values

    def _learn(self, structure: Hashable, values: int, numbers: int) -> None:
        if len(self._structures) < _MOST_KNOWN_STRUCTURES:  # names with numbers in them would never end
            self._places[structure] = len(self._structures)
            self._structures.append(structure)
            self._most_values = max(self._most_values, values)
            self._most_numbers = max(self._most_numbers, numbers)

    def _broadcast(self, tensor: Tensor) -> None:
        if tensor.numel():
            dist.broadcast(tensor, group=self.group, group_src=self.last)
