"""Groups of gloo have one thread each: two of them write to one string of torch's."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from autolaunch_strategies.torch_private.collectives import set_all_timeouts
from tests.support.one_rank import mesh_of_one_rank


@pytest.mark.parametrize("interfaces", ["", "lo"])
def test_every_group_completes_in_one_thread(interfaces: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", interfaces)
    with mesh_of_one_rank() as mesh:
        for group in (dist.group.WORLD, mesh.get_group(), dist.new_group([0])):
            assert group is not None
            backend = group._get_backend(torch.device("cpu"))
            assert backend.options._threads == 1
            assert isinstance(backend, dist.distributed_c10d.ProcessGroupGloo)
        set_all_timeouts(7)  # asks torch whether they are of gloo
        assert backend.options._timeout.total_seconds() == 7
        dist.all_reduce(torch.ones(2))
