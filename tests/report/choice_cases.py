"""Choices of a planner as plain data, usual and unusual, for the tests of what is shown of them."""

from __future__ import annotations

from typing import Any

from autolaunch_strategies.planner.choose import make_plan
from autolaunch_strategies.planner.hardware import Hardware, Link
from autolaunch_strategies.planner.plan import Plan
from autolaunch_strategies.planner.profile import Recipe
from tests.support.transformer_profile import transformer_profile

GIB = 2.0**30

PARTS = {
    "compute": 2.31,
    "attention": 0.412,
    "elementwise": 0.29,
    "kernels": 0.0,
    "mp": 0.55,
    "cp": 0.0,
    "pp": 0.021,
    "bubble": 0.40,
    "dp": 0.12,
    "optimizer": 0.061,
    "fixed": 0.046,
}


def stage(pipe_rank: int, blocks: int, activations: float, loss: float = 0.0) -> dict[str, Any]:
    kinds = {
        "parameters": 2.2 * GIB,
        "gradients": 4.4 * GIB,
        "optimizer": 6.6 * GIB,
        "activations": activations * GIB,
        "loss": loss * GIB,
        "other": 3.1 * GIB,
    }
    return {"pipe_rank": pipe_rank, "blocks": blocks, **kinds, "total": sum(kinds.values())}


def alternative(mesh: str, seconds: float, memory: float, *options: str, fits: str = "yes", note: str = "") -> Any:
    parts = {**PARTS, "bubble": 0.0}
    parts["bubble"] = max(seconds - sum(parts.values()), 0.0)
    return {
        "overrides": [f"mesh={mesh}", *options],
        "mesh": mesh,
        "seconds": seconds,
        "slower_by": seconds / 4.21 - 1,
        "memory_bytes": memory * GIB,
        "fits": fits,
        "parts": parts,
        "note": note,
    }


LAST = ("recompute=none", "data.microbatches=1")
OPTIONS = ("dp=zero1", "mp=seq_parallel", "pp=interleaved_1f1b", "pp.virtual_stages=5")
PARTED = (*OPTIONS, "pp.microbatches=32", *LAST)


def usual() -> dict[str, Any]:
    """A large training: 1,024 devices, all axes but cp."""
    stages = [stage(rank, 10, activations=40 - 4 * rank, loss=9.5 * (rank == 7)) for rank in range(8)]
    alternatives = [
        alternative("16x8x8", 4.18, 66.1, *OPTIONS, "pp.microbatches=64", *LAST, note="within the noise"),
        alternative("32x8x4", 4.31, 71.9, *PARTED, fits="tight"),
        alternative("8x8x16", 4.44, 44.0, *PARTED),
        alternative("32x4x8", 4.52, 73.1, *PARTED[:-2], "recompute=selective", LAST[1], fits="tight"),
        alternative("64x8x1x2", 4.90, 70.0, "dp=hsdp", "dp.replicate=8", "mp=seq_parallel", "cp=ring", *LAST),
        alternative("128x8", 5.63, 68.2, "dp=fsdp", "mp=seq_parallel", "recompute=full", "data.microbatches=2"),
    ]
    chosen = {
        "overrides": ["mesh=16x8x8", *PARTED],
        "mesh": "16x8x8",
        "ranks": 1024,
        "seconds": 4.21,
        "seconds_low": 3.81,
        "seconds_high": 4.66,
        "tokens_per_second": 1.99e6,
        "mfu": 0.431,
        "memory_bytes": stages[0]["total"],
        "memory_limit_bytes": 74 * GIB,
        "parts": dict(PARTS),
        "stages": stages,
        "reasons": [
            "mp 8 fills a node: its exchange stays within the fast domain of 8 devices.",
            "8 stages, because with 4 the fullest rank would need 81.3 GiB of 74.0 GiB.",
            "Nothing is recomputed: it fits without, and recomputing everything would cost 27 % more time.",
        ],
    }
    front = [chosen, alternatives[2]] + [
        alternative("8x8x16", 4.6 + 0.3 * n, 40 - 4 * n, *PARTED[:-2], f"recompute={8 - n or 'full'}") for n in range(9)
    ]
    return {
        "chosen": chosen,
        "alternatives": alternatives,
        "pareto": [{key: row[key] for key in ("seconds", "memory_bytes", "mesh", "overrides")} for row in front],
        "plateau": {"1%": 27, "3%": 60, "5%": 208, "10%": 715},
        "counts": {
            "considered": 41_400,
            "fit": 9_712,
            "may_fit": 4_568,
            "too_large": 27_120,
            "rejected": {
                "virtual_stages": 27_120,
                "heads % mp": 3_211,
                "blocks < stages": 1_204,
                "microbatches % pp": 152,
                "positions % (2 * cp)": 1,
            },
        },
        "hardware": {"name": "h100", "nodes": 128, "devices_per_node": 8, "origin": "built in"},
        "model": {
            "name": "llama 70b",
            "parameters": 70_553_706_496,
            "positions": 8192,
            "batch_size": 1024,
            "flops_per_step": 3.8e18,
        },
        "warnings": ["The figures of h100 are built in: `autolaunch calibrate` measures these machines."],
    }


