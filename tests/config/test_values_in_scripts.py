"""What a script writes as a mapping is checked as what stands in YAML."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import yaml

from autolaunch.directories import CONF
from autolaunch_strategies.config import ConfigError, parallel_config
from autolaunch_strategies.config.data_parallel import DP_NAMES
from tests.support.messages import assert_told


@pytest.mark.parametrize(
    "axes, key, facts",
    [
        ({"dp": {"sharding_level": True}}, "dp.sharding_level=true", ["whole number"]),
        ({"dp": {"sharding_level": 4}}, "dp.sharding_level=4", ["choices"]),
        ({"dp": "fdsp"}, "dp=fdsp", ["no such way", "did you mean fsdp?"]),
        ({"dp": {"replicate": 0}}, "dp.replicate=0", ["out of range"]),
        ({"dp": {"cpu_offload": "yes"}}, "dp.cpu_offload=yes", ["true or false"]),
        ({"pp": {"microbatches": "4"}}, "pp.microbatches=4", ["whole number"]),
        ({"mp": {"plan": ["head"]}}, "mp.plan=[head]", ["mapping"]),
        ({"cp": {"ulysses": 1.5}}, "cp.ulysses=1.5", ["whole number"]),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_value_that_does_not_fit_is_refused(axes: dict[str, Any], key: str, facts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parallel_config("2", **axes)
    assert_told(caught.value, key, *facts, write=None)


@pytest.mark.parametrize("name", [*DP_NAMES])
def test_names_of_the_command_are_as_good(name: str) -> None:
    written = yaml.safe_load((CONF / "dp" / f"{name}.yaml").read_text())
    del written["defaults"]
    assert parallel_config("4", name).dp == parallel_config("4", written).dp
    assert {file.stem for file in (CONF / "dp").glob("[a-z]*.yaml")} == {*DP_NAMES}


def test_numbers_of_numpy_and_tuples_are_as_good() -> None:
    config = parallel_config("4", {"replicate": np.int64(2)}, pp={"split_spec": ("a", "b")})
    assert config.dp.replicate == 2 and type(config.dp.replicate) is int
    assert config.pp is not None and list(config.pp.split_spec) == ["a", "b"]
