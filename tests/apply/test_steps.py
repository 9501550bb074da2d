"""The first halves of the steps alone: what is foreseen is what would be done, and the model stays as it was."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")
from autolaunch_strategies.apply.order import ORDER, foresee
from autolaunch_strategies.apply.steps import Look, Recomputes, Site, without_cache
from autolaunch_strategies.config import parallel_config
from autolaunch_strategies.context.parallel import ContextParallelModule
from autolaunch_strategies.model.blocks import Blocks, find_blocks
from autolaunch_strategies.tensor.model_parallel import ModelParallelModule
from tests.support.zoo import make


def state_of(model: nn.Module) -> dict[str, Any]:
    """What a preview may not touch: settings, values, hooks, and what stands in the place of methods."""
    return {
        name: (
            copy.deepcopy(getattr(getattr(part, "config", None), "__dict__", None)),
            {key: value.clone() for key, value in part._parameters.items() if value is not None},
            len(part._forward_hooks) + len(part._forward_pre_hooks) + len(part._backward_hooks),
            sorted(key for key in vars(part) if key in ("forward", "_compiled_call_impl")),
        )
        for name, part in model.named_modules()
    }


@pytest.mark.parametrize(
    ("mesh", "axes"),
    [
        pytest.param("1x1x2", {"pp": "1f1b"}, id="pp"),
        pytest.param("1x1x1x2", {"cp": "ring"}, id="cp"),
        pytest.param("1x2", {"mp": "seq_parallel"}, id="mp"),
        pytest.param("2x2x2x2", {"mp": "auto", "pp": "exact", "cp": "gather", "recompute": 2, "dp": 1}, id="all"),
    ],
)
def test_a_preview_changes_nothing(mesh: str, axes: dict[str, Any]) -> None:
    """Of a model that fills a cache of keys and values unless it is told not to."""
    model = make("llama", use_cache=True)
    before = state_of(model)
    account = foresee(model, parallel_config(mesh, **axes))
    after = state_of(model)
    torch.testing.assert_close([item[1] for item in after.values()], [item[1] for item in before.values()])
    assert {name: (item[0], *item[2:]) for name, item in after.items()} == {
        name: (item[0], *item[2:]) for name, item in before.items()
    }
    assert account["order"] == list(ORDER)
    assert set(axes) - {"recompute", "dp"} <= account.keys()


def test_a_preview_that_is_refused_changes_nothing() -> None:
    model = make("llama", use_cache=True)
    config = parallel_config("1x1x2", pp={"split_spec": "no.such.blocks"})
    with pytest.raises(ValueError, match=r"no\.such\.blocks"):
        foresee(model, config)
    assert model.config.use_cache is True


def test_planning_that_is_refused_leaves_the_cache_on() -> None:
    """Also where it would stay off: in `apply_parallelism`."""
    model = make("llama", use_cache=True)
    config = parallel_config("1x1x2", pp="exact")
    with pytest.raises(ValueError, match="refused"), without_cache(model, config, keep=True):
        assert model.config.use_cache is False
        raise ValueError("refused")
    assert model.config.use_cache is True
    with without_cache(model, config, keep=True):
        pass
    assert model.config.use_cache is False


def test_what_is_recomputed_is_counted_in_the_whole_model() -> None:
    """Every second block of the model is computed again, not every second of a stage."""
    model = make("llama", num_hidden_layers=6)
    config = parallel_config("1x1x2", pp="exact", recompute=2)
    blocks = find_blocks(model)
    names = [block.name for block in blocks]
    assert list(foresee(model, config)["recompute"]["blocks"]) == names[::2]
    own = Blocks(blocks.members[3:], blocks.reasons)
    site = Site(
        model, mesh=None, device=torch.device("cpu"), blocks=own,
        model_parallel=ModelParallelModule(model), context_parallel=ContextParallelModule(),
    )  # fmt: skip
    Recomputes(Look(model, config, blocks)).apply(site)
    assert [block.name for block in own if "forward" in vars(block.module)] == [names[4]]


@pytest.mark.parametrize(("pp", "told"), [("zbv_zero_bubble", 1), ("1f1b", 0)])
def test_what_a_schedule_promises_and_compiled_blocks_do_not_do_is_said(pp: str, told: int) -> None:
    account = foresee(make("llama", num_hidden_layers=4), parallel_config("1x1x2", pp=pp, compile=True))
    assert len(account["compile"].get("warnings", ())) == told
