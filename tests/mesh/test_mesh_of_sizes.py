"""A mesh that is written as a mapping in a script."""

from __future__ import annotations

from typing import Any

import pytest

from autolaunch_strategies.config import ConfigError, parallel_config, parse_mesh


@pytest.mark.parametrize(
    "sizes, text",
    [
        ({"dp": 4, "mp": 2}, "4x2"),
        ({"dp": 2, "tp": 2}, "2x2"),
        ({"pp": 2, "dp": -1}, "dp-1xpp2"),
        ({}, "1"),
    ],
)
def test_axes_are_read_by_any_of_their_spellings(sizes: dict[str, Any], text: str) -> None:
    assert parallel_config(sizes).mesh == parse_mesh(text)


def test_the_order_of_ranks_is_a_key_as_well() -> None:
    assert parallel_config({"dp": 2, "order": ["mp", "dp", "cp", "pp"]}).mesh == parse_mesh("2", "mp,dp,cp,pp")


@pytest.mark.parametrize(
    "sizes, where, allowed",
    [
        ({"dp": 2, "ddp": 2}, "mesh.ddp", "dp, mp, pp, cp"),
        ({"dp": 2.0}, "mesh.dp=2.0", "a whole number of 1 or more"),
        ({"dp": "2"}, "mesh.dp=2", "a whole number of 1 or more"),
        ({"dp": True}, "mesh.dp=True", "a whole number of 1 or more"),
        ({"dp": -2}, "mesh.dp=-2", "a whole number of 1 or more"),
        ({"dp": 0}, "mesh=dp0", "every size is 1 or more"),
        ({"mp": 2, "tp": 2}, "mesh=mp2xtp2", "by name"),
        ({"dp": -1, "mp": -1}, "mesh=dp-1xmp-1", "one may be -1"),
    ],
)
def test_what_is_no_mesh_is_refused(sizes: dict[str, Any], where: str, allowed: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parallel_config(sizes)
    assert caught.value.where == where
    assert allowed in caught.value.allowed
