"""Optimizers in checkpoints: state and groups by parameter name, whatever part of the model a rank holds."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._pytree import tree_map

from autolaunch_strategies.torch_private.checkpoints import set_element

GroupNames = list[list[str]]
"""Names of the parameters in each group of one optimizer."""


def names_in_groups(optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str]) -> GroupNames:
    """The names of the parameters in each group of `optimizer`, in its order."""
    return [[names[parameter] for parameter in group["params"]] for group in optimizer.param_groups]


def optimizer_tensors(optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str]) -> dict[str, Any]:
    """The optimizer's state by parameter name: `state.<parameter>.<key>`."""
    return {
        f"state.{name}.{key}": value
        for name, parameter in _named(optimizer, names)
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def options(group: Mapping[str, Any]) -> dict[str, Any]:
    """What a parameter group says about its parameters, whichever they are."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def whole_groups(
    optimizer: torch.optim.Optimizer,
    names: Mapping[nn.Parameter, str],
    order: GroupNames | None = None,
    pipeline: dist.ProcessGroup | None = None,
) -> list[dict[str, Any]]:
    """`names` and `options` of each group of the whole optimizer, the same on every rank. Collective over `pipeline`.

    Args:
        names: of the parameters that this rank holds.
        order: the groups as they were made, if known; what joined later stands behind.
        pipeline: the ranks that hold the other stages of the model, if it is cut; the last stage comes first.
    """
    mine = [
        {"names": group_names, "options": options(group)}
        for group_names, group in zip(names_in_groups(optimizer, names), optimizer.param_groups, strict=True)
    ]
    if pipeline is None:
        return mine
    stages: list[Any] = [None] * pipeline.size()
    dist.all_gather_object(stages, mine, group=pipeline)
    parts: dict[int, list[dict[str, Any]]] = {}
    for stage in stages:
        for number, group in zip(_numbers([group["names"] for group in stage], order), stage, strict=True):
            parts.setdefault(number, []).append(group)
    place = {name: place for place, name in enumerate(name for group in order or () for name in group)}
    whole = []
    for _, groups in sorted(parts.items()):
        merged = dict.fromkeys(name for group in reversed(groups) for name in group["names"])
        # Where a stage has no such group, one without parameters may stand in its place: not that one's options.
        first = next((group for group in groups if group["names"]), groups[0])
        whole.append(
            {"names": sorted(merged, key=lambda name: place.get(name, len(place))), "options": first["options"]}
        )
    return whole


def _numbers(groups: GroupNames, order: GroupNames | None) -> list[int]:
    """Which group of the whole optimizer each of one stage's `groups` is: by its parameters, else by its place."""
    number_of = {name: number for number, group in enumerate(order or ()) for name in group}
    return [next((number_of[name] for name in group if name in number_of), place) for place, group in enumerate(groups)]


def add_saved_groups(
    optimizer: torch.optim.Optimizer,
    names: Mapping[nn.Parameter, str],
    saved: Iterable[Mapping[str, Any]],
    trained: Collection[str],
) -> None:
    """Add the groups that were added while the saved run trained (`BaseFinetuning`): nothing of theirs is trained yet.

    Args:
        names: of the parameters that this rank holds; a group is added on every stage.
        saved: `names` and `options` of the groups in the checkpoint.
        trained: names in the groups of all optimizers, on every stage.
    """
    parameters = {name: parameter for parameter, name in names.items()}
    for group in saved:
        if group["names"] and not any(name in trained for name in group["names"]):
            mine = [name for name in group["names"] if name in parameters]
            added = {"params": [parameters[name] for name in mine], **group["options"]}
            if any("param_names" in known for known in optimizer.param_groups):  # then torch wants them of all
                added["param_names"] = mine
            optimizer.add_param_group(added)


def room_for_optimizer(
    optimizer: torch.optim.Optimizer,
    names: Mapping[nn.Parameter, str],
    prefix: str,
    stored: Mapping[str, Any],
    paths: Mapping[str, Sequence[str | int]],
) -> dict[str, Any]:
    """Room for everything that the checkpoint holds for this optimizer's parameters, sharded as they are.

    Args:
        prefix: what names of this optimizer begin with.
        stored: what is known of each value of the checkpoint, by name.
        paths: name -> the keys and places that it was made of: values of lists and dicts are stored one by one.
    """
    parameters = dict(_named(optimizer, names))
    room: dict[str, Any] = {}
    for full_name, metadata in stored.items():
        if not full_name.startswith(f"{prefix}state."):
            continue
        path = tuple(paths.get(full_name, ("", full_name.removeprefix(prefix))))[1:]
        parameter, _ = _of_parameter(str(path[0]), parameters)
        if parameter is None:
            continue
        value: Any = None
        if isinstance(metadata, TensorStorageMetadata):
            if metadata.size == parameter.shape and parameter.dim() > 0:
                value = torch.zeros_like(parameter, dtype=metadata.properties.dtype, requires_grad=False)
            else:
                value = torch.zeros(metadata.size, dtype=metadata.properties.dtype)
        set_element(room, path, value)
    return room


def _of_parameter(entry: str, parameters: Mapping[str, nn.Parameter]) -> tuple[nn.Parameter | None, str]:
    """(parameter, key) of an entry `state.<parameter>.<key>`; None where the parameter is no one's here."""
    name = entry = entry.removeprefix("state.")
    while (cut := name.rfind(".")) > 0:
        name = name[:cut]
        if name in parameters:
            return parameters[name], entry[cut + 1 :]
    return None, entry


def moved_between(saved: Sequence[Iterable[Mapping[str, Any]]], wanted: Sequence[Iterable[str]]) -> str | None:
    """What the state of a parameter is lost by, in words: another optimizer trains it than did.

    Args:
        saved: of every optimizer of the checkpoint its groups, with `names`.
        wanted: of every optimizer here the names of its parameters, on all stages.
    """
    names_of = [{name for group in groups for name in group["names"]} for groups in saved]
    for number, names in enumerate(wanted):
        for name in sorted(names):
            before = [other for other, known in enumerate(names_of) if name in known]
            if before and number not in before:
                return f"optimizer {before[0]} trained {name} there, and optimizer {number} does here"
    return None


def lost_in_checkpoints(optimizer: torch.optim.Optimizer) -> str | None:
    """What of an optimizer's state no checkpoint brings back as it is, in words."""
    parameters = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    for key, state in optimizer.state.items():
        if key not in parameters:
            return f"keeps state under {key!r}, which is none of its parameters, and which is not saved"
        for name, value in state.items() if isinstance(state, Mapping) else ():
            if isinstance(value, Mapping) and not all(isinstance(inner, str) for inner in value):
                return f"keeps a dict {name!r} with keys that are no texts, which are texts once it is loaded"
    return None


def fill_optimizer(
    optimizer: torch.optim.Optimizer,
    names: Mapping[nn.Parameter, str],
    values: Mapping[str, Any],
    groups: Iterable[Mapping[str, Any]],
    whole: GroupNames,
) -> None:
    """Give `optimizer` its loaded state and the options of its groups.

    Args:
        values: the state of the parameters on this rank, as `optimizer_tensors` names it.
        groups: `names` and `options` of the groups that were saved.
        whole: names in the groups of the whole optimizer: a group that is empty here has options, too.
    """
    parameters = dict(_named(optimizer, names))
    optimizer.state.clear()
    for full_name, value in values.items():
        parameter, key = _of_parameter(full_name, parameters)
        assert parameter is not None, full_name
        optimizer.state[parameter][key] = tree_map(partial(_where_it_is, parameter), value)
    options_of = {name: group["options"] for group in groups for name in group["names"]}
    mine = names_in_groups(optimizer, names)
    for group, number in zip(optimizer.param_groups, _numbers(mine, whole), strict=True):
        candidates = whole[number] if number < len(whole) else ()
        saved = next((options_of[name] for name in candidates if name in options_of), None)
        if saved is not None:
            group.update(saved)
    for trained, state in optimizer.state.items():
        step = state.get("step")
        group = next(group for group in optimizer.param_groups if any(item is trained for item in group["params"]))
        if isinstance(step, torch.Tensor) and (group.get("capturable") or group.get("fused")):
            state["step"] = step.to(trained.device)


def _where_it_is(parameter: nn.Parameter, value: Any) -> Any:
    """A value of a parameter's state on the device of that."""
    if not isinstance(value, torch.Tensor) or value.dim() == 0 or isinstance(value, DTensor):
        return value
    value = value.to(parameter.device)
    if isinstance(parameter, DTensor):  # smaller than its parameter, e.g. a factored moment
        mesh = parameter.device_mesh
        return DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return value


def _named(optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str]) -> Iterable[tuple[str, nn.Parameter]]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield names[parameter], parameter
