"""autolaunch: train a single-device PyTorch model on many devices, from YAML."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autolaunch.lazy_transformers import import_transformers_when_used
from autolaunch.registration import register_strategy

if TYPE_CHECKING:
    from autolaunch_strategies import MeshStrategy

__version__ = "0.1.0"
__all__ = ["MeshStrategy", "__version__"]

register_strategy()
import_transformers_when_used()


def __getattr__(name: str) -> Any:
    # Lazily: the command must start without importing torch or lightning.
    if name == "MeshStrategy":
        from autolaunch_strategies import MeshStrategy

        return MeshStrategy
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
