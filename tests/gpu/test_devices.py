"""Which GPUs answer."""

from __future__ import annotations

from autolaunch.machine.devices import gpus_that_answer, visible_gpus


def test_a_gpu_that_is_not_there_does_not_answer() -> None:
    gpus = visible_gpus()
    assert gpus_that_answer([*gpus, "99"]) == gpus != []
