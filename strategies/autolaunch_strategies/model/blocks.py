"""Find the repeated blocks of a model by its structure: the units of sharding, recomputation and compilation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class Block:
    """One repeated block: its dotted name in the model and the module itself."""

    name: str
    module: nn.Module


@dataclass(frozen=True)
class Blocks:
    """The blocks in definition order, and in `reasons` why they are what they are (for plan.yaml)."""

    members: list[Block]
    reasons: dict[str, str]

    def __iter__(self) -> Iterator[Block]:
        return iter(self.members)

    def __len__(self) -> int:
        return len(self.members)


def find_blocks(root: nn.Module) -> Blocks:
    """The outermost repeated sub-modules of `root`.

    A container (ModuleList, Sequential, ModuleDict) in which at least two children are of one class and have parts of
    their own holds blocks; all its children with parameters and parts are blocks. A ModuleList or ModuleDict is never
    a block, since nothing calls it: its children stand in its place. Blocks do not nest. Blocks that share a parameter
    with another module are left out, since their parameters can't be sharded by themselves.
    """
    members: list[Block] = []
    reasons: dict[str, str] = {}
    visited: set[nn.Module] = set()
    owners = Counter(id(parameter) for module in root.modules() for parameter in set(module.parameters(recurse=False)))

    def visit(module: nn.Module, name: str) -> None:
        if module in visited:  # it has two names, as in `self.backbone = self.model.body`
            return
        visited.add(module)
        children = {key: child for key, child in module.named_children() if _is_compound(child)}
        if isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict):
            children = {key: child for key, child in _called_children(module) if _is_compound(child)}
            kinds = Counter(type(child) for child in children.values())
            repeated = [kind for kind, count in kinds.items() if count > 1]
            if repeated:
                taken = 0
                for key, child in children.items():
                    child_name = f"{name}.{key}" if name else key
                    if any(owners[id(parameter)] > 1 for parameter in child.parameters()):
                        reasons[child_name] = "not a block of its own: it shares a parameter with another module"
                        continue
                    members.append(Block(child_name, child))
                    taken += 1
                names = ", ".join(sorted(kind.__name__ for kind in repeated))
                reasons[name or "(the model)"] = f"{taken} blocks: a {type(module).__name__} of repeated {names}"
                return
        for key, child in children.items():
            visit(child, f"{name}.{key}" if name else key)

    visit(root, "")
    return Blocks(members, reasons)


def _called_children(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The children of a container, by their dotted name in it; for lists among them, their children."""
    for key, child in module.named_children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict) and type(child).forward is nn.Module.forward:
            yield from ((f"{key}.{name}", inner) for name, inner in _called_children(child))
        else:
            yield key, child


def _is_compound(module: nn.Module) -> bool:
    """Whether a module has parts of its own and something in them that is worth sharding: more than a norm's vector."""
    has_parts = next(module.children(), None) is not None
    return has_parts and any(parameter.dim() > 1 for parameter in module.parameters())
