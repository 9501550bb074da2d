"""Which dim of a tensor of a module's own is the sequence, also where others have the length of a part by chance."""

from __future__ import annotations

import pytest
import torch

from autolaunch_strategies.context.held_positions import Rows, held_of_part
from autolaunch_strategies.mesh.layout import Layout

LAYOUT = Layout(8, 2)
"""4 positions on each of two ranks: 0 1 6 7 on the first."""
FIRST, HEADS, WIDTH = Rows(4, 1), 4, 4
"""As many samples, heads and numbers as positions on a rank."""
SEQUENCE_FIRST = Rows(4, 0)


@pytest.mark.parametrize(
    ("shape", "rows", "expected"),
    [
        ((4, 4, WIDTH), FIRST, 1),
        ((4, 4, 12), SEQUENCE_FIRST, 0),
        ((4, 4, WIDTH), SEQUENCE_FIRST, 0),
        ((4, 4), FIRST, 1),
        ((4, HEADS, 4, 9), FIRST, 2),
        ((4, HEADS, 4, 4), SEQUENCE_FIRST, 2),
        ((2, 4, 12), Rows(2, 1), 1),
        ((1, 4, WIDTH), Rows(1, 1), 1),
        ((4 * HEADS, 4, 9), FIRST, 1),
        ((4, 12), Rows(12, 0), 0),
        ((4, WIDTH), Rows(WIDTH, 0), 0),
    ],
)  # fmt: skip
def test_the_sequence_is_found(shape: tuple[int, ...], rows: Rows, expected: int) -> None:
    ((dim, (entries, size)),) = held_of_part(shape, LAYOUT, 0, rows).items()
    assert dim == expected and entries.tolist() == [0, 1, 6, 7] and size == 8


@pytest.mark.parametrize("shape", [(4, 1, 1), (4, 1), (4,), (4, 12)])
def test_a_number_for_each_sample_is_whole(shape: tuple[int, ...]) -> None:
    assert held_of_part(shape, LAYOUT, 0, FIRST) == {}
    assert held_of_part((1, 4, 1), LAYOUT, 0, SEQUENCE_FIRST) == {}


def test_samples_flattened_into_the_sequence() -> None:
    batch_first, sequence_first = torch.arange(4 * 8).view(4, 8), torch.arange(8 * 4).view(8, 4)
    own = [0, 1, 6, 7]
    for width in (12, WIDTH):
        held = held_of_part((4 * 4, width), LAYOUT, 0, FIRST)
        assert list(held) == [0] and held[0][0].tolist() == batch_first[:, own].flatten().tolist() and held[0][1] == 32
        held = held_of_part((4 * 4, width), LAYOUT, 0, SEQUENCE_FIRST)
        assert list(held) == [0] and held[0][0].tolist() == sequence_first[own].flatten().tolist()
    held = held_of_part((4, WIDTH), LAYOUT, 0, Rows(1, 1))
    assert list(held) == [0] and held[0][0].tolist() == own and held[0][1] == 8


def test_what_is_no_sequence_is_whole() -> None:
    assert held_of_part((), LAYOUT, 0, FIRST) == {}
    assert held_of_part((3, 12), LAYOUT, 0, FIRST) == {}
