"""Many families of models on two ranks along cp: the loss and every gradient equal those of one process, or they are
refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
from autolaunch_strategies.config import ConfigError, parallel_config
from autolaunch_strategies.dry_run import step as dry_step
from autolaunch_strategies.dry_run.ranks import pretend_ranks
from autolaunch_strategies.lightning.first_step import first_step
from autolaunch_strategies.model.construction import Construction
from tests.context.runs import Runs, how_modules_run
from tests.context.zoo_cases import MESHES, Once, unpadded
from tests.support.one_rank import without_process_group
from tests.support.ranks import Group, GroupOf
from tests.support.tiers import but_one_in, of_the_day, spread, tiered
from tests.support.zoo import MORE, NAMES, batch_of

SCRIPT = Path(__file__).with_name("zoo_cases.py")
EVERYDAY = {
    *(f"{family}:gather" for family in of_the_day((*NAMES, *MORE), "cp")), "mixtral:ulysses", "bart:ring",
    "vision_transformer:ring",
}  # fmt: skip

PAIRS = [(name, case) for name, (_, cases) in MESHES.items() for case in cases]


def everyday(pair: tuple[str, str]) -> bool:
    return pair[1] in EVERYDAY


_CHOICE = spread(PAIRS, lambda pair: pair[1].split(":"), everyday)
_HALF = but_one_in(2, [pair for pair in PAIRS if not everyday(pair) and not _CHOICE(pair)])
USP = ("cp4", "gpt2_4:usp")
CASES = tiered(PAIRS, everyday, lambda pair: pair != USP and (_CHOICE(pair) or _HALF(pair)))

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def on(group_of: GroupOf) -> Callable[[str], Group]:
    return functools.cache(lambda name: group_of(SCRIPT, name, MESHES[name][0]))


@pytest.mark.parametrize(("name", "case"), CASES)
def test_loss_and_gradients_are_those_of_one_process(on: Callable[[str], Group], name: str, case: str) -> None:
    for rank in on(name).read_all(case):
        assert "found" in rank, rank
        loss, gradients = rank["expected"]
        largest = max(gradient.abs().max() for gradient in gradients.values())
        own_loss, own = rank["found"]
        torch.testing.assert_close(own_loss, loss, rtol=1e-5, atol=0)
        assert set(own) == set(gradients)
        for key, gradient in own.items():
            # What is rounding error beside the others (biases in front of a softmax) has no digits to compare.
            atol = 1e-5 * float(gradients[key].abs().max()) + 1e-7 * float(largest)
            torch.testing.assert_close(gradient, gradients[key], rtol=1e-5, atol=atol, msg=f"{key}: {{}}".format)


LOOKS_AT_VALUES = ("deberta_v2:gather",)


@pytest.mark.parametrize(("name", "case"), tiered(PAIRS, everyday, but_one_in(12, PAIRS, everyday)))
def test_a_dry_run_finds_what_runs_on_parts_without_values(
    on: Callable[[str], Group], name: str, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if case in LOOKS_AT_VALUES:
        with pytest.raises(ConfigError, match="needs values"):
            dry_runs(name, case, monkeypatch)
    else:
        assert dry_runs(name, case, monkeypatch) == on(name).read_all(case)[0]["runs"]


def dry_runs(mesh: str, case: str, monkeypatch: pytest.MonkeyPatch) -> Runs:
    family, backend = case.split(":")
    data = batch_of(family) if backend == "gather" else unpadded(batch_of(family))
    found: list[Runs] = []

    def build() -> tuple[Once, Construction]:
        construction = Construction(0)
        with construction.recording():
            return Once(family), construction

    class Seen(dry_step._OneStep):
        def held(self) -> dict[str, int]:
            found.append(how_modules_run(self.applied))
            return super().held()

    monkeypatch.setattr(dry_step, "_OneStep", Seen)
    monkeypatch.setattr("autolaunch_strategies.dry_run.forks.can_fork", lambda: False)  # what a fork finds is its own
    without_process_group()
    training = dry_step.Training(
        parallel_config(mesh, {"sharding_level": 0}, None, None, backend),
        build,
        lambda module, batch: first_step(module, lambda: batch),
        lambda: {name: value.to("meta") for name, value in data.items()},
    )
    pretend_ranks(training, [0])
    return found[0]
