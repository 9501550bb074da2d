"""Which sequences make up which batch."""

from __future__ import annotations

import numpy as np
import pytest

from autolaunch.data.order import BatchOrder, permuted


@pytest.mark.parametrize("n", [*range(1, 70), 127, 128, 129, 1000, 4095, 4097, 100_003])
@pytest.mark.parametrize("seed, epoch", [(0, 0), (7, 3), (2**70, 1)])
def test_every_number_is_hit_once(n: int, seed: int, epoch: int) -> None:
    image = permuted(np.arange(n), n, seed, epoch)
    assert image.dtype == np.int64
    np.testing.assert_array_equal(np.sort(image), np.arange(n))


def test_the_order_is_that_of_a_random_permutation() -> None:
    n = 20_000
    orders = [permuted(np.arange(n), n, seed, epoch) for seed in range(3) for epoch in range(3)]
    for number, order in enumerate(orders):
        assert abs(np.corrcoef(np.arange(n), order)[0, 1]) < 0.03
        steps = np.diff(order)
        assert len(np.unique(steps)) > n / 3  # a linear map would have a few
        for other in orders[:number]:
            assert (order == other).sum() < 10  # one fixed point is expected
            assert abs(np.corrcoef(order, other)[0, 1]) < 0.03


def test_small_permutations_are_equally_likely() -> None:
    seeds = 6000
    seen = [tuple(permuted(np.arange(3), 3, seed, 0)) for seed in range(seeds)]
    counts = np.array([seen.count(order) for order in sorted(set(seen))])
    assert len(counts) == 6
    expected = seeds / 6
    assert ((counts - expected) ** 2 / expected).sum() < 20.5  # chi square, 5 degrees of freedom, p = 0.001


def test_billions_need_no_table() -> None:
    n = 3 * 10**15
    first = permuted(np.arange(1000), n, 0, 0)
    assert len(np.unique(first)) == 1000 and first.min() >= 0 and n / 2 < first.max() < n
    assert permuted(17, n, 0, 0) == first[17]
    order = BatchOrder(n, batch_size=8, microbatches=2)
    assert order.indices(len(order) * 5 + 3).shape == (4,)


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("microbatches", [1, 2, 3])
def test_every_dp_size_sees_the_same_microbatches(shuffle: bool, microbatches: int) -> None:
    def microbatch(number: int, dp_size: int) -> list[int]:
        parts = [
            BatchOrder(100, 12 * 2, microbatches, 5, shuffle, rank, dp_size).indices(number) for rank in range(dp_size)
        ]
        assert {len(part) for part in parts} == {24 // microbatches // dp_size}
        return np.concatenate(parts).tolist()

    for number in range(30):
        assert microbatch(number, 1) == microbatch(number, 2) == microbatch(number, 4)


def test_microbatches_cut_the_batch_of_a_step() -> None:
    whole, cut = BatchOrder(50, 8, 1, 3), BatchOrder(50, 8, 4, 3)
    for step in range(15):
        parts = [cut.indices(4 * step + part) for part in range(4)]
        np.testing.assert_array_equal(np.concatenate(parts), whole.indices(step))


def test_epochs_cover_the_data_and_differ() -> None:
    order = BatchOrder(50, 8, 2, seed=1)
    assert len(order) == 12  # 6 whole steps; 2 sequences are left over
    epochs = [np.concatenate([order.indices(12 * epoch + number) for number in range(12)]) for epoch in range(3)]
    assert [len(set(epoch.tolist())) for epoch in epochs] == [48] * 3
    assert len({tuple(epoch) for epoch in epochs}) == 3
    dropped = {tuple(sorted(set(range(50)) - set(epoch.tolist()))) for epoch in epochs}
    assert len(dropped) > 1
    other = BatchOrder(50, 8, 2, seed=2)
    assert other.indices(0).tolist() != order.indices(0).tolist()


def test_unshuffled_batches_follow_the_data() -> None:
    order = BatchOrder(10, 4, 2, shuffle=False)
    assert [order.indices(number).tolist() for number in range(5)] == [[0, 1], [2, 3], [4, 5], [6, 7], [0, 1]]
