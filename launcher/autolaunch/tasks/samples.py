"""Texts from the model while it is trained, and from one that is loaded."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger

from autolaunch.data.prompts import PromptEncoder, check_prompts, outside_of
from autolaunch.launch.heartbeat import PULSE, Activity
from autolaunch.models.facts import model_facts
from autolaunch.models.hf_tasks import task_of
from autolaunch.tasks.generation import Sampling, generate
from autolaunch_strategies.config import ConfigError, raise_all

FILE = "samples.jsonl"
"""Where the samples of a run are written, in its directory: a line for each prompt and validation."""


class Writer:
    """Writes texts with the model of a job.

    Args:
        config: the resolved job.
        prompts: see `autolaunch.data.prompts`.
        key: which key gives them, for messages.

    Raises:
        ConfigError: a prompt of another kind, one for which there is no tokenizer, or one of tokens that the model does
            not know.
    """

    def __init__(self, config: Mapping[str, Any], prompts: Sequence[Any], sampling: Sampling, key: str) -> None:
        if config["module"] is not None or "_target_" in config["model"]:
            raise ConfigError(
                key,
                "nothing is known of how a class of your own goes on with a text",
                "model=llama, model=hf",
            )
        if (task := task_of(config["model"])) not in (None, "causal_lm"):
            raise ConfigError(f"{key} with model.task={task}", "such a model does not go on with a text")
        check_prompts(prompts, key)
        self.prompts, self.sampling = list(prompts), sampling
        self._encoder = PromptEncoder(config["data"])
        self._ids = [self._encoder.encode(prompt, f"{key}[{index}]") for index, prompt in enumerate(prompts)]
        facts = model_facts(config["model"])
        self._longest = facts.max_seq_len
        unknown = (outside_of(ids, facts.vocab_size, f"{key}[{index}]") for index, ids in enumerate(self._ids))
        raise_all([error for error in unknown if error is not None])

    def write(self, trainer: pl.Trainer) -> list[str]:
        """What follows each prompt. Collective; the module must be in evaluation mode."""
        strategy: Any = trainer.strategy
        moved = partial(PULSE.moved, Activity.BETWEEN, trainer.global_step)
        texts = generate(strategy, self._ids, self.sampling, self._encoder.ends, self._longest, moved)
        return [self._encoder.decode(ids) for ids in texts]

    def lines(self, texts: Sequence[str]) -> list[str]:
        """Prompts and what follows them, for the screen."""
        return [f"{self._encoder.shown(prompt)!r} → {text!r}" for prompt, text in zip(self.prompts, texts, strict=True)]


class Samples(pl.Callback):
    """Lets the model go on with some prompts at each validation, with the weights that are validated.

    The texts stand in `samples.jsonl`, on the screen, and in the loggers that take text (TensorBoard, W&B).

    Args:
        prompts: texts; conversations ``[{role: user, content: ...}]``, for the chat template; or lists of token ids.
        max_new_tokens, temperature, top_p, seed: see `autolaunch.tasks.generation.Sampling`.
    """

    def __init__(
        self,
        prompts: Sequence[Any],
        max_new_tokens: int = 32,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
    ) -> None:
        self.prompts = prompts
        self.sampling = Sampling(max_new_tokens, temperature, top_p, seed)
        self._writer: Writer | None = None

    def begin(self, config: Mapping[str, Any]) -> None:
        """Learn which job this is.

        Raises:
            ConfigError: as `Writer`.
        """
        self._writer = Writer(config, self.prompts, self.sampling, "callbacks.samples.prompts")

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write them; averaged weights (`EMA`) are still in place."""
        if self._writer is None or trainer.sanity_checking:
            return
        texts = self._writer.write(trainer)
        if not trainer.is_global_zero:
            return
        step, directory = trainer.global_step, Path(trainer.default_root_dir)
        with (directory / FILE).open("a", encoding="utf-8") as file:
            for prompt, text in zip(self.prompts, texts, strict=True):
                file.write(json.dumps({"step": step, "prompt": prompt, "text": text}, ensure_ascii=False) + "\n")
        bar: Any = trainer.progress_bar_callback
        for line in self._writer.lines(texts):
            (print if bar is None else bar.print)(f"sample at step {step}: {line}")
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                for index, line in enumerate(self._writer.lines(texts)):
                    logger.experiment.add_text(f"samples/{index}", line, step)
            elif isinstance(logger, WandbLogger):
                rows = [list(pair) for pair in zip(map(str, self.prompts), texts, strict=True)]
                logger.log_text("samples", ["prompt", "text"], rows, step=step)
