"""What a step logs and collects on the last pipeline stage, made the same on every stage.

Only the last stage reaches the end of a step. There, calls of `self.log` are recorded; one broadcast per step carries
the values to the other stages, and every rank then makes the same calls: lightning's results, monitors and loggers
cannot tell that stages exist. Metric objects are updated on the last stage alone; their states are copied to the others
when an epoch has ended, before anything computes them. Hooks of the LightningModule run on every rank, and what they
log is taken from the last stage.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Real
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.utils._pytree import tree_map
from torchmetrics import Metric, MetricCollection

from autolaunch_strategies.lightning.hooks import COLLECTING_HOOKS, OTHER_HOOKS, Hook
from autolaunch_strategies.lightning.logs import LOG_ARGUMENTS, Entry, LogCall, Part, Structure, merged, type_of
from autolaunch_strategies.lightning.metrics import BatchValues, arrived, exchange_metrics_over, kept, state_of
from autolaunch_strategies.lightning.replacement import Replacement, replaced
from autolaunch_strategies.model.parts import modules_of
from autolaunch_strategies.pipeline.broadcast import StageBroadcast
from autolaunch_strategies.pipeline.failure import StageFailedError
from autolaunch_strategies.tensor.views import plain
from autolaunch_strategies.torch_private.collectives import host_device

log = logging.getLogger(__name__)


_WRITES = ("write_on_batch_end", "write_on_epoch_end")


def _nothing(*args: Any, **kwargs: Any) -> None:
    """In place of what another stage does."""


class StageRelay:
    """Makes what the last stage logs and collects the same on every rank of a pipeline group.

    Constructing, `share`, `share_metrics` and every wrapped hook are collective over `group`.

    Args:
        module: the LightningModule whose steps run on every rank of the group.
        group: the ranks that hold the stages of one replica.
        is_last: whether this rank holds the last stage.
        data_group: the ranks of the same stage whose data differ; None if there is just one.
        device: where collectives of `group` take place.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        group: dist.ProcessGroup,
        is_last: bool,
        data_group: dist.ProcessGroup | None,
        device: torch.device,
    ) -> None:
        self.module, self.group, self.is_last, self.device = module, group, is_last, device
        self.data_group = data_group if data_group is not None and data_group.size() > 1 else None
        last = torch.tensor(group.rank() if is_last else -1, device=device)
        dist.all_reduce(last, dist.ReduceOp.MAX, group)
        assert last >= 0, "one rank of the group holds the last stage"
        self._broadcast = StageBroadcast(group, int(last), device)
        self._parts: list[Part] = []
        self._log: Callable[..., None] | None = None
        self._metrics_changed = True
        self._metrics_sent: set[str] = set()
        self._warned: set[str] = set()
        self._connector: Any = None
        self._batch_values = BatchValues()
        self._whole: list[LogCall] = []
        self._silenced: list[BasePredictionWriter] = []

    # --- for the time of a fit, validate, test or predict -----------------------------------------------------------

    def install(self) -> None:
        """Wrap the module's hooks and the end of its trainer's epochs. Nothing happens if that was done."""
        self.remove()
        for name in (*COLLECTING_HOOKS, *OTHER_HOOKS):
            if is_overridden(name, self.module):
                vars(self.module)[name] = Hook(self, name, getattr(self.module, name), name in vars(self.module))
        self._connector = self.module.trainer._logger_connector
        reached = self._connector.epoch_end_reached

        @functools.wraps(reached)
        def epoch_end_reached() -> None:
            reached()
            self.share_metrics()

        self._connector.epoch_end_reached = epoch_end_reached
        if not self.is_last:  # predictions are on the last stage; one file may be written by every rank
            trainer: Any = self.module.trainer
            for callback in trainer.callbacks:
                if isinstance(callback, BasePredictionWriter):
                    for name in _WRITES:
                        vars(callback)[name] = Replacement(_nothing, getattr(callback, name))
                    self._silenced.append(callback)
        self._metrics_changed = True
        self.adopt_metrics()

    def remove(self) -> None:
        """Undo `install`; metrics keep exchanging their states with the ranks of `data_group` only."""
        for name, hook in list(vars(self.module).items()):
            if isinstance(hook, Hook):
                if hook.was_on_instance:
                    vars(self.module)[name] = hook.method
                else:
                    del vars(self.module)[name]
        if self._connector is not None:
            del self._connector.epoch_end_reached
            self._connector = None
        for callback in self._silenced:
            for name in _WRITES:
                del vars(callback)[name]
        self._silenced.clear()

    # --- values -----------------------------------------------------------------------------------------------------

    @property
    def is_recording(self) -> bool:
        """Whether a step or hook runs within `recording`."""
        return self._log is not None

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Within it `module.log` only takes down what is logged (on the last stage); `share` then logs it."""
        assert not self.is_recording, "a step within a step"
        self._log, self._parts, self._metrics_changed = self.module.log, [Part(1.0)], True
        try:
            with replaced(self.module, "log", self._record):
                yield
        finally:
            self._log = None
            self._batch_values.end()

    def microbatch(self, samples: float | Tensor) -> None:
        """The step is about to run for `samples` of the batch's samples.

        What several runs log under one name becomes one value, by its `reduce_fx`; a mean is weighted by samples, or
        by `batch_size` where the step gives one. A metric's value of the batch, logged as the metric itself or as what
        its call returned, is computed from all runs together.
        """
        assert self.is_recording
        if len(self._parts) == 1:
            self._batch_values.begin(self._metrics())
        self._parts.append(Part(samples))

    @contextmanager
    def unrecorded(self) -> Iterator[None]:
        """Within `recording`: what is logged and what metrics collect in it counts for nothing.

        The step runs for the whole batch: values that `share` then makes of several runs are compared with its own.
        """
        parts, self._parts = self._parts, [Part(1.0)]
        self._batch_values.counts = False
        try:
            with kept(metric for _, metric in self._metrics()):
                yield
            self._whole = merged(self._parts)
        finally:
            self._parts = parts
            self._batch_values.counts = True

    def share(self, extra: Mapping[str, Tensor | int] | None = None) -> dict[str, Any]:
        """Log what the last stage recorded, on every rank. Takes more broadcasts when its structure is a new one.

        Args:
            extra: 0-dim tensors, and numbers that the host needs, of the last stage that travel along (other ranks' are
                ignored).

        Returns:
            `extra` of the last stage, on every rank, in its types.

        Raises:
            StageFailedError: on the other ranks, when the last stage called `fail` instead.
        """
        packed = self._pack(self._of_batch(), extra or {}) if self.is_last else ()
        self._parts = []
        return self._replay(*self._broadcast.values(*packed))

    def fail(self, error: BaseException, where: str) -> None:
        """In place of `share`, on the last stage: the others raise a StageFailedError with the words of `error`."""
        assert self.is_last
        self._broadcast.fail(StageFailedError.on_last_stage(where, error))
        self._parts = []

    def _of_batch(self) -> list[LogCall]:
        several, records = len(self._parts) > 2, merged(self._parts)
        for record in records if several else ():
            value = self._batch_values.value(record.path or record.returned_by)
            if value is not None:
                record.value = plain(value.detach()).reshape(())
        whole, self._whole = self._whole, []
        if several and [record.name for record in whole] == [record.name for record in records]:
            for mine, its in zip(records, whole, strict=True):
                self._warn_of_difference(mine, its)
        return records

    def _warn_of_difference(self, mine: LogCall, whole: LogCall) -> None:
        if mine.value is None or whole.value is None:
            return
        one, other = (torch.as_tensor(record.value, dtype=torch.float64) for record in (mine, whole))
        if not torch.isclose(one, other, rtol=1e-2, atol=1e-6, equal_nan=True):
            self.warn_once(
                mine.name,
                f"pp.loss=microbatch: the step logs {mine.name}, which is {other.item():.6g} for the first batch, but "
                f"{one.item():.6g} when put together from its microbatches (reduce_fx="
                f"{mine.options.get('reduce_fx', 'mean')}); pp=exact logs what one process does",
            )

    def forget_whole(self) -> None:
        """Do not compare with what the step logged for the whole batch: it draws random numbers."""
        self._whole = []

    def _record(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        if not self.is_last:
            return
        assert self._log is not None
        options = dict(zip(LOG_ARGUMENTS, args, strict=False)) | kwargs
        batch_size = options.pop("batch_size", None)
        if options.pop("sync_dist_group", None) is not None:
            self.warn_once("sync_dist_group", "sync_dist_group has no effect with pp: values are reduced over dp")
        record = LogCall(name, None, options, None if batch_size is None else _number(batch_size))
        if isinstance(value, Metric):
            record.path = next((path for path, metric in self._metrics() if metric is value), None)
            batch_value = value._forward_cache
            if isinstance(batch_value, Tensor) and batch_value.numel() == 1:
                record.value = plain(batch_value.detach()).reshape(())
        elif isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
            record.value = plain(value.detach()).reshape(()).clone()
            record.returned_by = self._batch_values.path_of(value)
        elif isinstance(value, Real):
            record.value = float(value)
        if record.path is None and record.value is None:
            self._log(name, value, *args, **kwargs)  # raises lightning's own error here, where the call is written
            return
        self._parts[-1].records.append(record)

    def _pack(
        self, records: Sequence[LogCall], extra: Mapping[str, Tensor | int]
    ) -> tuple[Structure, list[Any], list[float]]:
        entries, values, numbers = [], [], []
        for record in records:
            dtype = type_of(record.value)
            entries.append(
                Entry(
                    record.name,
                    dtype,
                    record.batch_size is not None,
                    record.path,
                    tuple(sorted(record.options.items())),
                )
            )
            values += [] if record.value is None else [record.value]
            numbers += [] if record.batch_size is None else [record.batch_size]
        further: list[tuple[str, torch.dtype | None]] = []
        for name, item in extra.items():
            if isinstance(item, Tensor):
                values.append(plain(item.detach()).reshape(()))
            else:
                numbers.append(item)
            further.append((name, item.dtype if isinstance(item, Tensor) else None))
        return (tuple(entries), tuple(further)), values, numbers

    def _replay(self, structure: Structure, values: Tensor, numbers: Sequence[float]) -> dict[str, Any]:
        scalars, counts = iter(values.unbind()), iter(numbers)
        entries, extras = structure
        for entry in entries:
            options = dict(entry.options)
            value: Any = None if entry.dtype is None else next(scalars).to(entry.dtype)
            if entry.has_batch_size:
                options["batch_size"] = next(counts)
            if entry.path is not None:
                metric = self._metric(entry.path)
                metric._forward_cache, value = value, metric
            self.module.log(entry.name, value, **options)
        return {name: next(counts) if dtype is None else next(scalars).to(dtype) for name, dtype in extras}

    # --- metrics ----------------------------------------------------------------------------------------------------

    def _metrics(self) -> Iterator[tuple[str, Metric]]:
        if not any(issubclass(kind, Metric) for kind in set(map(type, modules_of(self.module)))):
            return iter(())
        return ((path, item) for path, item in self.module.named_modules() if isinstance(item, Metric))

    def _metric(self, path: str) -> Metric:
        try:
            metric = self.module.get_submodule(path)
        except AttributeError:
            raise RuntimeError(
                f"the metric {path!r} was made on the last pipeline stage only; make it in __init__ or setup"
            ) from None
        assert isinstance(metric, Metric)
        return metric

    def adopt_metrics(self) -> None:
        """Let the module's metrics exchange their states with the ranks of `data_group` only."""
        exchange_metrics_over(self.data_group, self.module)

    def share_metrics(self) -> None:
        """Copy the states of all metrics from the last stage; from then on any rank may compute them.

        Happens by itself when an epoch ends. A metric computed by other code than a step or hook in the middle of an
        epoch is right on the last stage only.
        """
        self.adopt_metrics()
        if not self._metrics_changed:
            return
        self._metrics_changed = False
        states = self._broadcast.object(self._metric_states() if self.is_last else None)
        if not self.is_last:
            for path, state in states.items():
                metric = self._metric(path)
                vars(metric).update(tree_map(functools.partial(arrived, device=metric.device), state))

    def _metric_states(self) -> dict[str, dict[str, Any]]:
        for item in self.module.modules():
            if isinstance(item, MetricCollection):
                item.values(copy_state=False)  # metrics of one compute group share a state, of which one member knows
        metrics = dict(self._metrics())
        # An untouched metric is the same everywhere, except for one that a step has reset.
        sent = {path for path, metric in metrics.items() if metric.update_called or path in self._metrics_sent}
        self._metrics_sent = {path for path in sent if metrics[path].update_called}
        return {path: state_of(metrics[path]) for path in sent}

    def warn_once(self, key: str, message: str) -> None:
        """Log a warning, the first time that it is about `key`."""
        if key not in self._warned:
            self._warned.add(key)
            log.warning(message)

    def anywhere(self, condition: bool) -> bool:
        """Whether it holds on any rank of the group. Collective."""
        flag = torch.tensor(int(condition), device=host_device(self.device, self.group))
        dist.all_reduce(flag, dist.ReduceOp.MAX, self.group)
        return bool(flag)


def _number(batch_size: Any) -> float:
    """A `batch_size` as it was logged: a sum of weights need not be whole."""
    number = float(batch_size)
    return int(number) if number.is_integer() else number
