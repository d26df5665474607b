"""How many workers this machine has room for: its CPUs and NVIDIA GPUs, without importing torch or touching CUDA."""

import os
from pathlib import Path


def cpu_count() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0))


def gpu_count() -> int:
    """GPUs that a worker would see: those of the driver, less what CUDA_VISIBLE_DEVICES hides."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        present = len(os.listdir(Path("/proc/driver/nvidia/gpus")))
    except OSError:
        return 0
    if visible is None:
        return present
    return min(present, len([name for name in visible.split(",") if name.strip() not in ("", "-1")]))
