"""What a worker is told through its environment: torchrun's names for the script, one JSON variable for everstep's own.

The only file through which environment variables cross a process border.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from everstep.domain.errors import ConfigError

RUN_VARIABLE = "EVERSTEP_RUN"
"""The run's id, in the environment of all that the run starts: the guard finds orphans by it."""
_WORKER_VARIABLE = "EVERSTEP_WORKER"


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
