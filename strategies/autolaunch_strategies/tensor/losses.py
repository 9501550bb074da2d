"""Losses of sharded tensors: what each rank finds of its own part, and how it becomes the loss of the whole."""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from autolaunch_strategies.tensor.replicas import Replicator, combined, on_whole_tensors, plain
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


POINTWISE_LOSSES = (
    *(F.binary_cross_entropy, F.binary_cross_entropy_with_logits, F.gaussian_nll_loss, F.hinge_embedding_loss),
    *(F.huber_loss, F.margin_ranking_loss, F.mse_loss, F.poisson_nll_loss, F.smooth_l1_loss, F.soft_margin_loss),
)
"""Losses of single elements. torch's rules take the mean of a part for a part of the mean, without the parts' sizes."""

OF_WHOLE_SAMPLES = (
    *(F.cosine_embedding_loss, F.multi_margin_loss, F.multilabel_margin_loss, F.multilabel_soft_margin_loss),
    *(F.triplet_margin_loss, F.triplet_margin_with_distance_loss, F.ctc_loss),
)
"""Losses in which elements meet that may be on several ranks."""


def pointwise_loss(replicate: Replicator, func: Any, args: Any, kwargs: Any) -> Any:
    """A loss of single elements: each rank finds those of its part, and then they are added up or averaged."""
    arguments = dict(zip(signature(func).parameters, args, strict=False)) | kwargs
    reduction = arguments.get("reduction", "mean")
    old = arguments.get("size_average") is not None or arguments.get("reduce") is not None
    by_weight = func in (F.mse_loss, F.huber_loss) and arguments.get("weight") is not None
    if old or by_weight or reduction not in ("mean", "sum"):
        return on_whole_tensors(replicate, func, args, kwargs) if old or by_weight else NotImplemented
    of_elements = tree_map(lambda leaf: replicate(leaf) if isinstance(leaf, torch.Tensor) else leaf, arguments)
    try:
        losses = func(**of_elements | {"reduction": "none"})
    except (NotImplementedError, RuntimeError):  # no rule of torch
        return func(**tree_map(plain, arguments))
    return combined(losses.mean() if reduction == "mean" else losses.sum())
