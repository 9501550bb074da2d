"""The embedding of tokens and the layer of their logits: large, outside of the blocks, and used at one end of a step.

Sharded with the rest of a model, both would be gathered before its first layer and stay until its last.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import dataclass
from typing import Any

from torch import nn

from autolaunch_strategies.model.blocks import Blocks


@dataclass(frozen=True)
class Ends:
    """Modules of a model, by name, that are sharded by themselves beside its blocks."""

    embeddings: dict[str, nn.Embedding]
    heads: dict[str, nn.Linear]


def find_ends(root: nn.Module, blocks: Blocks) -> Ends:
    """The embeddings of tokens and the heads of `root` that share no parameter with another module.

    An embedding of tokens is what a model of `transformers` calls its own, or one for whose table there is a linear
    layer with as many outputs: that is its head. Others may be called on some ranks only, as the data have it: they
    have to stay with the rest, which is gathered on all.
    """
    in_blocks = {module for block in blocks for module in block.module.modules()}
    outside = {name: module for name, module in root.named_modules() if module not in in_blocks}
    told = {id(item) for module in outside.values() for item in _of_transformers(module)}
    owners = Counter(id(parameter) for module in root.modules() for parameter in set(module.parameters(recurse=False)))
    apart = {
        name: module
        for name, module in outside.items()
        if (own := list(module.parameters(recurse=False))) and all(owners[id(parameter)] == 1 for parameter in own)
    }
    tables = {name: module for name, module in apart.items() if type(module) is nn.Embedding}
    layers = {name: module for name, module in apart.items() if type(module) is nn.Linear}
    outputs = {layer.out_features for layer in layers.values()}
    embeddings = {name: table for name, table in tables.items() if id(table) in told or table.num_embeddings in outputs}
    tokens = {table.num_embeddings for table in embeddings.values()}
    heads = {name: layer for name, layer in layers.items() if layer.out_features in tokens}
    return Ends(embeddings, heads)


def _of_transformers(module: Any) -> list[nn.Module]:
    with contextlib.suppress(NotImplementedError, AttributeError):
        return [module.get_input_embeddings()]
    return []
