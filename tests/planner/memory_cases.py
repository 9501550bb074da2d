"""What runs really take, for the tests of the planner's memory.

Every case trains a small Llama for three steps and returns the pipe rank, and bytes: of parameters, gradients and
optimizer state, the most that autograd keeps at once, and the most that is allocated at once.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import logging
from collections import Counter
from typing import Any

from tests.support.cases import serve

POSITIONS, BATCH = 128, 8
SIZES = {
    "size": "debug",
    "num_layers": 4,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_heads": 4,
    "num_kv_heads": 4,
    "vocab_size": 512,
}


def case(**fields: Any) -> dict[str, Any]:
    """Values of a `Candidate`, by name."""
    return fields


CASES: dict[str, dict[str, Any]] = {
    "one": case(),
    "accumulates": case(microbatches=4),
    "full": case(recompute=1),
    "selective": case(recompute=-1),
    "every_second": case(recompute=2),
    "ddp": case(dp=2),
    "zero1": case(dp=2, level=1),
    "zero1_accumulates": case(dp=2, level=1, microbatches=4),
    "zero2_accumulates": case(dp=2, level=2, microbatches=4),
    "zero3": case(dp=2, level=3),
    "zero3_full": case(dp=2, level=3, recompute=1),
    "mp": case(mp=2),
    "mp_sp": case(mp=2, sequence_parallel=1),
    "cp_gather": case(cp=2),
    "cp_ring": case(cp=2, backend="ring"),
    "cp_ulysses": case(cp=2, backend="ulysses", ulysses=2),
    "exact": case(pp=2, pipeline="exact", microbatches=4),
    "gpipe": case(pp=2, pipeline="gpipe", microbatches=4),
    "1f1b": case(pp=2, pipeline="1f1b", microbatches=4),
    "1f1b_full": case(pp=2, pipeline="1f1b", microbatches=4, recompute=1),
    "interleaved": case(pp=2, pipeline="interleaved_1f1b", virtual_stages=2, microbatches=4),
    "interleaved_zb": case(pp=2, pipeline="interleaved_zero_bubble", virtual_stages=2, microbatches=4),
    "zbv": case(pp=2, pipeline="zbv_zero_bubble", virtual_stages=2, microbatches=4),
    "dualpipev": case(pp=2, pipeline="dualpipev", virtual_stages=2, microbatches=4),
    "hybrid": case(dp=4, level=3, replicate=2),
    "1f1b_4": case(pp=4, pipeline="1f1b", microbatches=4),
    "dp_pp_zero3": case(dp=2, pp=2, level=3, pipeline="1f1b", microbatches=4),
    "dp_mp_zero2": case(dp=2, mp=2, level=2, sequence_parallel=1),
}


class _Mallinfo2(ctypes.Structure):
    NAMES = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    _fields_ = [(name, ctypes.c_size_t) for name in NAMES]


def in_use() -> int:
    """Bytes that malloc has given out (glibc; with `MALLOC_ARENA_MAX=1` those of all threads)."""
    library = ctypes.CDLL(None)
    library.mallinfo2.restype = _Mallinfo2
    found = library.mallinfo2()
    return int(found.uordblks + found.hblkhd)


def ranks_of(fields: dict[str, Any]) -> int:
    """How many ranks a case needs."""
    return fields.get("dp", 1) * fields.get("mp", 1) * fields.get("pp", 1) * fields.get("cp", 1)


def candidate(fields: dict[str, Any]) -> Any:
    """The `Candidate` of a case."""
    from autolaunch_strategies.config import CP_BACKENDS
    from autolaunch_strategies.planner.candidate import PIPELINES, Candidate

    numbers = {"pipeline": PIPELINES.index(fields.get("pipeline", "none"))}
    numbers["backend"] = CP_BACKENDS.index(fields.get("backend", "gather"))
    return Candidate(**{**fields, **numbers})


def module() -> Any:
    """The LightningModule that every case trains."""
    import lightning.pytorch as pl
    import torch
    from torch.nn import functional as F

    from autolaunch.models.llama import Llama
    from autolaunch.models.llama_config import llama_config

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Llama(llama_config(SIZES))
            self.example_input_array = torch.zeros(2, POSITIONS, dtype=torch.int64)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.model(ids)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            logits = self.model(batch[:, :-1])
            return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    return Module()


def run(fields: dict[str, Any]) -> tuple[int, dict[str, int]]:
    """(pipe rank, what this rank took)."""
    import lightning.pytorch as pl
    import torch
    from torch.distributed.tensor import DTensor
    from torch.utils._python_dispatch import TorchDispatchMode

    from autolaunch_strategies import MeshStrategy

    one = candidate(fields)
    accumulated = one.microbatches if one.pp == 1 else 1
    pp: Any = "exact"
    if one.pp > 1 and one.pipeline_name != "exact":
        pp = {"loss": "microbatch", "schedule": one.pipeline_name, "microbatches": one.microbatches}
        pp |= {"virtual_stages": one.virtual_stages} if one.virtual_stages > 1 else {}
    elif one.pp > 1:
        pp = {"loss": "exact", "schedule": "gpipe", "microbatches": one.microbatches}
    dp: dict[str, Any] = {"sharding_level": one.level}
    if one.level:
        dp["replicate"] = one.replicate
    tokens = torch.randint(0, 512, (BATCH // one.dp // accumulated, POSITIONS + 1))

    def local(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    def size(tensors: Any) -> int:
        # Gradients of one group of `fully_shard` are views of one tensor.
        found = {
            (item.untyped_storage().data_ptr(), item.storage_offset()): item.nbytes for item in map(local, tensors)
        }
        return sum(found.values())

    class Allocated(TorchDispatchMode):
        """The most that malloc has given out, looked at after each operator."""

        def __init__(self) -> None:
            super().__init__()
            self.before = self.most = in_use()

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found = func(*args, **(kwargs or {}))
            self.most = max(self.most, in_use())
            return found

    class Saved:
        """A tensor that autograd saved, for as long as autograd has it."""

        def __init__(self, watch: Watch, tensor: torch.Tensor) -> None:
            self.watch, self.tensor = watch, tensor
            own = local(tensor) if isinstance(tensor, DTensor) else tensor
            self.key = own.untyped_storage().data_ptr()
            watch.begins(self.key, own.untyped_storage().nbytes())

        def __del__(self) -> None:
            self.watch.ends(self.key)

    class Watch(pl.Callback):
        def __init__(self) -> None:
            self.uses: Counter[int] = Counter()
            self.sizes: dict[int, int] = {}
            self.parameters: set[int] = set()
            self.bytes = self.most = 0
            self.found: dict[str, int] = {}

        def begins(self, key: int, size: int) -> None:
            if not self.uses[key] and key not in self.parameters:
                self.sizes[key] = size
                self.bytes += size
                self.most = max(self.most, self.bytes)
            self.uses[key] += 1

        def ends(self, key: int) -> None:
            self.uses[key] -= 1
            if not self.uses[key]:
                del self.uses[key]
                self.bytes -= self.sizes.pop(key, 0)

        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == accumulated:  # the second step: what autograd keeps
                self.parameters = {local(item).untyped_storage().data_ptr() for item in module.parameters()}
                self.hooks = torch.autograd.graph.saved_tensors_hooks(
                    lambda item: Saved(self, item), lambda s: s.tensor
                )
                self.hooks.__enter__()
            if batch_idx == 2 * accumulated:
                self.hooks.__exit__()
                self.states(trainer, module)
                gc.collect()
                self.allocated = Allocated()
                self.allocated.__enter__()

        def states(self, trainer: Any, module: Any) -> None:
            (optimizer,) = trainer.optimizers
            state = [
                item
                for values in optimizer.state.values()
                for item in values.values()
                if isinstance(item, torch.Tensor) and item.dim()
            ]
            gradients = [item.grad for item in module.parameters() if item.grad is not None]
            self.found["parameters"] = size(module.parameters())
            self.found["gradients"] = size(gradients)
            self.found["optimizer"] = size(state)
            self.found["saved"] = self.most

        def on_train_end(self, trainer: Any, module: Any) -> None:
            self.allocated.__exit__(None, None, None)
            held = sum(self.found[name] for name in ("parameters", "gradients", "optimizer"))
            self.found["peak"] = held + self.allocated.most - self.allocated.before

    pl.seed_everything(0, verbose=False)
    watch = Watch()
    trainer = pl.Trainer(
        strategy=MeshStrategy(
            mesh=f"{one.dp}x{one.mp}x{one.pp}x{one.cp}",
            dp=dp,
            mp={"name": "seq_parallel", "sequence_parallel": True} if one.sequence_parallel else "auto",
            pp=pp,
            cp=one.backend_name,
            recompute=one.recompute_name,
            timeout=60,
        ),
        accelerator="cpu",
        max_steps=3,
        accumulate_grad_batches=accumulated,
        callbacks=[watch],
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module(), torch.utils.data.DataLoader([tokens] * (3 * accumulated), batch_size=None))
    pipeline = trainer.strategy._applied.pipeline
    return 0 if pipeline is None else pipeline.pipe_rank, watch.found


GROUPS: dict[str, dict[str, Any]] = {}
for _name, _fields in CASES.items():
    GROUPS.setdefault(f"on_{ranks_of(_fields)}", {})[_name] = functools.partial(run, _fields)


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    serve(GROUPS)
