"""Which modules of a model are the experts of a mixture, found by their structure."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import nn

from autolaunch_strategies.config import ConfigError
from autolaunch_strategies.tensor.weighted_experts import are_only_multiplied

_INSIDE = "base_layer"
"""What PEFT calls that around which it puts an adapter."""


@dataclass(frozen=True)
class Mixture:
    """The experts of one layer."""

    name: str
    """Of the module that holds them."""
    module: nn.Module
    experts: int
    """How many there are."""
    caller: nn.Module | None = None
    """Where they are modules of a list: the one whose forward calls them."""
    adapters: tuple[nn.Module, ...] = ()
    """What PEFT has put around the module, each for one of its parameters, the outermost first."""

    @property
    def place(self) -> str:
        """The name by which the model's own code calls it."""
        return self.name.removesuffix(f".{_INSIDE}" * len(self.adapters))

    @property
    def runs(self) -> nn.Module:
        """In which module tokens travel."""
        return self.module if self.caller is None else self.caller

    @property
    def why(self) -> str:
        """By what it was found."""
        if self.caller is not None:
            return f"{self.experts} modules of one kind in a list, and a matrix with as many rows beside it"
        return f"parameters [{self.experts}, ...] of one module called with (hidden, index, weights)"


def find_mixtures(model: nn.Module) -> list[Mixture]:
    """The mixtures of experts in `model`, in its order.

    Raises:
        ConfigError: something is a mixture, but its experts can't be called with the tokens of other ranks.
    """
    mixtures = []
    for mixture in _all(model):
        if isinstance(mixture, ConfigError):
            raise mixture
        if mixture.caller is None and are_only_multiplied(mixture.module, model) is False:
            raise refusal(
                mixture.name,
                mixture.module,
                "it does more with weights than multiply the results of experts by them, or adds something without a "
                "weight",
            )
        mixtures.append(mixture)
    return mixtures


def countable_mixtures(model: nn.Module) -> list[Mixture]:
    """Those that are one module called with (hidden, index, weights): the index says how many tokens experts get."""
    return [mixture for mixture in _all(model) if isinstance(mixture, Mixture) and mixture.caller is None]


def find_routers(model: nn.Module) -> list[nn.Module]:
    """The modules beside experts, stacked or listed, that have a row of weights for each of them."""
    routers = []
    for module in model.modules():
        children = list(module.children())
        counts = {len(child) for child in children if isinstance(child, nn.ModuleList)}
        inside = map(_without_adapters, children)
        counts |= {mixture.experts for child in inside if isinstance(mixture := _stacked("", child), Mixture)}
        routers += [child for child in children if any(_is_router(child, count) for count in counts)]
    return routers


def _all(model: nn.Module) -> Iterator[Mixture | ConfigError]:
    for name, module in model.named_modules():
        if (mixture := _stacked(name, module) or _listed(name, module) or _elsewhere(name, module)) is None:
            continue
        if name.rpartition(".")[2] == _INSIDE and isinstance(mixture, Mixture):
            mixture = _adapted(mixture, model)
        yield mixture


def _adapted(mixture: Mixture, model: nn.Module) -> Mixture | ConfigError:
    """The mixture with the adapters around it."""
    name, adapters = mixture.name, list[nn.Module]()
    while name.rpartition(".")[2] == _INSIDE:
        name = name.rpartition(".")[0]
        adapters.insert(0, model.get_submodule(name))
    if all(map(_is_adapter, adapters)):
        return replace(mixture, adapters=tuple(adapters))
    kinds = ", ".join({type(adapter).__name__ for adapter in adapters if not _is_adapter(adapter)})
    return refusal(mixture.name, mixture.module, f"an adapter is around it of which nothing is known, {kinds}")


def _is_adapter(module: nn.Module) -> bool:
    """Whether it is what PEFT puts around a module one of whose parameters LoRA changes."""
    return hasattr(module, "parameter_name") and {"lora_A", "lora_B", _INSIDE} <= module._modules.keys()


def _without_adapters(module: nn.Module) -> nn.Module:
    while _is_adapter(module):
        module = module.get_submodule(_INSIDE)
    return module


