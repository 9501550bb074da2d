"""Keys about checkpoints, and where exports go, beside others with which they have no effect."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from autolaunch.config.command_line import typed_keys
from autolaunch_strategies.config import ConfigError
from autolaunch_strategies.config.values import Where, written

_OF_WRITING = (
    *("every_n_steps", "every_minutes", "emergency_seconds", "keep_last"),
    *("monitor", "mode", "asynchronous"),
)
"""Keys of `checkpoint` that say when and how one is written; the others say how it is read."""


def saving_without_effect(config: Mapping[str, Any], typed: Sequence[str], where: Where) -> Iterator[ConfigError]:
    """What asks for checkpoints or exports where none are written.

    What was switched off on the command line itself is meant to be off: one line, or the file of an experiment, is then
    used with and without. In a file it is easily overlooked.

    Args:
        config: every key of the schema, resolved.
        typed: the overrides.
        where: says where a value came from.
    """
    keys, checkpoint = typed_keys(typed), config["checkpoint"]
    if config["task"] == "fit" and not checkpoint["enabled"] and "checkpoint.enabled" not in keys:
        for name in _OF_WRITING:
            if f"checkpoint.{name}" in keys and checkpoint[name] is not None:
                override = where(f"checkpoint.{name}", checkpoint[name])
                yield ConfigError(
                    override,
                    f"has no effect: {where('checkpoint.enabled', False)} writes no checkpoints",
                    "checkpoint.enabled=true beside it",
                    f"checkpoint.enabled=true {override}",
                )
    if checkpoint["mode"] != "min" and checkpoint["monitor"] is None and "checkpoint.monitor" not in keys:
        yield ConfigError(
            where("checkpoint.mode", checkpoint["mode"]),
            "has no effect without checkpoint.monitor: the newest checkpoints are kept",
            "checkpoint.monitor beside it, a value that is logged",
            f"checkpoint.monitor=val_loss checkpoint.mode={checkpoint['mode']}",
        )
    if config["export_path"] is not None and config["task"] != "export":
        yield ConfigError(
            where("export_path", config["export_path"]),
            f"has no effect with {config['task']}",
            "autolaunch export",
            f"autolaunch export ckpt_path=last export_path={written(config['export_path'])}",
        )
