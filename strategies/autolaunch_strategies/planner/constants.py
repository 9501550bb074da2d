"""What no data sheet says: efficiencies, overlaps and fixed costs, each with how uncertain it is."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def _constant(value: float, sigma: float, help: str) -> Any:
    """A constant with its usual value; `sigma` is the standard deviation of its logarithm; a share is at most 1."""
    most = 1.0 if help.startswith("Share") else math.inf
    return dataclasses.field(default=value, metadata={"sigma": sigma, "help": help, "most": most})


@dataclass(frozen=True)
class Constants:
    """Constants of the time and memory models. All are positive, so that they can be fitted as logarithms."""

    matmul: float = _constant(0.78, 0.15, "Share of the peak that large matrix products reach.")
    fp8: float = _constant(
        0.9, 0.15, "The same for products in fp8, casts aside, as a share of what other types reach."
    )
    # The best kernels for that reach what one product reaches (91 % of an H800's peak: arXiv 2501.16103). torch's, with
    # ragged rows, is taken to be a fifth slower: not measured yet.
    grouped: float = _constant(
        0.8, 0.2, "Share of the speed of one product of all their rows that products of experts in one kernel reach."
    )
    attention: float = _constant(0.5, 0.25, "Share of the peak that fused attention reaches.")
    attention_width: float = _constant(
        80.0, 0.2, "Width of heads with which attention is half as fast as with endlessly wide ones."
    )
    memory: float = _constant(0.8, 0.2, "Share of the memory bandwidth that elementwise kernels reach.")
    start_s: float = _constant(2e-6, 0.4, "Device seconds of a kernel beside what it moves: its start and its end.")
    kernel_s: float = _constant(8e-6, 0.5, "Host seconds to launch one kernel, eager.")
    mp_kernel_s: float = _constant(60e-6, 0.6, "Further host seconds of a kernel on what mp shards (DTensors).")
    intra: float = _constant(0.75, 0.15, "Share of the bandwidth that collectives within a domain reach.")
    inter: float = _constant(0.7, 0.3, "Share of the bandwidth that collectives between nodes reach.")
    p2p: float = _constant(0.7, 0.3, "Share of the bandwidth that sends between two devices reach.")
    latency: float = _constant(1.0, 0.3, "Multiple of the latencies of the links.")
    imbalance: float = _constant(
        1.3, 0.15, "Tokens of the busiest expert over those of the mean one, as expert_imbalance in metrics.csv."
    )
    hidden_dp: float = _constant(0.8, 0.2, "Share of the exchange over dp that computation hides at most.")
    hidden_mp: float = _constant(0.05, 0.5, "Share of the exchange over mp that computation hides.")
    hidden_cp: float = _constant(0.7, 0.3, "Share of the exchange over cp that attention hides at most (ring).")
    hidden_pp: float = _constant(0.5, 0.3, "Share of the sends between stages that computation hides.")
    group_s: float = _constant(150e-6, 0.6, "Host seconds for each group of sharded parameters, each time it is used.")
    action_s: float = _constant(150e-6, 0.6, "Host seconds of one action of a pipeline schedule.")
    cp_s: float = _constant(200e-6, 0.6, "Host seconds of one attention call over sharded sequences.")
    ep_s: float = _constant(200e-6, 0.6, "Seconds of sharing out tokens once: sorting, counts, the host's wait.")
    microbatch_s: float = _constant(300e-6, 0.6, "Seconds that every microbatch costs beyond its work.")
    step_s: float = _constant(5e-3, 0.7, "Seconds that every step costs beyond its microbatches.")
    slice_s: float = _constant(3e-3, 0.7, "Seconds for which ranks that share a processor run in turn.")
    context_bytes: float = _constant(2.0 * 2**30, 0.4, "Memory of a device that the runtime takes.")
    fragmentation: float = _constant(0.04, 0.5, "Share of the allocated memory that is lost between allocations.")

    def fullest(self, experts: int, ep: NDArray[np.int64]) -> NDArray[np.float64]:
        """[n]: tokens of the fullest of `ep` ranks over those of the mean one.

        What several experts of a rank have too many or too few evens out as in a sum of independent numbers.
        """
        import numpy as np  # pages that name constants need none

        return np.where(ep > 1, 1 + (self.imbalance - 1) / np.sqrt(max(experts, 1) / ep), 1.0)


TIME_CONSTANTS = tuple(
    item.name for item in dataclasses.fields(Constants) if item.name not in ("context_bytes", "fragmentation")
)
"""Those that `step_time` uses."""
