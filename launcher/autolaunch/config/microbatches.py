"""Into how many parts a rank's share of a batch is cut, and by whom: gradient accumulation or the pipeline. Torch-free.

`data.microbatches` is what a person turns to train on a large batch. Without a pipeline the parts are accumulated;
a pipeline needs parts anyway, so that there it means those, unless `pp.microbatches` says how many they are.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from autolaunch.config.against_schema import Where
from autolaunch_strategies.config import ConfigError, PipelineParallel
from autolaunch_strategies.schedules.schedule import check_schedule, fitting_microbatches


def batch_parts(config: Mapping[str, Any], pp: int) -> tuple[int, int | None]:
    """(batches that are accumulated for one optimizer step, microbatches into which the pipeline cuts each of them).

    Args:
        config: a validated config.
        pp: the size of the pp axis.

    Returns:
        The second is None without a pipeline, and where it chooses by itself.
    """
    asked = config["data"].get("microbatches", 1)
    if pp == 1 or config["pp"] is None:
        return asked, None
    own_data = "_target_" in config["data"]  # hands out its batches as it likes
    if config["pp"]["microbatches"] is None and asked > 1 and not own_data:
        return 1, asked
    return asked, config["pp"]["microbatches"]


def with_batch_parts(config: Mapping[str, Any], pp: int) -> dict[str, Any]:
    """The config with `data.microbatches` the accumulation and `pp.microbatches` the pipeline's, by `batch_parts`."""
    accumulation, pipeline = batch_parts(config, pp)
    settled = dict(config)
    if "microbatches" in config["data"]:
        settled["data"] = {**config["data"], "microbatches": accumulation}
    if pipeline is not None:
        settled["pp"] = {**config["pp"], "microbatches": pipeline}
    return settled


def check_batch_parts(config: Mapping[str, Any], dp: int, pp: int, where: Where) -> Iterator[ConfigError]:
    """A rank's share of the batch that the pipeline cannot cut as it is asked to, or as its schedule needs.

    A schedule that is wrong in itself is left to `check_schedule`.
    """
    if pp == 1 or config["pp"] is None:
        return
    options = PipelineParallel(**config["pp"])
    if check_schedule(options, pp, options.microbatches):
        return
    accumulation, parts = batch_parts(config, pp)
    key = "pp.microbatches"
    if parts is not None and options.microbatches is None:
        key = "data.microbatches"
        wrong = check_schedule(dataclasses.replace(options, microbatches=parts), pp, parts)
        if wrong:
            # Its words are those of the key that was not typed.
            yield from (ConfigError(*(text.replace("pp.microbatches", key) for text in error.args)) for error in wrong)
            return
    batch = config["data"].get("batch_size")
    if "_target_" in config["data"] or batch is None or batch % (dp * accumulation):
        return
    share = batch // (dp * accumulation)
    ranks = f"{dp} data parallel rank{'s' if dp > 1 else ''}"
    accumulated = f" in {accumulation} accumulated batches" if accumulation > 1 else ""
    origin = f"data.batch_size={batch} over {ranks}{accumulated}"
    if parts is None:
        if not fitting_microbatches(options.schedule, pp, options.virtual_stages, None, share):
            least = next(
                number
                for number in itertools.count(share + 1)
                if fitting_microbatches(options.schedule, pp, options.virtual_stages, None, number)
            )
            yield ConfigError(
                f"data.batch_size={batch} with pp.schedule={options.schedule}",
                f"{options.schedule} needs at least {least} microbatches on {pp} ranks of pp, but a rank's batch has "
                f"{_sequences(share)} ({origin})",
                f"data.batch_size of {least * dp * accumulation} or more, or pp.schedule=gpipe",
                f"data.batch_size={least * dp * accumulation}",
            )
    elif share % parts:
        fitting = [number for number in range(1, share + 1) if share % number == 0]
        fitting = [number for number in fitting if not check_schedule(options, pp, number)]
        close = min(fitting, key=lambda number: abs(number - parts), default=None)
        yield ConfigError(
            where(key, parts),
            f"a rank's batch of {_sequences(share)} cannot be cut into {parts} equal microbatches ({origin})",
            f"{key} of {', '.join(map(str, fitting))}" if fitting else f"a data.batch_size that {parts} divides",
            f"{key}={close}" if close else f"data.batch_size={parts * dp * accumulation}",
        )


def _sequences(count: int) -> str:
    return f"{count} sequence{'' if count == 1 else 's'}"