def one_device() -> dict[str, Any]:
    """The smallest: one device, one part, microseconds, nothing else possible."""
    chosen = {
        "overrides": ["mesh=1", "dp=ddp", *LAST],
        "mesh": "1",
        "ranks": 1,
        "seconds": 1.04e-4,
        "seconds_low": 1e-4,
        "seconds_high": 1.1e-4,
        "tokens_per_second": 42.5,
        "mfu": 0.0001,
        "memory_bytes": 3 * 2.0**20,
        "memory_limit_bytes": 4 * GIB,
        "parts": {**dict.fromkeys(PARTS, 0.0), "compute": 1.04e-4},
        "stages": [{"pipe_rank": 0, "blocks": 2, "parameters": 3 * 2.0**20, "total": 3 * 2.0**20}],
        "reasons": [],
    }
    return {
        "chosen": chosen,
        "alternatives": [],
        "pareto": [{key: chosen[key] for key in ("seconds", "memory_bytes", "mesh", "overrides")}],
        "plateau": {"1%": 1},
        "counts": {"considered": 1, "fit": 1, "rejected": {}},
        "hardware": {"name": "local", "nodes": 1, "devices_per_node": 1, "origin": "calibrated"},
        "model": {"name": "llama debug", "parameters": 812, "positions": 8, "batch_size": 1, "flops_per_step": 1e6},
        "warnings": [],
    }


def huge() -> dict[str, Any]:
    """16,384 ranks, 64 stages, a step of a quarter of an hour, and names that go on and on."""
    choice = usual()
    mesh = "32x8x64"
    cuts = "pp.split_spec={" + ", ".join(f"model.layers.{n}: END" for n in range(2, 126, 2)) + "}"
    overrides = [f"mesh={mesh}", *OPTIONS, cuts, "recompute=7", "data.microbatches=1"]
    stages = [stage(rank, 2 - (rank in (0, 63)), 60 - 0.8 * rank, loss=20.0 * (rank == 63)) for rank in range(64)]
    scale = 1004.0 / 4.21
    choice["chosen"] |= {
        "overrides": overrides,
        "mesh": mesh,
        "ranks": 16_384,
        "seconds": 1004.0,
        "seconds_low": 780.0,
        "seconds_high": 1290.0,
        "parts": {name: seconds * scale for name, seconds in PARTS.items()},
        "stages": stages,
        "memory_bytes": max(item["total"] for item in stages),
    }
    for row in choice["alternatives"]:
        row |= {
            "seconds": row["seconds"] * scale,
            "mesh": "128x8x16x16",
            "overrides": [*overrides, "cp=usp", "cp.ulysses=4"],
        }
        row["parts"] = {name: seconds * scale for name, seconds in row["parts"].items()}
    choice["pareto"] = [
        {
            "seconds": 1004.0 * (1 + n / 40),
            "memory_bytes": (75 - 0.4 * n) * GIB,
            "mesh": mesh if n == 0 else f"{128 * (1 + n % 3)}x8x16x8",
            "overrides": overrides if n == 0 else [f"mesh={128 * (1 + n % 3)}x8x16x8", f"recompute={n}"],
        }
        for n in range(120)
    ]
    choice["model"]["name"] = "organisation/" + "a-very-long-name-of-a-model-" * 6
    choice["hardware"] |= {"nodes": 2048}
    return choice


