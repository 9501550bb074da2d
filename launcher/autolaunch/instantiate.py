"""Objects of the user's own: a dict with `_target_` in, the object out, a readable error for what cannot be built."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from autolaunch_strategies.config import ConfigError, nearest


def let_imports_see_the_working_directory() -> None:
    """Let `_target_: mymodel.Net` find ./mymodel.py; last, so that no file of the user's hides a package."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)


def build(node: Mapping[str, Any], where: str = "", without: tuple[str, ...] = (), /, **extra: Any) -> Any:
    """Call `node["_target_"]` with the other keys of `node` and with `extra`, objects in nested nodes first.

    Args:
        node: a resolved, plain dict; Hydra's `_args_`, `_partial_` and `_recursive_` keep their meaning.
        where: the key of the config at which `node` stands, for messages.
        without: keys of `node` that are ours and no arguments.
        extra: arguments that a YAML file cannot hold, such as the parameters of a model; handed over as they are.

    Raises:
        ConfigError: `_target_` cannot be imported, is refused by Hydra, or does not take these arguments.
        Exception: whatever the called code itself raises.
    """
    import hydra
    from hydra.errors import InstantiationException
    from hydra.utils import instantiate

    node = {key: value for key, value in node.items() if key not in without}
    for path, nested in targets(node, where):
        _check_call(nested, path, extra if nested is node else {})
    # Hydra 1.4 warns unless the caller says which targets it trusts: the ones that the person wrote.
    typed = [nested["_target_"] for _, nested in targets(node, where)]
    trusted = {} if hydra.__version__ < "1.4" else {"_execution_whitelist_": typed}
    try:
        # Partially, because Hydra copies what goes through it, and a copied parameter is another parameter.
        factory = instantiate({"_convert_": "all", **node, "_partial_": True}, **trusted)
    except InstantiationException as error:
        if error.__cause__ is not None:  # the code of a nested target failed: show that, as Hydra 1.4 does
            raise error.__cause__ from None
        reason = " ".join(str(error).split())
        raise ConfigError(_name(where, node["_target_"]), f"Hydra refuses it: {reason}") from None
    if node.get("_partial_"):
        return lambda *args, **kwargs: factory(*args, **extra, **kwargs)
    return factory(**extra)


def locate(target: str, where: str = "") -> Any:
    """The object at an import path such as ``my_models.Net``.

    Raises:
        ConfigError: there is no such module or name, or importing the module failed.
    """
    parts = target.split(".") if isinstance(target, str) else []
    if not all(part.isidentifier() for part in parts) or len(parts) < 2:
        raise ConfigError(_name(where, target), "not an import path", "module.Name, e.g. torch.nn.Linear")
    target_object: Any = None
    for count in range(1, len(parts) + 1):
        name = ".".join(parts[:count])
        if target_object is not None and hasattr(target_object, parts[count - 1]):
            target_object = getattr(target_object, parts[count - 1])
            continue
        try:
            target_object = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not (error.name == name or name.startswith(error.name + ".")):
                raise ConfigError(_name(where, target), f"importing {name} failed: {_of(error)}") from error
            if target_object is None:
                raise ConfigError(
                    _name(where, target),
                    f"no module named {name} can be imported",
                    "a module in the working directory, on PYTHONPATH, or installed",
                ) from None
            close = nearest(parts[count - 1], [known for known in dir(target_object) if not known.startswith("_")])
            meant = f"; did you mean {'.'.join([*parts[: count - 1], close])}?" if close else ""
            raise ConfigError(
                _name(where, target), f"{'.'.join(parts[: count - 1])} has no {parts[count - 1]}{meant}"
            ) from None
        except Exception as error:
            raise ConfigError(_name(where, target), f"importing {name} failed: {_of(error)}") from error
    return target_object


def targets(node: Any, where: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Every node with a `_target_` that will be called, outermost first, with its key."""
    if isinstance(node, Mapping):
        if "_target_" in node:
            yield where, node
            if node.get("_recursive_") is False:
                return
        for key, value in node.items():
            yield from targets(value, f"{where}.{key}" if where else str(key))
    elif isinstance(node, list | tuple):
        for index, value in enumerate(node):
            yield from targets(value, f"{where}.{index}" if where else str(index))


def _check_call(node: Mapping[str, Any], where: str, extra: Mapping[str, Any]) -> None:
    target = node["_target_"]
    function = locate(target, where)
    if not callable(function):
        raise ConfigError(
            _name(where, target), f"a {type(function).__name__} cannot be called", "a class or a function"
        )
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some builtins have no signature
        return
    named = [key for key in node if not (key.startswith("_") and key.endswith("_"))]
    by_name = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    known = [p.name for p in by_name]
    for key in [*named, *extra]:
        if key not in known and not any(p.kind is p.VAR_KEYWORD for p in parameters):
            close = nearest(key, [name for name in known if name not in extra])
            meant = f"; did you mean {close}?" if close else ""
            raise ConfigError(
                f"{where}.{key}" if where and key in named else _name(where, target),
                f"{target} takes no argument {key}{meant}",
                ", ".join(name for name in known if name not in extra) or "no arguments",
            )
    if node.get("_partial_") or node.get("_args_"):
        return
    missing = [p.name for p in by_name if p.default is p.empty and p.name not in named and p.name not in extra]
    if missing:
        raise ConfigError(
            _name(where, target),
            f"{target} also needs {', '.join(missing)}",
            write=" ".join(f"{where}.{name}=..." if where else f"{name}: ..." for name in missing),
        )


def _name(where: str, target: Any) -> str:
    return f"{where}._target_={target}" if where else f"_target_={target}"


def _of(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
