"""Whether a loss is one that training in stages minimises as one device would."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from autolaunch_strategies.config import ConfigError
from autolaunch_strategies.pipeline.microbatches import Microbatches
from autolaunch_strategies.pipeline.run import Pipeline

log = logging.getLogger(__name__)


class Objective:
    """Refuses a loss that training in stages would not minimise as one device does. Each check is made once.

    On the last stage, where the loss is.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        self.is_compared = False
        self._parameters_checked = False
        self._numbers_checked = False

    def refuse_parameters_outside(self, loss: torch.Tensor | None) -> None:
        """Raise ConfigError for a loss that uses parameters of the model itself: it would see those of one stage."""
        if self._parameters_checked or loss is None or not loss.requires_grad:
            return
        self._parameters_checked = True
        if used := self.pipeline.used_outside(loss):
            raise self.pipeline.uses_outside(used[0])

    def refuse_what_others_keep(self, loss: torch.Tensor | None) -> None:
        """Raise ConfigError for a loss that reads what a forward keeps in the model: other stages have computed it."""
        if self._numbers_checked or loss is None or loss.dim():  # a step of validation may return anything
            return
        self._numbers_checked = True
        if not self.pipeline.returned_numbers or not loss.isnan():
            return
        if kept := self.pipeline.kept_without_numbers():
            name = self.pipeline.name
            raise ConfigError(
                "pp",
                f"the loss of the first batch is NaN, and what {name} returns is not: it reads what a forward keeps, "
                f"such as {kept}, which other stages compute for themselves",
                f"a forward of {name} that returns what the loss needs; or a mesh with pp of size 1",
            )

    def compare(
        self, mean: torch.Tensor, microbatches: Microbatches, whole_loss: Callable[[], torch.Tensor | None]
    ) -> None:
        """Raise ConfigError if the mean over microbatches is another loss than that of the whole batch.

        Args:
            whole_loss: the loss of the step on the whole batch; called with the model's output put together.
        """
        count = len(microbatches.losses)
        if self.is_compared or (count == 1 and self._parameters_checked):
            return
        self.is_compared = count > 1
        whole = self.pipeline.replay(microbatches, whole_loss)
        self.refuse_parameters_outside(whole)
        if count == 1:
            return
        if self.pipeline.drew_in_replay:
            log.warning(
                "pp.loss=microbatch: the step draws random numbers, so it can't be checked that the mean of its losses "
                "over microbatches is the loss of the whole batch"
            )
            return
        if whole is None or whole.isnan() or mean.isnan():
            return
        tolerance = 1e-4 if whole.dtype in (torch.float32, torch.float64) else 1e-2
        if not torch.isclose(whole.double(), mean.double(), rtol=tolerance, atol=1e-7):
            raise ConfigError(
                "pp.loss=microbatch",
                f"the loss of the first batch is {whole.item():.6g}, but the mean over its {count} "
                f"microbatches is {mean.item():.6g}: training would minimise something else than on one device",
                "pp.loss=exact, which computes the loss of the whole batch; or a loss that is a mean over samples",
                "pp=exact",
            )
