"""What batches count in an optimizer step by their items, without a Trainer."""

from __future__ import annotations

import pytest
import torch

from autolaunch_strategies.lightning.items import ItemCounts
from autolaunch_strategies.training.weights import weighed


@pytest.mark.parametrize(
    ("counts", "batches"),
    [([6, 2, 4], 3), ([0, 2, 4], 3), ([0, 0, 0], 3), ([6, 2], 3), ([5], 1), ([0], 1)],
    ids=["unequal", "none-first", "none", "last-of-an-epoch", "one", "one-without"],
)
def test_a_step_is_the_mean_over_its_items(counts: list[int], batches: int) -> None:
    items = ItemCounts(lambda batch: batch, None)
    items.begin(9, 0, batches)  # of the step before
    total = torch.zeros((), dtype=torch.float64)
    for number, count in enumerate(counts):
        mean = torch.tensor(float(number + 1) if count else 0.0, dtype=torch.float64)
        for _ in range(2):  # an optimizer may ask for the same batch again
            items.begin(count, number, batches)
        total += weighed(mean / batches, items.loss_weight)  # as lightning divides
    expected = sum((number + 1) * count for number, count in enumerate(counts)) / max(sum(counts), 1)
    assert float(total * items.step_scale) == pytest.approx(expected)


def test_weights_that_change_nothing_cost_nothing() -> None:
    items = ItemCounts(lambda batch: pytest.fail("it need not be counted"), None)
    items.begin(None)
    loss = torch.ones(())
    assert weighed(loss, items.loss_weight) is loss
    assert items.step_scale == 1


def test_types_stay() -> None:
    weight = torch.tensor(0.5, dtype=torch.float64)
    assert weighed(torch.ones((), dtype=torch.bfloat16), weight).dtype == torch.bfloat16
    assert weighed(torch.tensor(3), weight) == 1.5
