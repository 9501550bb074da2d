"""generate: how long texts become, with a model that is none. No process is started."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autolaunch.tasks.generation import Sampling, generate
from autolaunch_strategies.config import MeshShape


class Next:
    """A strategy of one rank of a mesh, whose model says the next number behind each token."""

    root_device = torch.device("cpu")
    rank_mesh = SimpleNamespace(coordinate=dict.fromkeys(("dp", "mp", "pp", "cp"), 0))

    def __init__(self, **sizes: int) -> None:
        self.shape = MeshShape(**sizes)

    def evaluate(self, step: str, tokens: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot(tokens[torch.arange(len(last)), last] + 1, 100).float()


@pytest.mark.parametrize("sizes", [{}, {"cp": 2}, {"mp": 2, "cp": 2}], ids=str)
@pytest.mark.parametrize("longest", [45, 40, None])
def test_no_mesh_makes_texts_shorter(sizes: dict[str, int], longest: int | None) -> None:
    strategy: Any = Next(**sizes)
    prompts = [[0], list(range(36))]
    short, long = generate(strategy, prompts, Sampling(max_new_tokens=12), longest=longest)
    assert short == list(range(1, 13)) and long == list(range(36, min(48, longest or 48)))
