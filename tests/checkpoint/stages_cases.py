"""Cases for the tests of checkpoints over stages.

A stage is made here by taking parameters out of a module, so that nothing is asked of the engine but to write and load
what a rank holds.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from autolaunch_strategies.checkpoint.files import problem_with
from autolaunch_strategies.checkpoint.optimizers import GroupNames, names_in_groups, whole_groups
from autolaunch_strategies.checkpoint.sharded import CheckpointWriter, load_checkpoint
from autolaunch_strategies.config import parse_mesh
from autolaunch_strategies.mesh.rank_mesh import RankMesh
from autolaunch_strategies.torch_private.meshes import local_index
from tests.support.cases import WORLD, serve

SHELF = Path(os.environ["CHECKPOINTS"])
STAGES = min(WORLD, 2)


class Counting(nn.Linear):
    """Has state that is no tensor."""

    calls = 0

    def get_extra_state(self) -> Any:
        return {0: self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state[0]


class Tied(pl.LightningModule):
    """Embedding and head are one parameter; `temperature` belongs to no layer; `prompt` has an optimizer of its own."""

    def __init__(self, blocks: int = 3, width: int = 6) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.embedding = nn.Embedding(10, width)
        self.prompt = nn.Parameter(torch.randn(2, width))
        self.blocks = nn.ModuleList(nn.Sequential(Counting(width, width), nn.BatchNorm1d(width)) for _ in range(blocks))
        self.head = nn.Linear(width, 10, bias=False)
        self.head.weight = self.embedding.weight

    def configure_optimizers(self) -> Any:
        last = list(self.blocks[-1].parameters())
        named = {id(parameter) for parameter in (*last, self.prompt)}
        rest = [parameter for parameter in self.parameters() if id(parameter) not in named]
        groups = [{"params": last, "weight_decay": 0.0}, {"params": rest[::-1]}]  # not in the model's order
        return torch.optim.AdamW(groups, lr=1e-3), torch.optim.SGD([self.prompt], lr=1e-3, momentum=0.9)


class Stage:
    """What this rank holds of a module and its optimizers: all of it in one process, else one of two stages."""

    def __init__(self, mesh: RankMesh, seed: int, **kwargs: Any) -> None:
        torch.manual_seed(seed)
        self.mesh, self.module = mesh, Tied(**kwargs)
        self.optimizers: list[torch.optim.Optimizer] = list(self.module.configure_optimizers())
        names = {parameter: name for name, parameter in self.module.named_parameters()}
        self.names: list[GroupNames] = [names_in_groups(optimizer, names) for optimizer in self.optimizers]
        if mesh.group("pp") is not None:
            self._cut(last=mesh.coordinate["pp"] == 0)
        if mesh.shape.dp > 1:
            fully_shard(self.module, mesh=mesh.sharding_mesh(), ignored_params={self.module.temperature})
        held = dict(self.module.named_parameters())
        for optimizer, groups in zip(self.optimizers, self.names, strict=True):
            for group, wanted in zip(optimizer.param_groups, groups, strict=True):
                group["params"][:] = [held[name] for name in wanted if name in held]

    def _cut(self, last: bool) -> None:
        """Leave the first block and the prompt, or the other blocks; embedding (head) and temperature are on both."""
        blocks = list(self.module.blocks)
        here, elsewhere = (blocks[1:], blocks[:1]) if last else (blocks[:1], blocks[1:])
        held = {self.module.temperature, self.module.embedding.weight, *(() if last else (self.module.prompt,))}
        held |= {parameter for block in here for parameter in block.parameters()}
        for owner in self.module.modules():
            for name, parameter in list(owner._parameters.items()):
                if parameter is not None and parameter not in held:
                    del owner._parameters[name]
                    owner.__dict__[name] = torch.empty_like(parameter, device="meta")
        for block in elsewhere:
            block[1]._buffers.clear()

    def train(self) -> Stage:
        """Two steps of every optimizer, with gradients that depend on the parameter's name alone."""
        for number, optimizer in enumerate(self.optimizers):
            for group in optimizer.param_groups:
                group["lr"] = 0.01 * (number + 1)
        for step in range(2):
            for name, parameter in self.module.named_parameters():
                generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + step)
                gradient = torch.randn(parameter.shape, generator=generator)
                if isinstance(parameter, DTensor):
                    part = gradient[local_index(parameter)]
                    parameter.grad = DTensor.from_local(
                        part, parameter.device_mesh, parameter.placements, shape=parameter.shape,
                        stride=parameter.stride(),
                    )  # fmt: skip
                else:
                    parameter.grad = gradient
            for optimizer in self.optimizers:
                optimizer.step()
        for name, buffer in self.module.named_buffers():
            buffer.fill_(zlib.crc32(name.encode()) % 100)
        for number, block in enumerate(self.module.blocks):
            block[0].calls = number + 1 if list(block.parameters()) else -1  # -1: it never ran here
        return self

    def save(self, path: Path, asynchronous: bool = False, known: bool = True, optimizers: bool = True) -> None:
        writer = CheckpointWriter(asynchronous)
        checkpoint: dict[str, Any] = {"state_dict": self.module.state_dict(), "global_step": 2}
        if optimizers:
            checkpoint["optimizer_states"] = [{} for _ in self.optimizers]
        own = self.optimizers if optimizers else []
        writer.save(path, checkpoint, self.module, own, self.mesh, self.names if known else None)
        if asynchronous:  # what goes on meanwhile must not show
            with torch.no_grad():
                for parameter in self.module.parameters():
                    parameter.mul_(0)
        writer.finish()

    def load(self, path: Path) -> Stage:
        load_checkpoint(path, self.module, self.optimizers, self.mesh, True, self.names)
        return self

    def values(self) -> dict[str, Any]:
        """Everything by name, whole."""
        named = {parameter: name for name, parameter in self.module.named_parameters()}
        return {
            "tensors": {name: numbers(value) for name, value in self.module.state_dict().items()},
            "state": {
                f"{number}.{named[parameter]}.{key}": numbers(value)
                for number, optimizer in enumerate(self.optimizers)
                for parameter in (item for group in optimizer.param_groups for item in group["params"])
                for key, value in optimizer.state.get(parameter, {}).items()
            },
            "options": [
                [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
                for optimizer in self.optimizers
            ],
        }


def numbers(value: Any) -> Any:
    tensor = value.full_tensor() if isinstance(value, DTensor) else value
    return tensor.double().flatten().tolist() if isinstance(tensor, torch.Tensor) else str(tensor)


MESHES: list[RankMesh] = []


def stage(seed: int = 3, **kwargs: Any) -> Stage:
    if not MESHES:
        if not dist.is_initialized():
            init = {} if WORLD > 1 else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
            dist.init_process_group("gloo", **init)
        shape = parse_mesh({1: "1", 2: "pp2", 4: "dp2xpp2"}[WORLD])
        MESHES.append(RankMesh.build(shape, 1, shape.dp, "cpu"))
    return Stage(MESHES[0], seed, **kwargs)


# --- the cases ------------------------------------------------------------------------------------------------------


def reference() -> Any:
    return stage().train().values()


def groups() -> Any:
    """The whole optimizers' groups as every rank sees them: with their order known, unknown, and fewer on a stage."""
    made = stage().train()
    pipeline = made.mesh.group("pp")
    named = {parameter: name for name, parameter in made.module.named_parameters()}

    def seen(order: bool) -> Any:
        pairs = zip(made.optimizers, made.names, strict=True)
        found = [whole_groups(item, named, names if order else None, pipeline) for item, names in pairs]
        return [[(group["names"], group["options"]["weight_decay"]) for group in groups] for groups in found]

    known, unknown = seen(True), seen(False)
    for optimizer in made.optimizers:
        optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]
    return {"made": made.names, "known": known, "unknown": unknown, "without empty ones": seen(True)}


