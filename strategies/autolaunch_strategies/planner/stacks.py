"""What is known of devices and of the software on them apart from one cluster: `cluster.generation`, `cluster.stack`.

The shares are measurements of kernels that others have published, not fits to trainings:

- `matmul`: what large products in bf16 keep up once a device is at its power limit ("MSMF" of Bekman's
  ml-engineering, compute/accelerator: 755 of 989.5 TFLOP/s on an H200, 1,429 of 2,250 on a B200; short bursts reach
  834 and 1,745, which no training is), over the 0.965 that products of 8,192 reach by `time.HALF_OUTPUT` and
  `HALF_INNER`. Of A100 only a burst is known (268 of 312): of that, the 0.905 that an H200 keeps of its own, over
  0.98. A device of the same kind with more power has a higher clock under load, as the square root of the power
  (GB200 1,200 W, GB300 1,400 W, B200 1,000 W), against a peak that is stated for the clock of its own data sheet.
- `attention`: forward pass and backward pass together (3.5 = 1 + 2.5 products), heads of 128, the longest sequences;
  what shorter ones reach of it follows `time.HALF_POSITIONS`. FlashAttention 2 on A100: 73 % and 63 % of the peak
  (arXiv 2307.08691), with a causal mask 0.905 of it, as on H100. On H100 (arXiv 2407.08608, figures 5 and 6, 16k
  positions, causal; TFLOP/s): FlashAttention 2 335 and 322, cuDNN 539 and 516. On B200 cuDNN 9.13 reaches 1,605 / 1.3
  forward (FlashAttention 4), and is taken to lose as much backward as on H100; FlashAttention 2 knows nothing of
  Blackwell, and is taken to make no more of a B200's multiprocessors than of an H100's.
- `attention_width`: what heads of 64 reach of heads of 128 with a causal mask, forward, in the same figures: cuDNN 388
  of 539, FlashAttention 2 299 of 335 (heads of 256: no faster than of 128).
- `fp8`: the share of what bf16 reaches. On H200 (bursts, the same table) 1,453 of 1,979 beside 794.5 of 989.5 TFLOP/s.
  On B200 both at its power limit for 60 s (cuBLASLt 13.8, mit-orcd/orcd-benchmarks, b300-nodes, October 2026): 2,524 of
  4,500 beside 1,396 of 2,250; a B300 of 1,100 W keeps 0.88 up, and is no generation of its own here. What scaling and
  casting take is not in it: `time` counts their bytes.

torch takes cuDNN's attention first on Hopper and Blackwell since cuDNN 9.15 (`check_prefer_cudnn_attention` in
aten/native/transformers/cuda/sdp_utils.cpp), before that FlashAttention 2: `torch_2024`. Megatron's comes from
Transformer Engine, which takes cuDNN's there, too. What else tells the stacks apart (overlaps, host time) is no
measurement of a kernel: those figures were chosen in sight of published trainings. Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

GENERATIONS: Mapping[str, Mapping[str, float]] = MappingProxyType(
    {
        "ampere": {"matmul": 0.79, "attention": 0.60, "attention_width": 18.0},
        "hopper": {"matmul": 0.79, "attention": 0.53, "fp8": 0.91},
        "blackwell": {"matmul": 0.66, "attention": 0.54, "fp8": 0.90},
        # Peaks of GB200 are stated for a clock that is 2,500 / 2,250 times that of a B200.
        "grace_blackwell": {"matmul": 0.65, "attention": 0.54, "fp8": 0.90},
        "blackwell_ultra": {"matmul": 0.70, "attention": 0.54, "fp8": 0.90},
    }
)
"""Generation of a device -> constants that are not the usual ones, with the newest kernels."""

STACKS: Mapping[str, Mapping[str, float]] = MappingProxyType(
    {
        "torch": {},
        "torch_2024": {},
        # Exchanges of tensor parallelism and sends overlap with products.
        "megatron": {"hidden_mp": 0.6, "hidden_pp": 0.8},
        # Eager code with much Python around each kernel; gradients are exchanged after the backward pass.
        "megatron_2021": {"kernel_s": 30e-6, "hidden_dp": 0.1},
    }
)
"""`cluster.stack` -> constants that are not the usual ones, on any device. torch is what this runtime is."""

TORCH = "torch"

MOST_DEVICES = 2**20
"""Of a cluster: more than any has, and few enough for all ways to use them to be listed soon."""

NATIVE_STACKS = ("torch", "torch_2024")
"""Stacks in which fp8 is torchao's: kernels are fused by the compiler alone, and stacked experts multiply in bf16."""

CAST_WEIGHTS_ONCE = ("megatron", "megatron_2021")
"""Stacks that bring weights to fp8 once a step (Transformer Engine's `is_first_microbatch`)."""

_OLDER_KERNELS: Mapping[tuple[str, str], Mapping[str, float]] = MappingProxyType(
    {
        ("torch_2024", "hopper"): {"attention": 0.33, "attention_width": 18.0},
        ("torch_2024", "blackwell"): {"attention": 0.16, "attention_width": 18.0},
        ("torch_2024", "grace_blackwell"): {"attention": 0.14, "attention_width": 18.0},
        ("torch_2024", "blackwell_ultra"): {"attention": 0.14, "attention_width": 18.0},
    }
)


def constants_of(stack: str, generation: str | None) -> dict[str, float]:
    """Name of `Constants` -> value, of those that are not the usual ones.

    Args:
        stack: of `STACKS`.
        generation: of `GENERATIONS`; None where nothing is known of it (a CPU, another maker's devices).
    """
    known = GENERATIONS.get(generation or "", {})
    return {**known, **STACKS[stack], **_OLDER_KERNELS.get((stack, generation or ""), {})}
