"""Context parallelism where a plan says so: which layers get sharded sequences, and which call attention on them.

Paddle's names. These styles only mark modules, for what runs the model; they need no axis mp.
"""

from __future__ import annotations

from torch import nn

from autolaunch_strategies.config import ConfigError, check_shards_as, cp_backend
from autolaunch_strategies.tensor.styles.base import Region, Style


class _Mark(Style):
    def __init__(self, backend: str | None = None) -> None:
        self.backend = None if backend is None else cp_backend(backend, f"{type(self).__name__}: backend")

    def _chosen(self, region: Region, name: str, only: str | None) -> str | None:
        """The backend for a module; None where cp has one rank."""
        style = type(self).__name__
        if only is not None:
            raise ConfigError(
                f"cp.plan: {name}.{only}: {style}", "it is a parameter", "a layer", f"{name}: {style}" if name else ""
            )
        axis = region.context_backend
        if axis is None:
            return None
        backend = axis if self.backend is None else self.backend
        check_shards_as(backend, axis, f"cp.plan: {name}: {style}")
        return backend


class PrepareContextParallel(_Mark):
    """Within this layer each rank along cp holds some of the positions of every sequence; outside they are whole.

    Args:
        backend: gather, ring (or p2p), ulysses (or all2all), usp: what attention in it does, unless that layer has a
            `ContextParallel`. None: what the axis does, which is cp.backend; with `parallelize` p2p, as in Paddle.

    Raises:
        ConfigError: no backend is called so; when it is applied: the axis shards sequences in another way.
    """

    def apply(self, region: Region, name: str, module: nn.Module, only: str | None) -> None:
        if (backend := self._chosen(region, name, only)) is not None:
            region.context_regions[name] = backend


class ContextParallel(_Mark):
    """Attention that this layer calls is over whole sequences, though a rank holds some of their positions only.

    Args:
        backend: as of `PrepareContextParallel`.

    Raises:
        ConfigError: as `PrepareContextParallel`.
    """

    def apply(self, region: Region, name: str, module: nn.Module, only: str | None) -> None:
        if (backend := self._chosen(region, name, only)) is not None:
            region.context_attention[name] = backend