def write() -> Any:
    stage().train().save(SHELF / f"on-{WORLD}.ckpt")
    stage().train().save(SHELF / f"background-{WORLD}.ckpt", asynchronous=True)
    stage().train().save(SHELF / f"unordered-{WORLD}.ckpt", known=False)
    stage().train().save(SHELF / f"weights-{WORLD}.ckpt", optimizers=False)
    return [problem_with(SHELF / f"{name}-{WORLD}.ckpt") for name in ("on", "background", "unordered", "weights")]


def write_plain() -> Any:
    made = stage().train()
    states = [optimizer.state_dict() for optimizer in made.optimizers]
    torch.save({"state_dict": made.module.state_dict(), "optimizer_states": states, "global_step": 2}, SHELF / "plain")


def written_once() -> Any:
    """How often each tensor's elements stand in the checkpoint."""
    from torch.distributed.checkpoint import FileSystemReader

    found = {}
    for name, metadata in FileSystemReader(SHELF / f"on-{WORLD}.ckpt").read_metadata().state_dict_metadata.items():
        if hasattr(metadata, "chunks"):
            found[name] = sum(chunk.sizes.numel() for chunk in metadata.chunks) / max(1, metadata.size.numel())
    return found


def read(name: str) -> Callable[[], Any]:
    return lambda: stage(seed=8).load(SHELF / name).values()


def refused(name: str, **kwargs: Any) -> Callable[[], Any]:
    return lambda: stage(**kwargs).load(SHELF / name).values()


ON_STAGES = {
    "groups": groups,
    "write": write,
    "written_once": written_once,
    **{name: read(f"{name}-{WORLD}.ckpt") for name in ("on", "background", "unordered")},
    "weights": refused(f"weights-{WORLD}.ckpt"),
}
READ = (*(f"{name}-{ranks}.ckpt" for ranks in (2, 4) for name in ("on", "background", "unordered")), "plain")
GROUPS: dict[str, dict[str, Callable[[], Any]]] = {
    "stages": ON_STAGES,
    "one": {
        "reference": reference,
        "write": write,
        "plain": write_plain,
        **{f"read-{name}": read(name) for name in READ},
    },
    "back": {
        **{f"read-{name}": read(name) for name in ("on-1.ckpt", "on-2.ckpt", "on-4.ckpt", "plain")},
        **{
            f"{why}-{file}": refused(file, **kwargs)
            for file in ("on-1.ckpt", "plain")
            for why, kwargs in (("more", {"blocks": 4}), ("fewer", {"blocks": 2}), ("wider", {"width": 8}))
        },
    },
}


if __name__ == "__main__":
    serve(GROUPS)
