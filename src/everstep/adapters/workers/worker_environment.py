"""What a worker is told through its environment: torchrun's names for the script, one JSON variable for everstep's own.

The only file through which environment variables cross a process border.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from everstep.domain.errors import ConfigError

RUN_VARIABLE = "EVERSTEP_RUN"
"""The run's id, in the environment of all that the run starts: the guard finds orphans by it."""
_WORKER_VARIABLE = "EVERSTEP_WORKER"
_HUGE_PAGES_SINCE = (2, 35)
"""The first glibc whose malloc can ask for huge pages."""
_TUNABLES, _TORCH_HUGE_PAGES = "GLIBC_TUNABLES", "THP_MEM_ALLOC_ENABLE"
_COMPILE_CACHES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPaths:
    """Where a worker finds and leaves things; empty strings where a thing is not wanted.

    Attributes:
        run: the run's id.
        attempt, rank: what it is.
        page: its progress page.
        ring: its operation ring.
        server: unix socket for its worker server.
        stacks: file for stack dumps, appended to at each `stack_signal`.
        error: JSON file for the exception that leaves the script.
        notes: file of JSON lines: events that only the worker knows.
        checkpoints: the run's checkpoint folder.
        memory: the run's folder in shared memory for checkpoints that survive the workers.
        mirror: URL of the checkpoints' copies in an object store.
        started_ns: CLOCK_MONOTONIC when the agent gave the order to start it.
        clock_zero_ns: CLOCK_MONOTONIC at second 0 of the run's clock.
    """

    run: str
    attempt: int
    rank: int
    page: str = ""
    ring: str = ""
    server: str = ""
    stacks: str = ""
    stack_signal: int = 0
    error: str = ""
    notes: str = ""
    checkpoints: str = ""
    memory: str = ""
    mirror: str = ""
    started_ns: int = 0
    clock_zero_ns: int = 0

    def to_environment(self) -> dict[str, str]:
        return {RUN_VARIABLE: self.run, _WORKER_VARIABLE: msgspec.json.encode(self).decode()}


def worker_paths(environment: Mapping[str, str] = os.environ) -> WorkerPaths | None:
    """The paths of this worker; None when it was not started by everstep.

    Raises:
        ConfigError: the variable is there and makes no sense.
    """
    text = environment.get(_WORKER_VARIABLE)
    if text is None:
        return None
    try:
        return msgspec.json.decode(text, type=WorkerPaths)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{_WORKER_VARIABLE} is malformed ({error}); only `everstep run` should set it") from error


def everstep_defaults(environment: Mapping[str, str], compile_cache: Path | None, *, libc: str = "") -> dict[str, str]:
    """What everstep adds to the user's own environment, for all workers; it replaces nothing that is set.

    Huge pages: with pages of 4 kB a process spends longer in page faults than in copying what it restores; see
    docs/decisions/0012. Nothing happens where the kernel forbids them.

    Args:
        compile_cache: an existing folder for what PyTorch and Triton compile, so that the next attempt finds it.
        libc: the C library's name and version; empty asks this system's.
    """
    added: dict[str, str] = {}
    if _TORCH_HUGE_PAGES not in environment:
        if _TUNABLES not in environment and _knows_huge_pages(libc or _libc()):
            added[_TUNABLES] = "glibc.malloc.hugetlb=1"
        else:
            added[_TORCH_HUGE_PAGES] = "1"
    if compile_cache is not None:
        added |= {name: str(compile_cache / folder) for name, folder in _COMPILE_CACHES.items()}
    return {name: value for name, value in added.items() if name not in environment}


def _libc() -> str:
    try:
        return os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (ValueError, OSError):
        return ""


def _knows_huge_pages(libc: str) -> bool:
    name, _, version = libc.partition(" ")
    numbers = version.split(".")
    if name != "glibc" or not all(number.isdecimal() for number in numbers):
        return False
    return tuple(int(number) for number in numbers) >= _HUGE_PAGES_SINCE


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One worker's place in the job, in torchrun's terms."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    group_rank: int
    group_world_size: int
    master_addr: str
    master_port: int
    agent_store: bool
    restart_count: int
    restart_count_max: int
    rdzv_id: str
    error_file: str


def torchrun_environment(place: Place) -> dict[str, str]:
    """What torchrun sets for a worker (torch 2.13, `torch.distributed.elastic.agent`), with its meanings."""
    return {
        "RANK": str(place.rank),
        "LOCAL_RANK": str(place.local_rank),
        "WORLD_SIZE": str(place.world_size),
        "LOCAL_WORLD_SIZE": str(place.local_world_size),
        "GROUP_RANK": str(place.group_rank),
        "GROUP_WORLD_SIZE": str(place.group_world_size),
        "ROLE_RANK": str(place.rank),
        "ROLE_WORLD_SIZE": str(place.world_size),
        "ROLE_NAME": "default",
        "MASTER_ADDR": place.master_addr,
        "MASTER_PORT": str(place.master_port),
        "TORCHELASTIC_RESTART_COUNT": str(place.restart_count),
        "TORCHELASTIC_MAX_RESTARTS": str(place.restart_count_max),
        "TORCHELASTIC_RUN_ID": place.rdzv_id,
        "TORCHELASTIC_USE_AGENT_STORE": str(place.agent_store),
        "TORCHELASTIC_ERROR_FILE": place.error_file,
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }
