"""Reading pickled data without running what it names: tensors and plain data, nothing else.

torch's own `weights_only=True` knows no subclass of dict and no container of OmegaConf, both of which Lightning keeps
hyperparameters in, and torch.distributed.checkpoint reads its metadata and its values that are no tensors without it.
So one unpickler reads them all. It gives only names that stand here, that torch lets `weights_only` have, or that the
user added by `torch.serialization.add_safe_globals`; a name anything else would have to be called to be loaded, and
that is code.
"""

from __future__ import annotations

import importlib
import pickle
import zipfile
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from enum import EnumMeta
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import torch

from autolaunch_strategies.torch_private.unpickling import names_that_torch_allows

_PLAIN = {
    "argparse": ("Namespace",),
    "builtins": (
        "bool", "bytearray", "bytes", "complex", "dict", "float", "frozenset", "int", "list", "range", "set", "slice",
        "str", "tuple",
    ),
    "collections": ("Counter", "OrderedDict", "defaultdict", "deque"),
    "datetime": ("date", "datetime", "time", "timedelta", "timezone"),
    "decimal": ("Decimal",),
    "fractions": ("Fraction",),
    "lightning.fabric.utilities.data": ("AttributeDict",),
    "lightning_fabric.utilities.data": ("AttributeDict",),
    "numpy": ("dtype", "ndarray"),
    "numpy._core.multiarray": ("_reconstruct", "scalar"),
    "numpy.core.multiarray": ("_reconstruct", "scalar"),
    "omegaconf.base": ("ContainerMetadata", "Metadata"),
    "omegaconf.dictconfig": ("DictConfig",),
    "omegaconf.listconfig": ("ListConfig",),
    "omegaconf.nodes": (
        "AnyNode", "BooleanNode", "BytesNode", "FloatNode", "IntegerNode", "InterpolationResultNode", "PathNode",
        "StringNode",
    ),
    "pathlib": ("Path", "PosixPath", "PurePath", "PurePosixPath", "PureWindowsPath", "WindowsPath"),
    "pathlib._local": ("Path", "PosixPath", "PurePath", "PurePosixPath", "PureWindowsPath", "WindowsPath"),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.distributed.checkpoint.metadata": (
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    ),
    "types": ("SimpleNamespace",),
    "typing": ("Any", "Dict", "List", "Optional", "Tuple", "Union"),
    "uuid": ("UUID",),
}  # fmt: skip
"""Module -> names that hold data and whose making runs nothing that the data could choose."""

_ALLOWED = frozenset((module, name) for module, names in _PLAIN.items() for name in names)


class NotPlainData(Exception):
    """A pickle names what is no plain data, so that loading it would run code.

    Attributes:
        name: of the object or function, with its module; of several, the first.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name

    def __str__(self) -> str:
        return f"{self.name} is no plain data"


def _member(kind: Any, name: Any) -> Any:
    """A member of an enumeration, for `getattr`, by which Python up to 3.11.3 pickles it (Debian 12 has 3.11.2)."""
    if isinstance(kind, EnumMeta) and isinstance(name, str) and name in kind.__members__:
        return kind.__members__[name]
    raise NotPlainData("builtins.getattr")


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        # torch.save writes protocol 2, in which modules have the names that they had in Python 2.
        module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
        if (module, name) == ("builtins", "getattr"):
            return _member
        if (module, name) in _ALLOWED:
            return getattr(importlib.import_module(module), name)
        allowed = names_that_torch_allows()
        if f"{module}.{name}" in allowed:
            return allowed[f"{module}.{name}"]
        raise NotPlainData(f"{module}.{name}")


def _load(file: IO[bytes], **options: Any) -> Any:
    return _PlainUnpickler(file, **options).load()


# As `torch.load` wants it: something that looks like the module pickle.
_PLAIN_PICKLE = SimpleNamespace(Unpickler=_PlainUnpickler, load=_load, __name__=__name__)


def unpickle(file: IO[bytes], trust: bool = False) -> Any:
    """What `pickle.dump` wrote to `file`.

    Args:
        trust: run what it names, if that is no plain data.

    Raises:
        NotPlainData: it is no plain data, and not trusted.
    """
    return pickle.load(file) if trust else _load(file)


def load_plain(source: Path | IO[bytes], trust: bool = False, mmap: bool = False) -> Any:
    """What `torch.save` wrote to `source`, on the CPU.

    Args:
        trust: run what it names, if that is no plain data.
        mmap: map tensors of a file instead of reading them.

    Raises:
        NotPlainData: it is no plain data, and not trusted.
    """
    if isinstance(source, Path) and _is_a_program(source):
        raise NotPlainData("a TorchScript program")
    how: dict[str, Any] = {} if trust else {"pickle_module": _PLAIN_PICKLE}
    return torch.load(source, map_location="cpu", weights_only=False, mmap=mmap, **how)


def _is_a_program(path: Path) -> bool:
    """Whether `torch.load` would take the file for TorchScript, which it runs."""
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        return any(name.rpartition("/")[2] == "constants.pkl" for name in archive.namelist())
