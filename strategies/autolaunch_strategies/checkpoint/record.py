"""What a checkpoint says of the run that wrote it, and what of that is another in the run that goes on from it.

A record is plain data by name. What is in `COMPARED` has to be the same in both runs; everything else may change, and
is told. What one of the two does not say is not compared. Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from autolaunch_strategies.checkpoint.files import read_manifest
from autolaunch_strategies.config import ConfigError, nearest
from autolaunch_strategies.config.values import written

COMPARED = {
    "optimizer": "the class of the optimizer",
    "seed": "the seed",
    "batch_size": "how many sequences or samples all ranks take in an optimizer step",
    "seq_len": "tokens per sequence",
    "data": "what is trained on",
    "model": "what is trained",
    "adapter": "which parameters are added to the model",
    "base": "the frozen weights, which are not in the checkpoint",
}
"""Names in a record that have to be the same, and what they are."""

_MOST_SHOWN = 3


def plain_record(record: Mapping[str, Any]) -> dict[str, Any]:
    """`record` as it is read back from a checkpoint.

    Raises:
        ConfigError: a value that is no plain data.
    """
    try:
        plain: dict[str, Any] = json.loads(json.dumps(dict(record)))
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"recorded={dict(record)}", f"is no plain data: {error}", "texts, numbers, lists, dicts"
        ) from error
    return plain


def record_of(checkpoint: Path) -> dict[str, Any]:
    """What a checkpoint says of the run that wrote it; nothing if it is of an older format or of plain Lightning."""
    record = read_manifest(checkpoint).get("run") if checkpoint.is_dir() else None
    return record if isinstance(record, dict) else {}


def check_allowed(names: Iterable[str], where: str, write: str) -> None:
    """Check that each name is one that is compared.

    Args:
        where: the key or argument that gives them, with its value.
        write: how one writes it, with `{}` for names.

    Raises:
        ConfigError: another name.
    """
    for name in names:
        if name not in COMPARED:
            close = nearest(str(name), COMPARED)
            raise ConfigError(
                where,
                f"{name} is nothing that is compared" + (f"; did you mean {close}?" if close else ""),
                ", ".join(COMPARED),
                write.format(close) if close else "",
            )


def changes(there: Mapping[str, Any], here: Mapping[str, Any]) -> dict[str, str]:
    """Name -> what it is there and here, in words, of everything that both say and that is not the same."""
    return {
        name: "; ".join(_in_words(there[name], value))
        for name, value in here.items()
        if name in there and there[name] != value
    }


def refuse_changes(
    checkpoint: Path, changed: Mapping[str, str], allowed: Collection[str], *, in_script: bool = False
) -> None:
    """Refuse to go on from a checkpoint of another run.

    Args:
        changed: what `changes` gave.
        allowed: names that may differ.
        in_script: also say how a script allows it.

    Raises:
        ConfigError: something in `COMPARED` has changed and is not allowed to.
    """
    compared = {name: changed[name] for name in COMPARED if name in changed}
    if compared.keys() - set(allowed):
        names = list(compared)
        raise ConfigError(
            f"ckpt_path={checkpoint}",
            f"was written by a run with another {in_words(compared)}",
            "what that run had, or to name what may be another",
            f"resume.allow=[{','.join(names)}]"
            + (f", in a script MeshStrategy(allow_on_resume={names})" if in_script else ""),
        )


def in_words(changed: Mapping[str, str]) -> str:
    """Names and what has changed about each."""
    return ", ".join(f"{name} ({words})" for name, words in changed.items())


def told(
    checkpoint: Path, there: Mapping[str, Any], here: Mapping[str, Any], allowed: Collection[str]
) -> Iterator[str]:
    """One line each of what people have to know who go on from `checkpoint`: what changes, and what nobody can say."""
    if unknown := [name for name in COMPARED if name in here and name not in there]:
        yield f"{checkpoint} does not say which {', '.join(unknown)} it was written with: that could not be compared"
    changed = changes(there, here)
    if accepted := {name: words for name, words in changed.items() if name in COMPARED}:
        fresh = "; the optimizer begins without state" if "optimizer" in accepted else ""
        yield f"going on with another {in_words(accepted)} than {checkpoint}, as allowed{fresh}"
    if settings := {name: words for name, words in changed.items() if name not in COMPARED}:
        yield f"going on with another {in_words(settings)} than {checkpoint}"
    if needless := [name for name in allowed if name in here and name in there and name not in changed]:
        yield f"allowed to be another, but the same as in {checkpoint}: {', '.join(needless)}"


def _in_words(there: Any, here: Any) -> list[str]:
    """What is different between two values, part by part; of many parts the first."""
    if not (isinstance(there, Mapping) and isinstance(here, Mapping)):
        return [f"{written(there)} there, {written(here)} here"]
    one, other = dict(_leaves(there)), dict(_leaves(here))
    parts = [
        f"{name} {_part(one, name)} there, {_part(other, name)} here"
        for name in dict.fromkeys((*one, *other))
        if _part(one, name) != _part(other, name)
    ]
    return [*parts[:_MOST_SHOWN], *(["..."] if len(parts) > _MOST_SHOWN else [])]


def _part(leaves: Mapping[str, Any], name: str) -> str:
    return written(leaves[name]) if name in leaves else "not said"


def _leaves(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, item in value.items():
        if isinstance(item, Mapping) and item:
            yield from _leaves(item, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", item
