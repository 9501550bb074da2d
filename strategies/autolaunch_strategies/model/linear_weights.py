"""Which parameters autocast casts before they are used: weights that linear layers alone hold."""

from __future__ import annotations

import sys

from torch import nn


class CastsWeight(nn.Linear):
    """A linear layer that multiplies in its own way, and under autocast by its weight in the type of autocast."""


def linear_weights(root: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters of `root` that linear layers alone hold: what autocast casts before it is used.

    Not the weight that an embedding shares with the head: autocast looks up fp32. Nor those of subclasses, which may
    use them otherwise (`CastsWeight` do not), nor below DoRA, which takes their norms in fp32.
    """
    dora = any(".lora_magnitude_vector." in name for name, _ in root.named_parameters())
    linear: set[nn.Parameter] = set()
    others: set[nn.Parameter] = set()
    for name, module in root.named_modules():
        kind = _class_before_sharding(module)
        casts = kind is nn.Linear or issubclass(kind, CastsWeight)
        holders = linear if casts and not (dora and name.endswith(".base_layer")) else others
        holders.update(module.parameters(recurse=False))
    return {name: parameter for name, parameter in root.named_parameters() if parameter in linear - others}


def _class_before_sharding(module: nn.Module) -> type[nn.Module]:
    """The class of a module before `fully_shard` gave it one of its own; unless that is imported it did not."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    is_sharded = fsdp is not None and isinstance(module, fsdp.FSDPModule)
    return type(module).__mro__[2] if is_sharded else type(module)
