"""Losses of sharded tensors: what each rank finds of its own part, and how it becomes the loss of the whole."""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import DTensor, Shard

from autolaunch_strategies.tensor.replicas import Replicator, plain
from autolaunch_strategies.tensor.vocabulary_loss import vocabulary_cross_entropy


def cross_entropy(replicate: Replicator, func: Any, args: Any, kwargs: Any) -> Any:
    names = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
    arguments = dict(zip(names, args, strict=False)) | kwargs
    logits, target = arguments["input"], plain(arguments["target"])
    simple = (
        arguments.get("weight") is None
        and arguments.get("size_average") is None
        and arguments.get("reduce") is None
        and not target.is_floating_point()
        and arguments.get("reduction", "mean") in ("none", "mean", "sum")
        and logits.shape == (target.shape[:1] + logits.shape[1:2] + target.shape[1:])
    )
    if isinstance(logits, DTensor) and simple and logits.placements[0] == Shard(1):
        losses = vocabulary_cross_entropy(
            logits.to_local().movedim(1, -1).flatten(0, -2),
            target.flatten(),
            replicate.mesh.get_group(),
            logits.shape[1],
            ignore_index=arguments.get("ignore_index", -100),
            reduction=arguments.get("reduction", "mean"),
            label_smoothing=arguments.get("label_smoothing", 0.0),
        )
        return losses.view_as(target) if losses.dim() else losses
    arguments |= {"input": plain(logits), "target": target, "weight": plain(arguments.get("weight"))}
    return func(**arguments)