def _stacked(name: str, module: nn.Module) -> Mixture | ConfigError | None:
    """Parameters of all experts in one module, as in `transformers` from 5.0 on: `num_experts` says how many."""
    experts = module.__dict__.get("num_experts")
    if not isinstance(experts, int):
        return None
    own = dict(module.named_parameters(recurse=False))
    if not any(parameter.dim() == 3 for parameter in own.values()):
        return None
    if any(parameter.dim() == 0 or parameter.shape[0] != experts for parameter in own.values()):
        return refusal(name, module, "not all of its parameters are one of each expert")
    if sum(1 for _ in module.parameters()) > len(own):
        return refusal(name, module, "its experts share parameters of another module")
    arguments = _arguments(module)
    if len(arguments) != 3:
        called = ", ".join(arguments)
        return refusal(name, module, f"it is called with ({called}), and not with (hidden, index, weights) of tokens")
    return Mixture(name, module, experts)


def _listed(name: str, module: nn.Module) -> Mixture | ConfigError | None:
    """Modules of one kind, and beside them a matrix with as many rows, the router, are a mixture, too."""
    for key, child in module.named_children():
        if not isinstance(child, nn.ModuleList | nn.ModuleDict):
            continue
        experts = [item for item in child.children() if next(item.parameters(), None) is not None]
        others = (part for other in module.children() if other is not child for part in other.modules())
        is_one_kind = len({_kind(expert) for expert in experts}) == 1
        if is_one_kind and len(experts) > 1 and any(_is_router(other, len(experts)) for other in others):
            whose = f"{name}.{key}".lstrip(".")
            if why := _why_not_listed(module, child, experts):
                return refusal(whose, child, why)
            return Mixture(whose, child, len(experts), module)
    return None


def _why_not_listed(caller: nn.Module, child: nn.Module, experts: list[nn.Module]) -> str:
    """Why experts of a list can't be shared out; empty if they can."""
    if type(child) not in (nn.ModuleList, nn.ModuleDict):
        return "each is a module of its own, and the list is one with code of its own"
    if len(experts) < len(list(child.children())):
        return "not all in the list are experts with parameters"
    if any(next(expert.buffers(), None) is not None for expert in experts):
        return "they have buffers, which ranks would change by their own tokens"
    own = [parameter for _, parameter in child.named_parameters(remove_duplicate=False)]
    others = [part for other in caller.children() if other is not child for part in other.parameters()]
    if len({*own, *others}) < len(own) + len(set(others)):
        return "some of their parameters are shared"
    if len({parameter.dtype for parameter in own}) > 1:
        return "their parameters are of several types"
    return ""


def _elsewhere(name: str, module: nn.Module) -> ConfigError | None:
    """Called as experts are, but with no parameters of its own, as those of DBRX."""
    count = module.__dict__.get("num_experts")
    is_list = isinstance(module, nn.ModuleList | nn.ModuleDict)
    if not isinstance(count, int) or is_list or next(module.parameters(recurse=False), None) is not None:
        return None
    if _is_adapter(module) or len(_arguments(module)) != 3 or next(module.parameters(), None) is None:
        return None
    return refusal(name, module, "its parameters are not [experts, ...], but those of modules within it")


def _arguments(module: nn.Module) -> list[str]:
    return list(inspect.signature(type(module).forward).parameters)[1:]


def _kind(expert: nn.Module) -> tuple[type, tuple[tuple[str, tuple[int, ...]], ...]]:
    return type(expert), tuple((name, tuple(parameter.shape)) for name, parameter in expert.named_parameters())


def _is_router(module: nn.Module, experts: int) -> bool:
    weight = module._parameters.get("weight")
    return weight is not None and weight.dim() == 2 and weight.shape[0] == experts


def refusal(name: str, module: nn.Module, why: str) -> ConfigError:
    return ConfigError(
        f"ep with {name} ({type(module).__name__})",
        f"its experts can't be shared out over ranks: {why}",
        "ep=1, or one module with parameters [experts, ...] called with (hidden, index, weights), as in transformers",
        "ep=1",
    )
