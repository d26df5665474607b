"""What checkpoints weigh: bytes, memory for a copy in each host, and the bandwidth to save and load them.

Bytes are decimal (1 TB = 1e12). It assumes that the state is spread evenly over all GPUs and written once.
"""

from dataclasses import dataclass

BYTES_PER_PARAMETER = 14.0
"""bf16 weights, fp32 master weights and two fp32 Adam moments: 2 + 4 + 4 + 4. 12 without the bf16 copy, 16 with fp32
gradients."""
LLAMA3_GPU_CEILING_BYTES = 4e9
"""Llama 3: "ranging from 1 MB to 4 GB per GPU" (arXiv 2407.21783, section 3.3.1)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointCost:
    """One checkpoint.

    Attributes:
        write_s: to write it at the storage's bandwidth: the pause of a synchronous save, and the least interval of an
            asynchronous one.
        load_s: to load it when all hosts load at once at the same bandwidth, each its own part.
        bandwidth_bytes_per_s: needed to write one per interval.
        host_memory_bytes: for one copy of its part in each host's memory; a second one, while the next is taken,
            doubles it.
    """

    total_bytes: float
    gpu_bytes: float
    write_s: float
    load_s: float
    bandwidth_bytes_per_s: float
    host_memory_bytes: float


def checkpoint_cost(
    *,
    parameters: float,
    bytes_per_parameter: float,
    gpu_count: int,
    gpus_per_host: int,
    storage_bytes_per_s: float,
    interval_s: float,
) -> CheckpointCost:
    """The cost of one checkpoint of a model of `parameters`."""
    total_bytes = parameters * bytes_per_parameter
    gpu_bytes = total_bytes / gpu_count
    write_s = total_bytes / storage_bytes_per_s
    return CheckpointCost(
        total_bytes=total_bytes,
        gpu_bytes=gpu_bytes,
        write_s=write_s,
        load_s=write_s,
        bandwidth_bytes_per_s=total_bytes / interval_s if interval_s > 0 else float("inf"),
        host_memory_bytes=gpu_bytes * gpus_per_host,
    )
