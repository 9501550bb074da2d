"""The end of a script of cases: runs on this rank those that are asked for, and writes down what each returned."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import json
import logging
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from tests.support.ranks import STACK_SIGNAL

RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
OUT = Path(sys.argv[1]) if len(sys.argv) > 1 else Path()
"""Where ranks write, in a script of cases."""

Case = Callable[[], Any]


@contextlib.contextmanager
def no_compiler() -> Iterator[None]:
    """Meanwhile torch.compile captures, and differentiates what it captured, but compiles no C++ (minutes of it)."""
    import torch

    inductor = torch.compile
    torch.compile = functools.partial(inductor, backend="aot_eager")
    try:
        yield
    finally:
        torch.compile = inductor


MOST_GROUPS = 40
KNOW_MESHES = ("torch.distributed", "autolaunch_strategies")


def _end_groups(ended: int) -> int:
    """End what cases have made of groups, if they are many: each has a thread that wakes every few milliseconds.

    With those of hundreds of cases the processors would do little else.

    Args:
        ended: how many this process had made when it ended them last.

    Returns:
        The same from now on.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import debug

    forget_shardings = getattr(debug, "_clear_sharding_prop_cache", None)
    if forget_shardings is None or not dist.is_initialized():
        return 0
    world = dist.distributed_c10d._world
    if world.group_count - ended < MOST_GROUPS:
        return ended
    dist.barrier()  # nobody needs them any more
    forget_shardings()
    if "torch._dynamo" in sys.modules:  # compiled code has names of groups in it
        torch._dynamo.reset()
    gc.collect()
    for item in gc.get_objects():  # what knows a mesh takes an equal one of a later case for it
        if type(item) is functools._lru_cache_wrapper and str(item.__module__).startswith(KNOW_MESHES):
            item.cache_clear()
    gc.collect()
    for group in [group for group in world.pg_map if group is not dist.group.WORLD]:
        dist.destroy_process_group(group)
    gc.collect()
    return int(world.group_count)


def serve(groups: Mapping[str, Mapping[str, Case]], *, tensors: bool = False) -> NoReturn:
    """Be `<script> <directory> <group>`: for each line of the standard input run the case of that name.

    Writes `<case>.<rank>.json` to the directory, with the result or the error, and the processor seconds it took.

    Args:
        groups: name of a group -> name of a case -> its function.
        tensors: whether results are written by torch.save instead of as JSON.
    """
    import torch

    faulthandler.enable()  # a process that ends by a signal tells where it stood
    stack = (OUT / f".stack.{RANK}").open("w")
    faulthandler.register(STACK_SIGNAL, stack, all_threads=False)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    ended = 0
    for line in sys.stdin:
        name = line.rstrip("\n")
        ended = _end_groups(ended)  # here, as ranks are stopped as soon as all have written
        torch.manual_seed(1)
        started = time.process_time()
        try:
            result: dict[str, Any] = {"result": groups[sys.argv[2]][name]()}
        except BaseException as error:
            result = {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
        result["seconds"] = time.process_time() - started
        part = OUT / f".{name}.{RANK}"
        if tensors:
            torch.save(result, part)
        else:
            part.write_text(json.dumps(result))
        part.replace(OUT / f"{name}.{RANK}.json")
        if "error" in result:  # others may wait for this rank, or not: nobody knows where they stand
            print(f"{name} on rank {RANK}:\n{result['traceback']}", flush=True)
            os._exit(1)
    os._exit(0)  # gloo's threads may outlive the interpreter's end
