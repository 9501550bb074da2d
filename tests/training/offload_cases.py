"""Cases for the tests of `recompute=offload`: on a mesh, trained with it and without; what differs, bit by bit."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from autolaunch.models.llama import Llama
from autolaunch.models.llama_config import llama_config
from autolaunch_strategies import ProcessMesh
from autolaunch_strategies.config import parallel_config
from autolaunch_strategies.loop.parallelize import parallelize_with
from autolaunch_strategies.tensor.views import Replicator
from autolaunch_strategies.training import offload
from tests.support.cases import no_compiler, serve

# Whether a plain tensor is replicated once for several uses depends on how long it lives, and with that the order in
# which gradients are summed. Without it nothing may differ.
Replicator.remembers = property(lambda _: False, lambda _, value: None)  # for this process

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "num_kv_heads": 2}


def gradients(recompute: str, axis: str, **settings: Any) -> dict[str, torch.Tensor]:
    """What this rank holds of them after two batches."""
    torch.manual_seed(0)
    model = Llama(llama_config({"size": "debug", "num_layers": 3, **SIZES}))
    mesh = ProcessMesh([0, 1], [axis])
    config = parallel_config(mesh.to_shape(), recompute=recompute, **settings)
    parallelize_with(model, None, mesh, config)

    def step(tokens: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    for batch in torch.randint(0, 64, (2, 4, 16)):
        if config.mesh.pp > 1:
            model.forward_backward(step, batch)
        else:
            step(batch).backward()
    held = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return {name: item.to_local() if isinstance(item, DTensor) else item for name, item in held.items()}


def both(axis: str, **settings: Any) -> dict[str, Any]:
    moved: list[int] = []
    out = offload._Lane.out

    def seen(lane: Any, storage: torch.UntypedStorage) -> Any:
        moved.append(storage.nbytes())
        return out(lane, storage)

    offload.SMALLEST, offload._Lane.out = 1, seen  # put back below
    try:
        plain = gradients("none", axis, **settings)
        assert not moved
        other = gradients("offload", axis, **settings)
    finally:
        offload._Lane.out = out
    different = [name for name, value in plain.items() if not torch.equal(value, other[name])]
    return {"different": different, "moved": sum(moved), "gradients": len(plain)}


def compiled(axis: str, **settings: Any) -> dict[str, Any]:
    with no_compiler():
        return both(axis, compile=True, **settings)


GROUPS = {
    "two": {
        "fsdp": partial(both, "dp", dp=3),
        "seq_parallel": partial(both, "mp", mp="seq_parallel"),
        "pipeline": partial(both, "pp", pp={"schedule": "1f1b", "microbatches": 2, "loss": "microbatch"}),
        "context": partial(both, "cp", cp="ring"),
        "compiled": partial(compiled, "dp", dp=3),
    }
}

if __name__ == "__main__":
    serve(GROUPS)
