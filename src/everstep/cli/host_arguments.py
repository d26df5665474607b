"""The flags of `everstep run` that speak of several hosts, turned into one plan. Knows no socket."""

import argparse
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from everstep.adapters.hosts.host_endpoint import Endpoint
from everstep.domain.errors import ConfigError

ENDPOINT_PORT, MASTER_PORT = 29_400, 29_500
"""torchrun's defaults for --rdzv-endpoint and --master-port."""
HOST_TIMEOUT_S = 300.0
_PORT_MAX = 65_535


@dataclass(frozen=True, slots=True, kw_only=True)
class HostsPlan:
    """What several hosts must know.

    Attributes:
        nnodes: as all hosts must have typed it.
        need: hosts in use; up to `host_count_max` may join, and those beyond are spares.
        node_rank: None where none was given.
        run_dir, credentials: folders.
        wait_s: for hosts, and for the coordinator.
        fixed_port: MASTER_PORT; 0 for a free one.
        rack: what fails together with this host; empty where nobody knows.
    """

    nnodes: str
    need: int
    host_count_max: int
    node_rank: int | None
    endpoint: Endpoint
    run_dir: Path
    credentials: Path
    wait_s: float
    fixed_port: int = 0
    rack: str = ""


def add_host_flags(add: Callable[..., None]) -> None:
    """torchrun's own.

    Args:
        add: takes a flag in its one spelling and argparse's options, and adds both spellings.
    """
    add(
        "--nnodes",
        default="1:1",
        metavar="N",
        help="hosts: a number, or MIN:MAX, of which MIN train and the rest are spares",
    )
    add(
        "--rdzv-endpoint",
        default="",
        metavar="HOST:PORT",
        help="where the coordinator of several hosts listens, the same on all; HOST has it, or --node-rank 0",
    )
    add(
        "--node-rank",
        default=None,
        type=int,
        metavar="R",
        help="this host's place among several; 0 has the coordinator",
    )
    add("--local-addr", default="", metavar="A", help="the address of this host by which the other hosts reach it")


def add_own_host_flags(own: "argparse._ArgumentGroup") -> None:
    """Those that torchrun has not."""
    own.add_argument(
        "--host-timeout",
        type=float,
        default=HOST_TIMEOUT_S,
        metavar="S",
        help="with several hosts: seconds to wait for hosts to join or come back, and for the coordinator "
        "(default: 300)",
    )
    own.add_argument(
        "--credentials",
        default="",
        metavar="DIR",
        help="with several hosts: what proves that a host belongs to the job, where the run directory is not shared "
        "(default: RUN_DIR/credentials, made by the coordinator)",
    )
    own.add_argument(
        "--rack",
        default="",
        metavar="NAME",
        help="with several hosts: what fails together with this host, as a rack, a switch or a power feed; copies of "
        "its memory go to a host with another NAME (default: Slurm's leaf switch or block, where it tells)",
    )


def plan_hosts(args: argparse.Namespace) -> HostsPlan | None:
    """None for a job of one host.

    Raises:
        ConfigError: a flag is wrong or missing; the sentence says what to write.
    """
    need, most = _counts(args.nnodes)
    if most == 1:
        if args.node_rank not in (None, 0):
            raise ConfigError(f"--node-rank {args.node_rank}: with --nnodes 1 there is node 0 only; write --nnodes N")
        return None
    nnodes = str(need) if need == most else f"{need}:{most}"
    if args.standalone:
        raise ConfigError(f"--standalone means one host, and --nnodes {nnodes} does not; leave one of them out")
    if args.node_rank is not None and not 0 <= args.node_rank < most:
        raise ConfigError(f"--node-rank {args.node_rank}: with --nnodes {nnodes} write 0 to {most - 1}")
    if not args.host_timeout > 0:
        raise ConfigError(f"--host-timeout {args.host_timeout:g} is seconds above 0")
    endpoint, is_classic = _endpoint(args, nnodes)
    run_dir = _run_dir(args, nnodes)
    return HostsPlan(
        nnodes=nnodes,
        need=need,
        host_count_max=most,
        node_rank=args.node_rank,
        endpoint=endpoint,
        run_dir=run_dir,
        credentials=Path(args.credentials) if args.credentials else run_dir / "credentials",
        wait_s=args.host_timeout,
        fixed_port=0 if is_classic else args.master_port,
        rack=args.rack or slurm_rack(os.environ),
    )


def slurm_rack(environment: Mapping[str, str]) -> str:
    """What Slurm's topology says is around this node; empty where it says nothing.

    `SLURM_TOPOLOGY_ADDR` names it from the top down to the node, and `SLURM_TOPOLOGY_ADDR_PATTERN` what each part is.
    """
    parts = environment.get("SLURM_TOPOLOGY_ADDR_PATTERN", "").split(".")
    address = environment.get("SLURM_TOPOLOGY_ADDR", "").split(".", len(parts) - 1)
    is_known = len(parts) > 1 and parts[-1] == "node" and len(address) == len(parts)
    return ".".join(address[:-1]) if is_known else ""


def _counts(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d{1,6})(?::(\d{1,6}))?", text)
    least, most = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= least <= most:
        raise ConfigError(f"--nnodes {text!r} is not understood; write a number from 1, or MIN:MAX, as in 4 or 4:5")
    return least, most


def _endpoint(args: argparse.Namespace, nnodes: str) -> tuple[Endpoint, bool]:
    """Where the coordinator is, and whether torchrun's older pair of flags says so."""
    text, local = args.rdzv_endpoint, args.local_addr.strip("[]")
    if not text and args.master_addr:
        port = args.master_port or MASTER_PORT
        return Endpoint(host=args.master_addr.strip("[]"), port=port, local=local), True
    found = re.fullmatch(r"(\[[0-9A-Fa-f:.%\w]+\]|[^:\s/]+)(?::(\d{1,5}))?", text)
    port = int(found[2] or ENDPOINT_PORT) if found else 0
    if found is None or not 0 < port <= _PORT_MAX:
        what = f"--rdzv-endpoint {text!r} is not understood" if text else f"--nnodes {nnodes} needs --rdzv-endpoint"
        raise ConfigError(
            f"{what}; write HOST:PORT with the address of the host that has the coordinator, the same on all hosts"
        )
    return Endpoint(host=found[1].strip("[]"), port=port, local=local), False


def _run_dir(args: argparse.Namespace, nnodes: str) -> Path:
    if args.run_dir:
        return Path(args.run_dir)
    if args.rdzv_id:
        return Path("everstep-runs") / re.sub(r"[^A-Za-z0-9_.-]", "_", args.rdzv_id)
    raise ConfigError(f"--nnodes {nnodes} needs --run-dir DIR, the same folder on all hosts, or --rdzv-id ID")
