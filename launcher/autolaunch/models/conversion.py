"""How the names, and sometimes the tensors, of a `transformers` checkpoint become those of the model class.

transformers 5 declares per class which names of the files differ from the model's, and which weights of the model are
merged from several tensors of the files or cut out of one: the experts of a mixture, for instance, are one parameter.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from autolaunch_strategies.experts.find import countable_mixtures


@dataclass(frozen=True)
class Converted:
    """A weight of the model that is computed from tensors of the files."""

    target: str
    """Its name in the model."""
    shape: tuple[int, ...]
    """Its shape in the model."""
    parts: tuple[tuple[str, str], ...]
    """(pattern of the converter that found it, name in the files) of each tensor, in the order of merging."""
    first_target: str
    """The first of the weights that come out of the same conversion."""
    converter: Any
    """transformers' `WeightConverter`."""
    config: Any
    """The config of the model, which some conversions read."""

    @property
    def is_stacked(self) -> bool:
        """Whether each row along its first dim is made of one tensor per pattern, as each expert of a mixture is."""
        from transformers.core_model_loading import Concatenate, MergeModulelist, Transpose

        first, *rest = self.converter.operations
        keeps_rows = all(
            (isinstance(step, Concatenate) and step.dim > 0)
            or (isinstance(step, Transpose) and step.dim0 > 0 and step.dim1 > 0)
            for step in rest
        )
        counts = Counter(pattern for pattern, _ in self.parts).values()
        is_merged = isinstance(first, MergeModulelist) and first.dim == 0
        return is_merged and keeps_rows and set(counts) == {self.shape[0]}

    def row(self, number: int) -> Converted:
        """One row of a stacked weight, [1, ...]."""
        by_pattern: dict[str, list[tuple[str, str]]] = {}
        for part in self.parts:
            by_pattern.setdefault(part[0], []).append(part)
        parts = tuple(of_pattern[number] for of_pattern in by_pattern.values())
        return replace(self, shape=(1, *self.shape[1:]), parts=parts)

    def compute(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The weight, from the tensors of all `parts` by their names in the files."""
        converter = copy.deepcopy(self.converter)  # it collects tensors, and serves every layer
        for pattern, name in self.parts:
            converter.add_tensor(self.first_target, name, pattern, tensors[name])
        results = converter.convert(self.first_target, config=self.config)
        if isinstance(results, tuple):  # transformers 5.0: (results, errors)
            results, _ = results
        result = results[self.target]
        return result[0] if isinstance(result, list) else result


def sources(model: Any, names: Collection[str], wanted: Mapping[str, torch.Tensor]) -> dict[str, str | Converted]:
    """Which of the tensors `names` in the files each weight of `model` starts from, as far as there is one.

    Args:
        model: any module; only those of `transformers` declare anything.
        names: of the tensors in the files.
        wanted: the weights of the model by name.
    """
    prefix = getattr(model, "base_model_prefix", "")
    renamings, converters = _declared(model)
    sources_by_target: dict[str, str | Converted] = {}
    parts: dict[str, list[tuple[str, str]]] = {}
    for name in sorted(names, key=_natural):
        renamed, pattern = _rename(name, renamings, converters)
        target = _with_or_without(prefix, renamed, wanted)
        if target not in wanted:  # files written from the model's own names
            target, pattern = _with_or_without(prefix, name, wanted), None
        if target in wanted and pattern is None:
            sources_by_target[target] = name
        elif target in wanted and pattern is not None:
            parts.setdefault(target, []).append((pattern, name))
    for first, collected in parts.items():
        converter = next(item for item in converters if collected[0][0] in item.source_patterns)
        for pattern in converter.target_patterns:
            target = first.replace(converter.target_patterns[0], pattern)
            if target in wanted:
                shape = tuple(wanted[target].shape)
                sources_by_target[target] = Converted(target, shape, tuple(collected), first, converter, model.config)
    return sources_by_target


def as_in_files(model: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights of `model` as `save_pretrained` writes them: each expert of a mixture by its own name and global number.

    Other models keep their own names, under which `transformers` loads them as well, and so do those of which some
    tensor of the files becomes several weights: these may not all be in `tensors`.
    """
    _, converters = _declared(model)
    if not (converters or countable_mixtures(model)) or any(len(item.target_patterns) > 1 for item in converters):
        return tensors
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(model, tensors)


def _declared(model: Any) -> tuple[list[Any], list[Any]]:
    if not hasattr(model, "base_model_prefix"):  # not a model of transformers
        return [], []
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming

    declared = get_model_conversion_mapping(model)
    renamings = [item for item in declared if isinstance(item, WeightRenaming)]
    return renamings, [item for item in declared if isinstance(item, WeightConverter)]


def _rename(name: str, renamings: list[Any], converters: list[Any]) -> tuple[str, str | None]:
    """(name after every renaming and at most one converter, the pattern of that converter)."""
    for renaming in renamings:
        name, _ = renaming.rename_source_key(name)
    for converter in converters:
        renamed, pattern = converter.rename_source_key(name)
        if pattern is not None:
            return renamed, pattern
    return name, None


def _with_or_without(prefix: str, name: str, wanted: Collection[str]) -> str:
    choices = (name, name.removeprefix(f"{prefix}."), f"{prefix}.{name}")
    return next((choice for choice in choices if choice in wanted), name)


def _natural(name: str) -> list[tuple[bool, int, str]]:
    # Expert 10 comes after expert 9: the order of names is the order in which parts are merged.
    return [(not part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in name.split(".")]
