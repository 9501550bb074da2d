"""What a LightningModule of a user's own brings with it, beside the defaults of the command."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
from torch.utils.data import DataLoader

from autolaunch.tasks.run_parts import leave_clipping, refuse_own_loaders
from autolaunch_strategies.config import ConfigError
from tests.support.messages import Told, assert_only_told


@pytest.mark.parametrize(
    ("by_hand", "limit", "typed", "left"),
    [(False, 1.0, [], 1.0), (True, 1.0, ["trainer.max_steps=3"], None), (True, None, [], None), (False, 0.5, [], 0.5)],
)
def test_the_default_limit_is_left_out(
    by_hand: bool, limit: float | None, typed: list[str], left: float | None
) -> None:
    trainer, module = pl.Trainer(accelerator="cpu", logger=False, gradient_clip_val=limit), pl.LightningModule()
    module.automatic_optimization = not by_hand
    leave_clipping(trainer, module, typed)
    assert trainer.gradient_clip_val == left


@pytest.mark.parametrize(("limit", "typed"), [(0.5, []), (1.0, ["trainer.gradient_clip_val=1.0"])])
def test_one_that_was_set_is_refused(limit: float, typed: list[str]) -> None:
    trainer, module = pl.Trainer(accelerator="cpu", logger=False, gradient_clip_val=limit), pl.LightningModule()
    module.automatic_optimization = False
    with pytest.raises(ConfigError) as caught:
        leave_clipping(trainer, module, typed)
    told = Told(
        f"trainer.gradient_clip_val={limit:g}",
        "LightningModule optimizes by hand",
        allowed="self.clip_gradients(optimizer, ...) in its training_step",
        write="trainer.gradient_clip_val=null",
    )
    assert_only_told(caught.value, told)


class WithLoader(pl.LightningModule):
    def train_dataloader(self) -> DataLoader[int]:
        return DataLoader(range(4))


def test_loaders_of_a_module_are_not_passed_over_in_silence() -> None:
    with pytest.raises(ConfigError) as caught:
        refuse_own_loaders(WithLoader(), "fit", "text", ["module._target_=my.Net"])
    told = Told(
        f"module._target_={__name__}.WithLoader",
        "train_dataloader of its own",
        "data=text",
        allowed="a LightningDataModule with that loader; or any other data, typed",
        write="data=custom data._target_=package.DataModule",
    )
    assert_only_told(caught.value, told)
    refuse_own_loaders(WithLoader(), "validate", "text", [])
    refuse_own_loaders(WithLoader(), "fit", "custom", [])
    refuse_own_loaders(WithLoader(), "fit", "text", ["data=text"])
    refuse_own_loaders(WithLoader(), "fit", "text", ["data.path=mine.txt"])
    refuse_own_loaders(pl.LightningModule(), "fit", "text", [])
