"""Cases for the tests of `recompute=budget`: on a mesh and in one process, and what graphs of blocks compute."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from autolaunch_strategies import MeshStrategy
from autolaunch_strategies.training import traced_block
from tests.context.modules import LENGTH, VOCABULARY, built_in
from tests.pipeline.cases import PLAIN, Items, Setting, batches, fit
from tests.support.cases import no_compiler, serve

SHARES = (0.5, 0.0)
TWO: dict[str, dict[str, Any]] = {
    "fsdp": {"mesh": "dp2", "dp": 3},
    "tensor_parallel": {"mesh": "mp2", "mp": "tensor_parallel"},
    "seq_parallel": {"mesh": "mp2", "mp": "seq_parallel"},
    "ring": {"mesh": "cp2", "cp": "ring"},
    "pipeline": {"mesh": "pp2", "pp": {"schedule": "1f1b", "microbatches": 2, "loss": "microbatch"}},
}


FOUR: dict[str, dict[str, Any]] = {
    "ring-in-graphs": {"mesh": "mp2xcp2", "mp": "seq_parallel", "cp": "ring"},
}


class On(Setting):
    def strategy(self) -> Any:
        return MeshStrategy(self.mesh, **{"timeout": 250, "dp": 0, "mp": None, "pp": None, **(self.options or {})})


def tokens() -> Items:
    """As many labels in each sample: the mean over microbatches is that over the batch."""
    generator = torch.Generator().manual_seed(7)
    rows = torch.randint(3, VOCABULARY, (8, LENGTH + 1), generator=generator)
    return Items([{"input_ids": row[:-1], "labels": row[1:]} for row in rows])


def trained(setting: Setting) -> Any:
    return fit(setting, built_in, batches(tokens, 4), gradient_clip_val=0.5)


def on_mesh(mesh: str, share: float | None) -> Any:
    """What training gives, and how often graphs of blocks call what."""
    recompute = {} if share is None else {"recompute": "budget", "recompute_budget": share}
    options = {**(TWO | FOUR)[mesh], "compile": True, **recompute}
    before = len(traced_block._REASONS)
    torch.compiler.reset()  # what was compiled for another case is not partitioned again
    with no_compiler(), counted() as calls:
        table = trained(On(options.pop("mesh"), options))
    assert len(traced_block._REASONS) == before, traced_block._REASONS
    return {**table, "calls": calls}


class counted:
    """How often each operator stands in the graphs that are partitioned meanwhile, forward and backward together."""

    def __enter__(self) -> Counter[str]:
        from torch._functorch import partitioners

        self.calls: Counter[str] = Counter()
        self.own: Callable[..., Any] = partitioners._extract_fwd_bwd_modules

        def extract(*args: Any, **kwargs: Any) -> Any:
            graphs = self.own(*args, **kwargs)
            for graph in graphs:
                self.calls.update(
                    str(getattr(node.target, "overloadpacket", node.target))
                    for node in graph.graph.nodes
                    if node.op == "call_function"
                )
            return graphs

        partitioners._extract_fwd_bwd_modules = extract
        return self.calls

    def __exit__(self, *_: Any) -> None:
        from torch._functorch import partitioners

        partitioners._extract_fwd_bwd_modules = self.own


GROUPS = {
    "one": {"plain": partial(trained, PLAIN)},
    "two": {
        **{f"{mesh}-{share}": partial(on_mesh, mesh, share) for mesh in TWO for share in SHARES},
        "seq_parallel-None": partial(on_mesh, "seq_parallel", None),
    },
    "four": {f"{mesh}-{share}": partial(on_mesh, mesh, share) for mesh in FOUR for share in (None, 0.0)},
}

if __name__ == "__main__":
    serve(GROUPS)
