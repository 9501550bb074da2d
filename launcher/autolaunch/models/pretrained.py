"""Weights in safetensors files, read a piece at a time: whole models never sit in memory."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from autolaunch.models.conversion import Converted, sources
from autolaunch.models.hf_config import WEIGHT_FILES
from autolaunch_strategies.config import ConfigError

Source = str | Converted
"""A name in the files, or a weight that is computed from several of them."""

_SHOWN = 5  # names in a message

_COMPUTED = re.compile(r"(^|\.)(rotary_emb\.inv_freq|position_ids)$")
"""What files of older releases of `transformers` hold, and models compute."""


class SafetensorsWeights:
    """The tensors of a directory with ``model.safetensors``, or with ``model.safetensors.index.json`` and its shards.

    Args:
        directory: where the files are.

    Raises:
        ConfigError: neither file is there, the index cannot be read, or a shard is absent or corrupt.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory).expanduser()
        self._where = f"model.path={directory}"
        self._open_files: dict[Path, Any] = {}
        index, single = (self.directory / name for name in WEIGHT_FILES)
        if index.is_file():
            self._files = self._read_index(index)
        elif single.is_file():
            self._files = dict.fromkeys(self._open(single).keys(), single)
        else:
            raise ConfigError(self._where, "there are no weights in it", " or ".join(reversed(WEIGHT_FILES)))

    def names(self) -> set[str]:
        """The names of all tensors, as the files have them."""
        return set(self._files)

    def shape(self, source: Source) -> tuple[int, ...]:
        """Shape of one tensor, read from the header of its file.

        Raises:
            ConfigError: its file is corrupt or does not hold it.
        """
        return source.shape if isinstance(source, Converted) else tuple(self._slice(source).get_shape())

    def read(self, source: Source, index: tuple[slice, ...] | None = None) -> torch.Tensor:
        """One tensor on the CPU in the type of the file, or its part at `index` (one slice per leading dim, step 1).

        Only the pages of the file that hold this part are read. Of a converted weight that is stacked, as experts are,
        one row at a time is computed, and only those of the part; any other in full. The result may share memory with
        the file: copy it.

        Args:
            source: a name, or what `matching` returned.

        Raises:
            ConfigError: its file is corrupt or does not hold it, or the parts of a converted weight do not fit.
        """
        if isinstance(source, Converted):
            if source.is_stacked:
                return self._stack(source, index or ())
            whole = self._convert(source)
            return whole if index is None else whole[index].clone()
        if index is None or not self.shape(source):
            return self._open(self._files[source]).get_tensor(source)
        return self._slice(source)[index]

    def matching(
        self, model: nn.Module, wanted: Mapping[str, torch.Tensor] | None = None, new_head: bool = False
    ) -> dict[str, Source]:
        """What each parameter and persistent buffer of `model` starts from; every value can be given to `read`.

        Names are compared as `transformers` does: after the renamings and conversions that the class declares, and with
        or without `base_model_prefix`, so that a base model's files serve a model with a head and the reverse. A tied
        weight that the files hold once serves all its names.

        Args:
            model: a model on any device, `meta` included.
            wanted: its weights by name, where something has been put into it since; else those of its state.
            new_head: what stands outside of the base model (and its pooler) may be absent.

        Returns:
            name of a weight -> name in the files, or the conversion that makes it.
            What the class declares as dispensable may be absent.

        Raises:
            ConfigError: the files lack a weight, or hold it in another shape.
        """
        wanted = model.state_dict(keep_vars=True) if wanted is None else wanted
        matches = sources(model, self._files, wanted)
        self._share_tied(wanted, matches)
        optional = getattr(model, "_keys_to_ignore_on_load_missing", None) or ()
        missing = [name for name in wanted if name not in matches and not any(re.search(p, name) for p in optional)]
        if new_head and (prefix := getattr(model, "base_model_prefix", "")):
            base = f"{prefix}."
            missing = [name for name in missing if name.startswith(base) and f"{base}pooler." not in name]
        self._refuse(missing, f"{{}} of the {len(wanted)} weights of {type(model).__name__} are not in its files")
        self._refuse(
            [
                f"{name} {list(self.shape(source))} instead of {list(wanted[name].shape)}"
                for name, source in matches.items()
                if self.shape(source) != tuple(wanted[name].shape)
            ],
            f"{{}} of the weights of {type(model).__name__} have another shape in its files",
        )
        return {name: matches[name] for name in wanted if name in matches}

    def unread(self, model: nn.Module, sources: Mapping[str, Source]) -> list[str]:
        """The names in the files that none of these sources reads, except for what the class declares as left over.

        Args:
            sources: what `matching` returned for this model.
        """
        parts = [(item,) if isinstance(item, str) else (name for _, name in item.parts) for item in sources.values()]
        left = self.names().difference(*parts)
        ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
        return sorted(
            name for name in left if not _COMPUTED.search(name) and not any(re.search(it, name) for it in ignored)
        )

    def _stack(self, source: Converted, index: tuple[slice, ...]) -> torch.Tensor:
        first, end, _ = (index[0] if index else slice(None)).indices(source.shape[0])
        rows = range(first, max(first, end))
        # The first row that is not wanted, where none is, says shape and type.
        row = self._convert(source.row(min(first, source.shape[0] - 1)))[(slice(None), *index[1:])]
        stacked = row.new_empty((len(rows), *row.shape[1:]))
        for place, number in enumerate(rows):
            if place:
                row = self._convert(source.row(number))[(slice(None), *index[1:])]
            stacked[place] = row[0]
        return stacked

    def _convert(self, source: Converted) -> torch.Tensor:
        tensors = {name: self.read(name) for _, name in source.parts}
        try:
            whole = source.compute(tensors)
        except (RuntimeError, ValueError, KeyError) as error:
            raise ConfigError(self._where, f"{source.target} cannot be made of its parts: {error}") from error
        if tuple(whole.shape) != source.shape:
            made_of = f"{source.target}, made of {len(tensors)} tensors,"
            raise ConfigError(self._where, f"{made_of} is {list(whole.shape)} instead of {list(source.shape)}")
        return whole

    @staticmethod
    def _share_tied(wanted: Mapping[str, Any], matches: dict[str, Source]) -> None:
        by_tensor = {id(wanted[name]): source for name, source in matches.items()}
        for name, tensor in wanted.items():
            if name not in matches and id(tensor) in by_tensor:
                matches[name] = by_tensor[id(tensor)]

    def _refuse(self, names: list[str], problem: str) -> None:
        if names:
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            raise ConfigError(self._where, f"{problem.format(len(names))}: {', '.join(names[:_SHOWN])}{more}")

    def _read_index(self, index: Path) -> dict[str, Path]:
        try:
            files = {
                name: self.directory / file for name, file in json.loads(index.read_text("utf-8"))["weight_map"].items()
            }
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                self._where, f"{index.name} is not an index of safetensors: {type(error).__name__}: {error}"
            ) from error
        absent = sorted({file.name for file in files.values() if not file.is_file()})
        if absent:
            more = f" and {len(absent) - _SHOWN} more" if len(absent) > _SHOWN else ""
            raise ConfigError(
                self._where, f"{index.name} names files that are not there: {', '.join(absent[:_SHOWN])}{more}"
            )
        return files

    def _open(self, file: Path) -> Any:
        if file not in self._open_files:
            try:
                self._open_files[file] = safe_open(str(file), framework="pt")
            except (SafetensorError, OSError) as error:
                raise ConfigError(self._where, f"{file.name} is corrupt or cut short: {error}") from error
        return self._open_files[file]

    def _slice(self, name: str) -> Any:
        file = self._files[name]
        try:
            return self._open(file).get_slice(name)
        except SafetensorError as error:
            raise ConfigError(self._where, f"{file.name} does not hold {name}, although the index says so") from error