def nothing_fits() -> dict[str, Any]:
    """No way to run it."""
    choice = usual()
    choice["chosen"] = None
    choice["pareto"] = []
    choice["plateau"] = {}
    choice["counts"]["fit"] = 0
    for row in choice["alternatives"]:
        row |= {"fits": "no", "note": "needs 12.1 GiB more"}
    return choice


STRANGE = "модель <script>alert('1')</script> & \"模型\" ]]> \\ [red]"


def strange() -> dict[str, Any]:
    """Names and sentences with signs that mean something in HTML, XML, in a shell and to rich; parts nobody knows."""
    choice = usual()
    choice["model"]["name"] = STRANGE
    choice["hardware"]["name"] = choice["hardware"]["origin"] = STRANGE
    choice["warnings"] = [STRANGE]
    chosen = choice["chosen"]
    chosen["reasons"] = [STRANGE]
    chosen["overrides"] = [*chosen["overrides"], f"mp.plan={STRANGE}"]
    chosen["parts"] = {**chosen["parts"], STRANGE: 0.5, "unseen": 0.0}
    choice["counts"]["rejected"][STRANGE] = 7
    choice["alternatives"][0] |= {"note": STRANGE, "overrides": [STRANGE], "mesh": STRANGE}
    choice["pareto"][2] |= {"mesh": STRANGE, "overrides": [STRANGE]}
    return choice


CHOICES = {
    "usual": usual,
    "one-device": one_device,
    "huge": huge,
    "nothing-fits": nothing_fits,
    "strange": strange,
}


def planned(devices: int) -> Plan:
    """What the planner chooses for a model of 8 blocks on so many GPUs."""
    links = {"intra": Link(450e9, 5e-6), "inter": Link(50e9, 10e-6)}
    machines = Hardware(
        "gpus", "cuda", max(devices // 8, 1), min(devices, 8), 80 * GIB, {"bf16": 9.9e14}, 3.3e12, **links
    )
    profile = transformer_profile(8, 1024, 16, 2048, 32_000, name="a model")
    return make_plan(profile, Recipe(batch_size=256, compute="bf16"), machines)


def explanation() -> dict[str, Any]:
    """Why something slower was not chosen."""
    return {
        "asked": "mp=4,pp=2",
        "found": True,
        "rank": 412,
        "of": 9712,
        "overrides": ["mesh=128x4x2", "dp=fsdp", "mp=seq_parallel", "pp=1f1b", "pp.microbatches=4", *LAST],
        "seconds": 5.31,
        "chosen_seconds": 4.21,
        "parts_difference": {"compute": 0.002, "mp": -0.21, "bubble": 0.0, "dp": 1.29, "fixed": 0.018},
        "memory_bytes": 70.2 * GIB,
        "memory_limit_bytes": 74 * GIB,
        "rejected": [],
        "sentences": ["It takes 26 % longer: parameters are gathered between nodes in every microbatch."],
    }


def refusal() -> dict[str, Any]:
    """Why something that can't run was not chosen."""
    return {
        "asked": "mp=16",
        "found": False,
        "rank": None,
        "of": 9712,
        "overrides": [],
        "seconds": None,
        "chosen_seconds": 4.21,
        "parts_difference": {},
        "memory_bytes": None,
        "memory_limit_bytes": 74 * GIB,
        "rejected": [{"rule": "heads % mp", "reason": "8 key heads can't be shared out over 16 ranks"}],
        "sentences": ["8 key heads can't be shared out over 16 ranks."],
    }
