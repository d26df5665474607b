"""How much memory the slots may still take; it knows files of the kernel, not slots."""

import math
import shutil
from pathlib import Path


def room_bytes(folder: Path) -> float:
    """Memory that may still be taken: of the file system, of the machine, of the container."""
    rooms = [float(shutil.disk_usage(folder).free)]
    lines = Path("/proc/meminfo").read_text().splitlines()
    rooms += [int(line.split()[1]) * 1024.0 for line in lines if line.startswith("MemAvailable:")]
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        if limit != "max":
            rooms.append(float(limit) - float(Path("/sys/fs/cgroup/memory.current").read_text()))
    except (OSError, ValueError):
        rooms.append(math.inf)
    return min(rooms)
