"""Which tokenizer turns text into tokens where `data.tokenizer` is left open: the model's. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autolaunch.data.documents import expanded
from autolaunch.data.tokenizers import tokenizer_files

_WITH_TOKENIZER = ("text", "documents", "chat", "classification")


def with_tokenizer(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with `data.tokenizer` set: to the tokenizer in `model.path`, else to `bytes`.

    Chats are not rendered in bytes: there it stays None.
    """
    data, model = config["data"], config["model"]
    if data.get("name") not in _WITH_TOKENIZER or "_target_" in data or data["tokenizer"] is not None:
        return dict(config)
    own = None
    if config["module"] is None and "_target_" not in model and model.get("path"):
        directory = expanded(model["path"])
        if tokenizer_files(directory):
            is_one_file = data["name"] == "text" and (directory / "tokenizer.json").is_file()
            own = str(directory / "tokenizer.json" if is_one_file else directory)
    if own is None and data["name"] != "chat":
        own = "bytes"
    return {**config, "data": {**data, "tokenizer": own}}
