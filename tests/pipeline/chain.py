"""All stages of a pipeline in one process: one copy of the model for each, and a mailbox in the place of a network."""

from __future__ import annotations

import copy
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from autolaunch_strategies.config import PipelineParallel
from autolaunch_strategies.model.blocks import find_blocks
from autolaunch_strategies.pipeline.build import CutModel, plan_cut
from autolaunch_strategies.pipeline.placement import group_rank
from autolaunch_strategies.pipeline.run import Pipeline
from autolaunch_strategies.pipeline.transfer import Channel
from autolaunch_strategies.schedules.schedule import placement

CPU = torch.device("cpu")


class _Group:
    def __init__(self, ranks: int, rank: int) -> None:
        self.ranks, self.own = ranks, rank

    def size(self) -> int:
        return self.ranks

    def rank(self) -> int:
        return self.own


class _Arrived:
    def wait(self) -> None:
        pass


class _Mailbox(Channel):
    def __init__(self, group: Any, boxes: dict[tuple[int, int], deque[torch.Tensor]]) -> None:
        super().__init__(group, {}, CPU)
        self.boxes = boxes

    def send(self, tensors: Sequence[torch.Tensor], to: int) -> None:
        # Read as late as by a slow network: what is sent must not be changed meanwhile.
        self.boxes[self.group.rank(), to].extend(tensor.detach().contiguous() for tensor in tensors)

    def receive(self, shapes: Any, source: int, device: Any = CPU) -> tuple[list[torch.Tensor], list[Any]]:
        box = self.boxes[source, self.group.rank()]
        parts = [box.popleft().clone() for _ in shapes]
        assert [(tuple(part.shape), part.dtype) for part in parts] == list(shapes)
        return parts, [_Arrived() for _ in parts]


def flat(output: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_flatten(output)[0] if isinstance(leaf, torch.Tensor)]


def weighted_sum(output: Any) -> torch.Tensor:
    """A loss to which every number of an output contributes differently."""
    total = torch.zeros((), dtype=torch.float64)
    for number, leaf in enumerate(flat(output)):
        if leaf.requires_grad:
            weights = torch.linspace(0.5, 1.5 + number, leaf.numel(), dtype=torch.float64).view(leaf.shape)
            total = total + (leaf * weights).sum()
    return total


class Chain:
    """The ranks of a pipeline, one after the other: forward in the order of stages, backward in reverse."""

    def __init__(self, model: nn.Module, stages: int, wrapped: bool = False, **options: Any) -> None:
        self.config = PipelineParallel(**options)
        self.cutting = plan_cut(model, find_blocks(model), self.config, stages, wrapped)
        self.rank_of_stage = placement(self.config, stages)
        self.boxes: dict[tuple[int, int], deque[torch.Tensor]] = defaultdict(deque)
        self.roots = [copy.deepcopy(model) for _ in range(stages)]
        self.pipelines = [self._pipeline(root, rank) for rank, root in enumerate(self.roots)]

    def _pipeline(self, root: nn.Module, rank: int) -> Pipeline:
        group = _Group(len(self.roots), group_rank(self.rank_of_stage, len(self.roots), rank))
        mesh: Any = SimpleNamespace(group=lambda axis: group, sub_mesh=lambda axis: None, routes=lambda *_: {})
        pipeline = CutModel.make(root, self.cutting, self.config, mesh).pipeline(CPU)
        pipeline.channel = _Mailbox(group, self.boxes)
        pipeline.modes_to_check.clear()  # it asks all ranks at once
        return pipeline

    def step(
        self,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        loss: Callable[[Any], Any] | None = None,
    ) -> Any:
        """The output of the whole batch; with `loss`, every stage has its gradients afterwards."""
        output = None
        with torch.set_grad_enabled(loss is not None):
            for pipeline in self.pipelines:
                with pipeline.whole_step():
                    output = pipeline.model(*args, **(kwargs or {}))
                    if loss is not None:
                        loss(output).backward()
        if loss is not None:
            for pipeline in reversed(self.pipelines):
                pipeline.drain(lambda stage: None)
        assert not any(self.boxes.values()), "something was sent that nobody wanted"
        return output

    def gradients(self) -> dict[str, torch.Tensor]:
        """Of every parameter of the model that got one: the sum over its holders."""
        total: dict[str, torch.Tensor] = {}
        for root in self.roots:
            for name, parameter in root.named_parameters():
                if parameter.grad is not None:
                    total[name] = total[name] + parameter.grad if name in total else parameter.grad
        return total

    def held(self) -> list[set[str]]:
        """The names of the parameters of every stage, first stage first."""
        return [{name for name, _ in root.named_parameters()} for root in self.roots]
