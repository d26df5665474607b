"""The taxonomy of interruptions: Llama 3's published table, and the causes that everstep itself can tell apart.

Table 5 and section 3.3.4 of "The Llama 3 Herd of Models" (arXiv 2407.21783). The counts sum to 419; the paper's printed
percentages disagree with its counts in one row (Faulty GPU: 148/419 = 35.3 %, printed 30.1 %): shares come from counts.
"""

from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """Why a job was interrupted, in the two columns of Llama 3's table.

    Attributes:
        component: what failed, such as `NIC`.
        category: the group it belongs to, such as `Host`.
    """

    component: str
    category: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedCount:
    """A row of Llama 3's table: how often a cause interrupted 16,384 GPUs in 54 days."""

    cause: Cause
    count: int
    fault: "FaultKind"
    """The fault on real processes that stands for it in `everstep demo`: it shows the launcher the same face."""

    @property
    def share(self) -> float:
        """The row's share of all 419 unexpected interruptions, from the counts."""
        return self.count / LLAMA3_UNEXPECTED_COUNT


class FaultKind(StrEnum):
    """What the fault injector can do to a worker. Every one is real: a signal, an exception, a crash, a block."""

    KILL = "kill"
    """SIGKILL."""
    FREEZE = "freeze"
    """SIGSTOP."""
    EXCEPTION = "exception"
    """The script raises."""
    EXIT = "exit"
    """The process leaves silently with code 0."""
    SEGFAULT = "segfault"
    """A null pointer is read in native code."""
    GIL = "gil"
    """A C call that never returns holds Python's global lock."""
    SLEEP = "sleep"
    """The rank sleeps before its next collective."""
    LOADER = "loader"
    """The data loader never delivers the next batch."""
    MAINTENANCE = "maintenance"
    """SIGTERM, as a host gets when it is drained."""


def _row(component: str, category: str, count: int, fault: FaultKind) -> PublishedCount:
    return PublishedCount(cause=Cause(component=component, category=category), count=count, fault=fault)


LLAMA3: tuple[PublishedCount, ...] = (
    _row("Faulty GPU", "GPU", 148, FaultKind.KILL),
    _row("GPU HBM3 Memory", "GPU", 72, FaultKind.SEGFAULT),
    _row("Software Bug", "Dependency", 54, FaultKind.EXCEPTION),
    _row("Network Switch/Cable", "Network", 35, FaultKind.SLEEP),
    _row("Host Maintenance", "Unplanned Maintenance", 32, FaultKind.MAINTENANCE),
    _row("GPU SRAM Memory", "GPU", 19, FaultKind.SEGFAULT),
    _row("GPU System Processor", "GPU", 17, FaultKind.FREEZE),
    _row("NIC", "Host", 7, FaultKind.FREEZE),
    _row("NCCL Watchdog Timeouts", "Unknown", 7, FaultKind.GIL),
    _row("Silent Data Corruption", "GPU", 6, FaultKind.EXCEPTION),
    _row("GPU Thermal Interface + Sensor", "GPU", 6, FaultKind.FREEZE),
    _row("SSD", "Host", 3, FaultKind.LOADER),
    _row("Power Supply", "Host", 3, FaultKind.KILL),
    _row("Server Chassis", "Host", 2, FaultKind.KILL),
    _row("IO Expansion Board", "Host", 2, FaultKind.LOADER),
    _row("Dependency", "Dependency", 2, FaultKind.EXIT),
    _row("CPU", "Host", 2, FaultKind.GIL),
    _row("System Memory", "Host", 2, FaultKind.KILL),
)
LLAMA3_UNEXPECTED_COUNT = sum(row.count for row in LLAMA3)
LLAMA3_DAYS = 54
LLAMA3_GPU_COUNT = 16_384
LLAMA3_PLANNED_COUNT = 47
LLAMA3_MANUAL_COUNT = 3
LLAMA3_EFFECTIVE_SHARE = 0.90
"""The paper says "over 90 %"; no exact figure is published."""
