"""Machines as YAML: every profile loads, numbers keep their units, and what is wrong is told with its key."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import yaml

from autolaunch_strategies.config import ConfigError
from autolaunch_strategies.planner.constants import Constants
from autolaunch_strategies.planner.hardware import Curve, Hardware, Link, hardware_from, hardware_to
from tests import ROOT
from tests.support.messages import Told, assert_only_told, assert_told

PROFILES = ROOT / "conf" / "cluster"
OWN = sorted(file.stem for file in PROFILES.glob("*.yaml") if "defaults" not in yaml.safe_load(file.read_text()))

SMALL: dict[str, Any] = {
    "name": "small",
    "device": "cpu",
    "memory_gib": 2,
    "peak_tflops": {"fp32": 0.5},
    "memory_gb_per_s": 10,
    "intra": {"gb_per_s": 4, "latency_us": 50},
}


def test_there_are_profiles() -> None:
    assert OWN == ["a100_40", "a100_80", "b200", "b300", "cpu", "gb200", "gb300", "h100", "h200"]


@pytest.mark.parametrize("name", OWN)
def test_profiles_load(name: str) -> None:
    values = yaml.safe_load((PROFILES / f"{name}.yaml").read_text(encoding="utf-8"))
    hardware = hardware_from(values)
    assert hardware.name == name
    assert hardware.origin == "built in"
    assert hardware.nodes == 1
    assert hardware.devices_per_node == (4 if name in ("gb200", "gb300") else 8)
    assert hardware.domain_size == (72 if name in ("gb200", "gb300") else 8)
    assert hardware.intra.bytes_per_s > hardware.inter.bytes_per_s
    assert hardware.intra.latency_s < hardware.inter.latency_s


@pytest.mark.parametrize(
    ("faster", "slower"),
    [("a100_80", "a100_40"), ("h100", "a100_80"), ("h200", "h100"), ("b200", "h200")],
)
def test_newer_devices_have_no_less_of_anything(faster: str, slower: str) -> None:
    new, old = (
        hardware_from(yaml.safe_load((PROFILES / f"{name}.yaml").read_text(encoding="utf-8")))
        for name in (faster, slower)
    )
    assert all(new.flops[name] >= value for name, value in old.flops.items())
    assert new.memory_bytes_per_s > old.memory_bytes_per_s
    assert new.intra.bytes_per_s >= old.intra.bytes_per_s


def test_units() -> None:
    hardware = hardware_from(
        {
            **SMALL,
            "nodes": 2,
            "inter": {"gb_per_s": 0.5, "latency_us": 200},
            "curves": {"all_reduce": [{"ranks": 2, "kib": [4, 1024], "us": [90, 700]}]},
        }
    )
    assert hardware.memory_bytes == 2 * 2**30
    assert hardware.flops == {"fp32": 0.5e12}
    assert hardware.memory_bytes_per_s == 10e9
    assert hardware.intra == Link(4e9, pytest.approx(50e-6))
    assert hardware.inter == Link(0.5e9, pytest.approx(200e-6))
    (curve,) = hardware.curves["all_reduce"]
    assert curve.bytes == (4096, 2**20)
    assert curve.seconds == pytest.approx((90e-6, 700e-6))


def test_one_node_needs_no_network_but_two_do() -> None:
    assert hardware_from(SMALL).inter == hardware_from(SMALL).intra
    with pytest.raises(ConfigError) as error:
        hardware_from({**SMALL, "nodes": 2})
    assert_told(error.value, "cluster.inter.gb_per_s", "must be given", write="cluster.inter.gb_per_s=...")


def test_round_trip() -> None:
    hardware = Hardware(
        name="x",
        device="cpu",
        nodes=3,
        devices_per_node=4,
        memory_bytes=5.3 * 2**30,
        flops={"fp32": 0.123456789e12, "bf16": 1e12 / 3},
        memory_bytes_per_s=1e10 / 7,
        intra=Link(1e9 / 3, 7e-5 / 3),
        inter=Link(1e8, 1e-3),
        domain=12,
        processors=2,
        curves={"p2p": (Curve(2, (4096.0, 65536.0), (1e-4 / 3, 2e-3 / 7)),)},
        constants=dataclasses.replace(Constants(), kernel_s=1e-5 / 3),
        origin="calibrated with 4 ranks",
    )
    written = hardware_to(hardware)
    assert written["constants"] == {"kernel_s": pytest.approx(1e-5 / 3)}
    again = hardware_from(yaml.safe_load(yaml.safe_dump(written)))
    assert hardware_to(again) == written
    for item in dataclasses.fields(Hardware):
        before, after = getattr(hardware, item.name), getattr(again, item.name)
        if isinstance(before, float):
            assert after == pytest.approx(before, rel=1e-9)
        elif item.name in ("name", "device", "nodes", "devices_per_node", "domain", "processors", "origin"):
            assert after == before
    assert again.flops == pytest.approx(hardware.flops, rel=1e-9)
    assert again.curves["p2p"][0].seconds == pytest.approx(hardware.curves["p2p"][0].seconds, rel=1e-9)
    assert again.constants.kernel_s == pytest.approx(hardware.constants.kernel_s, rel=1e-9)


@pytest.mark.parametrize("name", OWN)
def test_profiles_come_back_as_they_are(name: str) -> None:
    values = yaml.safe_load((PROFILES / f"{name}.yaml").read_text(encoding="utf-8"))
    assert hardware_to(hardware_from(values)) == values


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"memory": 3}, Told("cluster.memory", "memory_gib", write="cluster.memory_gib=3")),
        ({"memory_gib": None}, Told("cluster.memory_gib", "must be given", write="cluster.memory_gib=...")),
        ({"memory_gib": 0}, Told("cluster.memory_gib=0", "out of range", write="cluster.memory_gib=...")),
        ({"memory_gib": "much"}, Told("cluster.memory_gib=much", "out of range", write="cluster.memory_gib=...")),
        ({"nodes": 0}, Told("cluster.nodes=0", "out of range", write="cluster.nodes=1")),
        (
            {"devices_per_node": 1.5},
            Told("cluster.devices_per_node=1.5", "out of range", write="cluster.devices_per_node=1"),
        ),
        ({"device": "tpu"}, Told("cluster.device=tpu", "kind of device", write="cluster.device=cuda")),
        ({"peak_tflops": {}}, Told("cluster.peak_tflops", "must be given", write="cluster.peak_tflops.bf16=...")),
        (
            {"peak_tflops": {"fp64": 1}},
            Told("cluster.peak_tflops.fp64", "no such key", write="cluster.peak_tflops.fp16=1"),
        ),
        (
            {"intra": {"gb_per_s": 4}},
            Told("cluster.intra.latency_us", "must be given", write="cluster.intra.latency_us=..."),
        ),
        (
            {"intra": {"gb_per_s": -4, "latency_us": 1}},
            Told("cluster.intra.gb_per_s=-4", "out of range", write="cluster.intra.gb_per_s=..."),
        ),
        ({"intra": 4}, Told("cluster.intra=4", "mapping", write="cluster.intra={...}")),
        (
            {"devices_per_node": 8, "domain": 12},
            Told("cluster.domain=12", "nodes of 8 devices", write="cluster.domain=0"),
        ),
        (
            {"constants": {"matmull": 0.5}},
            Told("cluster.constants.matmull", "matmul", write="cluster.constants.matmul=0.5"),
        ),
        (
            {"constants": {"matmul": 0}},
            Told("cluster.constants.matmul=0", "out of range", write="cluster.constants.matmul=..."),
        ),
        ({"curves": {"reduce": []}}, Told("cluster.curves.reduce", "all_reduce", write="cluster.curves.all_reduce=[]")),
        (
            {"curves": {"p2p": [{"ranks": 2, "kib": [4, 8], "us": [1]}]}},
            Told("cluster.curves.p2p", "2 sizes", "1 times", write="{ranks: 2, kib: [4, 1024], us: [90, 700]}"),
        ),
        (
            {"curves": {"p2p": [{"ranks": 2, "kib": [8, 4], "us": [1, 2]}]}},
            Told("cluster.curves.p2p", "2 sizes", "2 times", write="{ranks: 2, kib: [4, 1024], us: [90, 700]}"),
        ),
    ],
    ids=lambda value: getattr(value, "key", None),
)
def test_what_is_wrong_is_told_by_its_key(changed: dict[str, Any], told: Told) -> None:
    with pytest.raises(ConfigError) as error:
        hardware_from({**SMALL, **changed})
    assert_only_told(error.value, told)
