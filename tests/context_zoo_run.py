"""Gradients of many families of models with sequences divided: `torchrun ... context_zoo_run.py <mesh> <directory>
<case>...`.

A case is `<family>:<backend>`, or `<family>:<backend>+pad` for lengths that don't divide. Every rank writes what it
found to `<directory>/<rank>.pt`.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).parent))
from pipeline_zoo_run import Data, batch, gradients, made, step_of

from autolaunch_strategies import MeshStrategy
from autolaunch_strategies.config import ConfigError


class Once(pl.LightningModule):
    """One training step of a model of the zoo, as its users write it; nothing moves."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.model: nn.Module = made(name)
        self.name = name
        self.found: tuple[torch.Tensor, Data] | None = None

    def training_step(self, data: Data, batch_idx: int) -> torch.Tensor:
        self.loss = step_of(self.name, self.model)(data)
        return self.loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.found = self.loss.detach().clone(), gradients(self.model)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def unpadded(data: Data) -> Data:
    """Without the mask, which some backends can't follow; what it hid is hidden from the loss only."""
    return {key: value for key, value in data.items() if key != "attention_mask"}


def run(name: str, mesh: str, backend: str) -> dict[str, Any]:
    backend, _, padded = backend.partition("+")
    data = batch(name) if backend == "gather" else unpadded(batch(name))
    alone = made(name)
    loss = step_of(name, alone)(data)
    loss.backward()
    strategy = MeshStrategy(mesh=mesh, dp=0, cp={"backend": backend, "pad": padded == "pad"}, timeout=40)
    trainer = pl.Trainer(
        strategy=strategy, accelerator="cpu", max_steps=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
    )  # fmt: skip
    module = Once(name)
    trainer.fit(module, DataLoader([data], batch_size=None))
    assert module.found is not None
    return {"expected": (loss.detach(), gradients(alone)), "found": module.found}


def main() -> None:
    mesh, directory, cases = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    for case in cases:
        try:
            results[case] = run(case.split(":")[0], mesh, case.split(":")[1])
        except ConfigError as error:
            results[case] = {"refused": str(error)}
        except Exception as error:  # the other ranks may wait for this one: it ends here
            results[case] = {"error": f"{error!r}\n{traceback.format_exc()}"}
            break
    torch.save(results, directory / f"{os.environ['RANK']}.pt")
    print(*(f"{case}: {result.get('error', '')}" for case, result in results.items() if "error" in result), flush=True)
    if dist.is_initialized() and not any("error" in result for result in results.values()):
        dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may outlive the interpreter's end


if __name__ == "__main__":
    main()
