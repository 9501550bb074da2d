"""``model.path=OWNER/NAME``: a model of the Hugging Face hub, by its files in the hub's cache on this machine.

Everything behind this module sees a directory: the snapshot of one commit. The library `huggingface_hub` downloads, and
its variables hold: HF_HOME (where the cache is), HF_ENDPOINT (a mirror), HF_HUB_OFFLINE, HF_TOKEN. Torch-free.
"""

from __future__ import annotations

import errno
import importlib.util
import json
import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from autolaunch.config.schema import IN_ONE_PROCESS
from autolaunch.data.documents import expanded
from autolaunch.data.tokenizers import TOKENIZER_FILES
from autolaunch.models.hf_config import INDEX_FILE, SINGLE_FILE, WEIGHT_FILES, directory_meant, name_and_commit
from autolaunch_strategies.config import ConfigError

_SMALL_FILES = ("config.json", "generation_config.json", INDEX_FILE, *TOKENIZER_FILES)
_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)


def with_hub_directory(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with `model.path` set to the directory of the model that it names, where it names one of the hub.

    Of what is not in the cache, the small files are downloaded; the rest is up to `fetch_weights`.

    Raises:
        ConfigError: there is no such model or revision, no access, no network and nothing in the cache; or a revision
            where nothing comes from the hub.
    """
    model = config["model"]
    if not _is_of_transformers(config):
        return dict(config)
    path, revision = model["path"], model["revision"]
    if path is not None and _NAME.fullmatch(path) and not expanded(path).exists():
        directory = _small_files(path, revision)
        return {**config, "model": {**model, "path": str(directory), "revision": None}}
    if revision is not None:
        raise ConfigError(
            f"model.revision={revision}",
            "has no effect: " + ("there is no model.path" if path is None else f"{path} is a directory"),
            "the name of a model of the hub in model.path",
            "model.revision=null",
        )
    return dict(config)


def fetch_weights(config: Mapping[str, Any]) -> None:
    """Download the weights of `model.path` if it is a directory of the hub's cache in which they are absent.

    One process of a machine downloads; others that come here at the same time wait for it.

    Args:
        config: of a resolved job; for a task that reads no weights, nothing is done.

    Raises:
        ConfigError: they can't be had: no safetensors, no access, no network, no space.
    """
    model = config["model"]
    if config["task"] in IN_ONE_PROCESS or not _is_of_transformers(config):
        return
    if model["path"] is None or not model["pretrained"]:
        return
    directory = expanded(model["path"])
    from_hub = name_and_commit(directory)
    if from_hub is None:
        return
    name, commit = from_hub
    if not (directory / "config.json").is_file():  # another machine than the one on which the name was looked up
        here = _small_files(name, commit)
        if here != directory:
            raise ConfigError(
                f"model.path={name}",
                f"the cache of the hub on this machine, {here}, is elsewhere than on the first, {directory}",
                "one HF_HOME on all machines",
            )
    files = _weight_files(directory)
    if all((directory / file).is_file() for file in files):
        return
    print(f"model.path={name}: downloading weights in {_count(len(files))} to {directory}", file=sys.stderr)
    _download(name, commit, files)
    absent = [file for file in files if not (directory / file).is_file()]
    if absent:
        raise ConfigError(
            f"model.path={name}",
            f"there are no weights in safetensors: no {absent[0]}",
            " or ".join(reversed(WEIGHT_FILES)),
            "model.pretrained=false for random weights",
        )


def _is_of_transformers(config: Mapping[str, Any]) -> bool:
    return config["module"] is None and config["model"].get("name") == "hf" and "_target_" not in config["model"]


def _weight_files(directory: Path) -> list[str]:
    if not (directory / INDEX_FILE).is_file():
        return [SINGLE_FILE]
    try:
        return sorted(set(json.loads((directory / INDEX_FILE).read_text("utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"model.path={directory}", f"{INDEX_FILE} is not an index of safetensors: {type(error).__name__}: {error}"
        ) from error


@cache  # a job is resolved several times, and a sweep has many
def _small_files(name: str, revision: str | None) -> Path:
    directory = _download(name, revision, _SMALL_FILES)
    if not (directory / "config.json").is_file():
        raise ConfigError(
            f"model.path={name}", "there is no config.json in it", "a model of the hub that transformers can load"
        )
    return directory


def _download(name: str, revision: str | None, files: list[str] | tuple[str, ...]) -> Path:
    """The directory of a snapshot with those of `files` that the model has."""
    if importlib.util.find_spec("huggingface_hub") is None:
        raise ConfigError(
            f"model.path={name}",
            "there is no such directory, and a model of the hub needs `huggingface_hub`, which is not installed",
            write="pip install 'autolaunch[hf]'",
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    quiet = not sys.stderr.isatty() and not are_progress_bars_disabled()
    if quiet:
        disable_progress_bars()
    try:
        with _told(name, revision):
            return Path(snapshot_download(name, revision=revision, allow_patterns=list(files)))
    finally:
        if quiet:
            enable_progress_bars()


@contextmanager
def _told(name: str, revision: str | None) -> Iterator[None]:
    """Turn what `huggingface_hub` raises into one message."""
    from huggingface_hub import constants, errors

    where, endpoint, directory = f"model.path={name}", constants.ENDPOINT, directory_meant(expanded(name))
    try:
        yield
    except errors.GatedRepoError as error:
        raise ConfigError(
            where,
            "access to it has to be asked for, and has not been given to this user",
            f"conditions accepted at {endpoint}/{name}, and the token of that user",
            "hf auth login, or HF_TOKEN=... before the command",
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ConfigError(
            where,
            f"there is no such directory here, and no such model at {endpoint} that this user may see",
            "a directory; OWNER/NAME of a model; for a private one, a token that may read it",
            directory or "hf auth login, or HF_TOKEN=... before the command",
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ConfigError(
            f"model.revision={revision}",
            f"{name} has no such revision",
            f"a branch, a tag or a whole commit hash of {endpoint}/{name}",
            "model.revision=null",
        ) from error
    except errors.LocalEntryNotFoundError as error:
        offline = constants.HF_HUB_OFFLINE
        why = "HF_HUB_OFFLINE is set" if offline else f"{endpoint} can't be reached ({_reason(error)})"
        raise ConfigError(
            where,
            f"there is no such directory here, it is not whole in the cache {constants.HF_HUB_CACHE}, and {why}",
            "a directory; a cache in HF_HOME that was filled where there is a network; a mirror in HF_ENDPOINT",
            directory or f"hf download {shlex.quote(name)}, where there is a network",
        ) from error
    except errors.HFValidationError as error:
        raise ConfigError(where, f"there is no such directory here, and no model is called so: {error}") from error
    except Exception as error:
        if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
            raise ConfigError(
                where,
                f"no space is left for it in the cache {constants.HF_HUB_CACHE}",
                "a cache on a larger disk",
                "HF_HOME=DIRECTORY before the command",
            ) from error
        raise ConfigError(where, f"it can't be downloaded from {endpoint}: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    cause = error.__cause__ or error
    return " ".join(str(cause).split())[:200] or type(cause).__name__


def _count(files: int) -> str:
    return f"{files} file{'' if files == 1 else 's'}"
