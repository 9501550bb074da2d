"""What the last stage has to say to the others: numbers, an object, or an error."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_NEW, _FAILED = -1, -2

_MOST_KNOWN_STRUCTURES = 512


class StageBroadcast:
    """Broadcasts from the last stage. Every call is collective over `group`; what other ranks pass is ignored.

    Numbers travel in a packet, [number of their structure, values...]. It is always as long as the longest structure
    known to all needs: the receivers have to know its length beforehand.

    Args:
        group: the ranks that hold the stages of one replica.
        last: the rank within it that holds the last stage.
        device: where collectives of `group` take place.
    """

    def __init__(self, group: dist.ProcessGroup, last: int, device: torch.device) -> None:
        self.group, self.last, self.device = group, last, device
        self._structures: list[Hashable] = []
        self._numbers: dict[Hashable, int] = {}
        self._room = 0

    def values(self, structure: Hashable = None, values: Sequence[Tensor | float] = ()) -> tuple[Any, Tensor]:
        """A structure, which says what the values are, and the values, [n] in fp64, on every rank.

        One broadcast; two more when the structure is a new one.

        Raises:
            Exception: on the other ranks, what the last stage passed to `fail` instead.
        """
        return self._send(structure, values) if self.group.rank() == self.last else self._receive()

    def fail(self, error: Exception) -> None:
        """In place of `values`, on the last stage: the others raise `error`, which has to survive pickling."""
        self._broadcast(self._packet(_FAILED))
        self.object(error)

    def object(self, item: Any = None) -> Any:
        """An object on every rank."""
        objects = [item]
        dist.broadcast_object_list(objects, group=self.group, group_src=self.last, device=self.device)
        return objects[0]

    def _send(self, structure: Hashable, values: Sequence[Tensor | float]) -> tuple[Hashable, Tensor]:
        content = torch.zeros(0, dtype=torch.float64, device=self.device)
        if values:
            content = torch.stack([torch.as_tensor(value).to(self.device, torch.float64) for value in values])
        number = self._numbers.get(structure, _NEW)
        packet = self._packet(number)
        if number != _NEW:
            packet[1 : 1 + len(values)] = content
        self._broadcast(packet)
        if number == _NEW:
            self.object((structure, len(values)))
            self._broadcast(content)
            self._learn(structure, len(values))
        return structure, content

    def _receive(self) -> tuple[Hashable, Tensor]:
        packet = self._packet(_NEW)
        self._broadcast(packet)
        number = int(packet[0])
        if number == _FAILED:
            raise self.object()
        if number != _NEW:
            return self._structures[number], packet[1:]
        structure, length = self.object()
        content = torch.zeros(length, dtype=torch.float64, device=self.device)
        self._broadcast(content)
        self._learn(structure, length)
        return structure, content

    def _packet(self, number: int) -> Tensor:
        packet = torch.zeros(1 + self._room, dtype=torch.float64, device=self.device)
        packet[0] = number
        return packet

    def _learn(self, structure: Hashable, length: int) -> None:
        if len(self._structures) < _MOST_KNOWN_STRUCTURES:  # names with numbers in them would never end
            self._numbers[structure] = len(self._structures)
            self._structures.append(structure)
            self._room = max(self._room, length)

    def _broadcast(self, tensor: Tensor) -> None:
        if tensor.numel():
            dist.broadcast(tensor, group=self.group, group_src=self.last)
