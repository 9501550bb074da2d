"""Whether the parts of a model that a job names are there, known before any process starts. Torch-free, mostly."""

from __future__ import annotations

import contextlib
import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from autolaunch.models import build_adapted_model
from autolaunch.models.adapter_config import ALL_LINEAR, adapter_settings, ending_with
from autolaunch.models.hf_config import WEIGHT_FILES
from autolaunch_strategies.config import ConfigError
from autolaunch_strategies.plan.patterns import compile_pattern, with_parents


def check_named_parts(config: Mapping[str, Any]) -> None:
    """Check the names in `adapter` and `model.trainable` of a resolved job.

    Names that the files of the model have, too, are taken for right. Only for others the model is built, without
    memory, which takes seconds. A model of the user's own is left to the run: building it may do anything.

    Raises:
        ConfigError: a name that is that of nothing, with the one that was meant; or the model can't be built.
    """
    if config["module"] is not None or "_target_" in config["model"]:
        return
    stored = [part for name in _stored(config["model"]) for part in with_parents(name)]
    with contextlib.suppress(ConfigError, re.error):  # no pattern: told where the model is built
        if all(_matches(given, stored) for given in _given(config)):
            return
    from autolaunch_strategies.model.construction import Construction

    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)  # what transformers has to say about a config, it says again in the run
    try:
        with Construction(config["seed"]).recording():
            build_adapted_model(config)
    finally:
        logging.disable(disabled)


def _given(config: Mapping[str, Any]) -> Iterator[re.Pattern[str] | str]:
    """Patterns over whole names, and ends of names."""
    yield from map(compile_pattern, config["model"]["trainable"] or ())
    if config["adapter"] is None:
        return
    settings = adapter_settings(config["adapter"])
    for given in (settings.target_modules, settings.exclude, settings.modules_to_save, settings.target_parameters):
        if isinstance(given, str):
            if given != ALL_LINEAR:
                yield re.compile(given)
        else:
            yield from given


def _matches(given: re.Pattern[str] | str, names: Sequence[str]) -> bool:
    return bool(ending_with([given], names)) if isinstance(given, str) else any(map(given.fullmatch, names))


def _stored(model: Mapping[str, Any]) -> list[str]:
    """The names of the weights in the files of a pretrained model; none if there are none."""
    if model["name"] != "hf" or model["path"] is None:
        return []
    index, single = (Path(model["path"]).expanduser() / name for name in WEIGHT_FILES)
    try:
        if index.is_file():
            return list(json.loads(index.read_text("utf-8"))["weight_map"])
        with single.open("rb") as opened:
            return list(json.loads(opened.read(int.from_bytes(opened.read(8), "little"))))
    except (OSError, ValueError, KeyError, TypeError):
        return []  # what is wrong with them is told where they are read
