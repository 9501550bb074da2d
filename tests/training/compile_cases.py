"""Cases for the tests of compiled blocks on meshes of several axes, under Lightning.

The group `one` is what the others are compared with: plain eager Lightning in one process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from autolaunch_strategies.config import parse_mesh
from autolaunch_strategies.training import traced_block
from tests.context.cases import EVEN, On
from tests.context.modules import built_in
from tests.pipeline.cases import PLAIN, Setting, fit
from tests.support.cases import no_compiler, serve

_PLURAL = {"1f1b": 2, "zbv_zero_bubble": 4}
"""Schedules of several microbatches -> how many."""


@contextlib.contextmanager
def captured(compiler: Callable[[], Any]) -> Iterator[None]:
    """No block runs as it is, and torch.compile finds nothing that it can't follow."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    before = len(traced_block._REASONS)
    with compiler():
        yield
    assert len(traced_block._REASONS) == before, traced_block._REASONS
    counters = torch._dynamo.utils.counters
    assert counters["stats"]["unique_graphs"] and not counters["graph_break"], counters


def recipe(setting: Setting, layers: int, accumulate: int, precision: str) -> Any:
    """Two optimizer steps."""
    return fit(
        setting, lambda: built_in(num_layers=layers), EVEN, gradient_clip_val=0.5, max_steps=2,
        accumulate_grad_batches=accumulate, precision=precision,
    )  # fmt: skip


def parsed(text: str) -> tuple[str, Setting, dict[str, Any], bool]:
    """(mesh, setting, what the one process needs to know, whether inductor compiles) of `mesh:key=value,...`."""
    mesh, _, rest = text.partition(":")
    options: dict[str, Any] = dict(item.split("=") for item in rest.split(","))
    shared = {
        "layers": 4 if options.get("pp") == "zbv_zero_bubble" else 2,
        "accumulate": int(options.pop("accumulate", 1)),
        "precision": options.pop("precision", "32"),
    }
    inductor = options.pop("backend", "") == "inductor"
    options["dp"] = int(options.pop("dp", 0))
    schedule = options.get("pp", "exact")
    if schedule in _PLURAL:
        options["pp"] = {"loss": "microbatch", "schedule": schedule, "microbatches": _PLURAL[schedule]}
    return mesh, On(mesh, {**options, "compile": True, "timeout": 250}), shared, inductor


def counterpart(text: str) -> str:
    """The case of one process that a case is compared with."""
    return "-".join(str(value) for value in parsed(text)[2].values())


def on_mesh(text: str) -> Any:
    _, setting, shared, inductor = parsed(text)
    with captured(contextlib.nullcontext if inductor else no_compiler):
        return recipe(setting, **shared)


CASES = (
    "2x2:dp=3,mp=tensor_parallel,accumulate=2", "2x2:dp=1,mp=seq_parallel,recompute=selective",
    "2x1x2:dp=3,pp=exact,recompute=full", "2x1x2:dp=1,pp=1f1b,accumulate=2",
    "2x1x1x2:dp=3,cp=ring,accumulate=2", "2x1x1x2:dp=1,cp=ulysses,recompute=full",
    "1x2x2:mp=tensor_parallel,pp=exact,accumulate=2", "1x2x2:mp=seq_parallel,pp=1f1b,recompute=full",
    "1x2x2:mp=seq_parallel,pp=zbv_zero_bubble", "1x2x1x2:mp=seq_parallel,cp=ulysses,accumulate=2",
    "1x2x1x2:mp=tensor_parallel,cp=ring,recompute=full", "1x1x2x2:pp=1f1b,cp=ring", "1x1x2x2:pp=exact,cp=ulysses",
    "2x2x2:dp=3,mp=seq_parallel,pp=1f1b", "2x2x2:dp=1,mp=tensor_parallel,pp=exact,recompute=selective",
    "2x2x2:dp=1,mp=tensor_parallel,pp=zbv_zero_bubble", "2x2x1x2:dp=3,mp=tensor_parallel,cp=ulysses",
    "2x2x1x2:dp=1,mp=seq_parallel,cp=ring,accumulate=2", "1x2x2x2:mp=seq_parallel,pp=1f1b,cp=ring",
    "2x2:dp=3,mp=seq_parallel,precision=bf16-mixed", "1x2x2:mp=tensor_parallel,pp=1f1b,precision=bf16-mixed",
    "1x2x1x2:mp=seq_parallel,cp=ring,precision=bf16-mixed",
    "2x2:dp=3,mp=seq_parallel,backend=inductor", "1x2x1x2:mp=tensor_parallel,cp=ring,backend=inductor",
)  # fmt: skip

GROUPS: dict[str, dict[str, Callable[[], Any]]] = {
    "one": {counterpart(text): partial(recipe, PLAIN, **parsed(text)[2]) for text in CASES},
    **{
        str(ranks): {text: partial(on_mesh, text) for text in CASES if parse_mesh(parsed(text)[0]).size == ranks}
        for ranks in (4, 8)
    },
}

if __name__ == "__main__":
    serve(GROUPS)
