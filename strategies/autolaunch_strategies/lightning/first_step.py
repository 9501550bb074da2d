"""The step of a LightningModule on its first batch, on shapes alone: it shows how any model is called."""

from __future__ import annotations

import contextlib
import io
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.core.optimizer import _configure_optimizers
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from lightning_utilities.core.apply_func import apply_to_collection
from torch.utils._pytree import tree_flatten, tree_unflatten

from autolaunch_strategies.config.errors import first_line
from autolaunch_strategies.data_parallel.first_batch import FirstBatches
from autolaunch_strategies.tracing.step import Step


class FirstStep:
    """Makes the first step of a Trainer's module to look at, and reads a batch for it when it is looked at.

    The batch is read on the first rank and its shapes are broadcast. The Trainer sees it again (see `FirstBatches`).
    """

    def __init__(self) -> None:
        self._batches = FirstBatches()

    def of(self, trainer: pl.Trainer, module: pl.LightningModule, broadcast: Callable[[Any], Any]) -> Step:
        """The step of what the Trainer is about to do; collective over all ranks where its arguments are asked for.

        Args:
            broadcast: what the first rank has, on every rank.
        """
        name, loop = _step_and_loop(trainer)

        def read() -> Any:
            batch, error = None, ""
            try:
                batch = without_values(self._read(trainer, loop))
                pickle.dumps(batch)  # else it can't be broadcast, and the others would wait for it
            except Exception as raised:
                error = first_line(raised) if trainer.global_rank == 0 else ""
            batch, error = broadcast((batch, error))
            if error:
                raise LookupError(f"the batch can't be read: {error}")
            return trainer.precision_plugin.convert_input(batch)

        return first_step(module, read, name)

    def _read(self, trainer: pl.Trainer, loop: Any) -> Any:
        source = loop._data_source
        if source.instance is None or not source.is_defined():
            raise LookupError(f"there is no {source.name}")
        loaders = self._batches.undisturbed(source.dataloader) if source.is_module() else source.instance
        if trainer.global_rank > 0:
            return None
        return first_of(loaders, self._batches.read, together=loop is trainer.fit_loop)

    def give_back(self, loader: Any) -> Any:
        """`loader`, or what stands for it, with all batches."""
        return self._batches.give_back(loader)


def _step_and_loop(trainer: pl.Trainer) -> tuple[str, Any]:
    loops: dict[Any, tuple[str, Any]] = {
        TrainerFn.VALIDATING: ("validation_step", trainer.validate_loop),
        TrainerFn.TESTING: ("test_step", trainer.test_loop),
        TrainerFn.PREDICTING: ("predict_step", trainer.predict_loop),
    }
    return loops.get(trainer.state.fn, ("training_step", trainer.fit_loop))


def first_step(module: pl.LightningModule, read: Callable[[], Any], name: str = "training_step") -> Step:
    """The step of `module` on the batch that `read` gives, once it is looked at.

    It returns what the step returns; one that optimizes by hand, the sum of the losses that it differentiates.
    """
    kept: list[Any] = []

    def arguments() -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        if not is_overridden(name, module, parent=pl.LightningModule) and name != "predict_step":
            raise LookupError(f"there is no {name}")
        if is_param_in_hook_signature(getattr(module, name), "dataloader_iter", explicit=True):
            raise LookupError(f"{name} reads its batches itself (dataloader_iter)")
        if not kept:
            kept.append(read())
        if kept[0] is None:
            raise LookupError("the dataloader has no batch")
        return (kept[0],), {}

    def run(batch: Any) -> Any:
        batch = module._on_before_batch_transfer(batch, dataloader_idx=0)
        batch = module._apply_batch_transfer_handler(batch, device=torch.device("cpu"), dataloader_idx=0)
        step = getattr(module, name)
        places = (("batch_idx", 2), ("dataloader_idx", 3))
        numbers = [0 for place, least in places if is_param_in_hook_signature(step, place, min_args=least)]
        if module.automatic_optimization:
            return step(batch, *numbers)
        losses: list[torch.Tensor] = []
        with _with_attribute(module, "manual_backward", lambda loss, *_, **__: losses.append(loss)):
            output = step(batch, *numbers)
        return sum(losses) if losses else output

    return Step(f"{name} with the first batch", module, run, arguments, lambda: _apart_from_trainer(module))


def first_of(loaders: Any, read: Callable[[Any], Any], together: bool = True) -> Any:
    """The first batch of what may be several loaders, put together as lightning does.

    Args:
        together: whether several are gone through at once, unless they say otherwise.
    """
    one_after_the_other = loaders._mode == "sequential" if isinstance(loaders, CombinedLoader) else not together
    leaves, spec = tree_flatten(loaders.iterables if isinstance(loaders, CombinedLoader) else loaders)
    if one_after_the_other:
        return read(leaves[0])
    return tree_unflatten([read(loader) for loader in leaves], spec)


def without_values(batch: Any) -> Any:
    """A batch with its tensors on meta."""
    return apply_to_collection(batch, torch.Tensor, lambda tensor: torch.empty_like(tensor, device="meta"))


@contextmanager
def _apart_from_trainer(module: pl.LightningModule) -> Iterator[None]:
    """Within it nothing that `module` logs, prints, optimizes or asks of other ranks gets anywhere."""
    trainer = module._trainer
    nothing = _Nothing()
    with ExitStack() as stack:
        if not module.automatic_optimization:
            optimizers = _optimizers(module)
            stack.enter_context(_with_attribute(module, "optimizers", lambda *_, **__: optimizers))
            stack.enter_context(_with_attribute(module, "lr_schedulers", lambda: optimizers))
        for name in (
            "log", "log_dict", "print", "manual_backward", "clip_gradients", "toggle_optimizer", "untoggle_optimizer",
        ):  # fmt: skip
            stack.enter_context(_with_attribute(module, name, nothing))
        stack.enter_context(_with_attribute(module, "_device", torch.device("cpu")))
        if trainer is not None:
            loggers = trainer.loggers
            trainer.loggers = []
            stack.callback(setattr, trainer, "loggers", loggers)
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        yield


@contextmanager
def _with_attribute(module: pl.LightningModule, name: str, value: Any) -> Iterator[None]:
    missing = object()
    before = module.__dict__.get(name, missing)
    module.__dict__[name] = value
    try:
        yield
    finally:
        if before is missing:
            module.__dict__.pop(name, None)
        else:
            module.__dict__[name] = before


def _optimizers(module: pl.LightningModule) -> Any:
    """As many placeholders as the module has optimizers, as lightning hands them out; it knows by asking."""
    with contextlib.suppress(Exception):
        configured: Any = module.configure_optimizers()
        optimizers = _configure_optimizers(configured)[0]
        if len(optimizers) > 1:
            return [_Nothing() for _ in optimizers]
    return _Nothing()


class _Nothing:
    """Stands for an optimizer, a scheduler or a method: whatever is asked of it does nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: Any) -> None:
        pass
