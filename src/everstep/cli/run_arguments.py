"""The flags of `everstep run`: torchrun's own by name and meaning, and a few of everstep's, turned into one plan.

Knows no process: what can be checked without starting anything is checked here, and the sentence says what to write.
"""

import argparse
import importlib.util
import os
import re
import secrets
import shutil
import sys
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from everstep.adapters.checkpoints.object_store import ObjectStore
from everstep.adapters.workers.devices import cpu_count, gpu_count
from everstep.adapters.workers.standby import Program
from everstep.adapters.workers.worker_logs import LogChoice, StreamChoice
from everstep.cli.host_arguments import HostsPlan, add_host_flags, add_own_host_flags, plan_hosts
from everstep.cli.inject import parse_fault
from everstep.domain.errors import ConfigError
from everstep.domain.faults import PlannedFault
from everstep.policy.recovery import RecoveryConfig
from everstep.policy.restarts import RestartConfig
from everstep.policy.spares import SpareConfig
from everstep.policy.stall import StallConfig

WORKERS_PER_CPU_MAX = 64
_PORT_MAX = 65_535
_MEANINGLESS = (
    "--event-log-handler",
    "--logs-specs",
    "--numa-binding",
    "--signals-to-handle",
    "--duplicate-stdout-filters",
    "--duplicate-stderr-filters",
)
"""torchrun's flags that take a value and have no meaning here."""
EXAMPLES = """\
examples:
  everstep run --standalone --nproc-per-node 8 train.py --lr 3e-4     as with torchrun
  everstep run --nproc-per-node gpu -m my_package.train               a module, one worker for each GPU
  everstep run --nproc-per-node 4 --run-dir runs/a train.py           again: continues it
  everstep run --nproc-per-node 4 --inject kill:rank=1,step=40 train.py     see what happens when rank 1 dies
  everstep run --nnodes 2 --nproc-per-node 8 --rdzv-endpoint host0:29400 --run-dir /shared/runs/a train.py
                                                    on each of two hosts; host0 has the coordinator

exit codes: 0 done, 10 the script's own bug, 11 retry here, 12 retry on other hosts, 13 hang not resolved,
14 stopped from outside, 15 restart budget spent, 64 wrong flag or file, 70 a defect of everstep, 74 disk trouble
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """Everything that `everstep run` needs to know.

    Attributes:
        hosts: None for a job of one host.
        notices: sentences about flags that were accepted and mean nothing here.
    """

    program: Program
    worker_count: int
    run_dir: Path
    log_dir: Path
    logs: LogChoice
    address: str
    port: int
    rdzv_id: str
    standby: bool
    preload: tuple[str, ...]
    script_imports: bool = True
    virtual_local_rank: bool = False
    faults: tuple[PlannedFault, ...] = ()
    recovery: RecoveryConfig
    stall: StallConfig
    report_s: float = 5.0
    console: bool = True
    quiet: bool = False
    mirror: str = ""
    mirror_keep: int = 2
    hosts: HostsPlan | None = None
    notices: tuple[str, ...] = ()


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "run",
        help="run a training script like torchrun, and keep it running",
        description="Run a training script on one or more hosts as torchrun would; recover it from deaths and hangs.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_torchrun_flags(parser)
    own = parser.add_argument_group("everstep")
    own.add_argument(
        "--run-dir", metavar="DIR", help="ledger, logs, evidence, checkpoints (default: a new folder in everstep-runs/)"
    )
    own.add_argument(
        "--preload", default="", metavar="M,M", help="further modules for the warm standby to import, e.g. transformers"
    )
    own.add_argument("--no-standby", action="store_true", help="start every worker from a cold interpreter")
    own.add_argument(
        "--no-script-imports",
        action="store_true",
        help="let the warm standby import PyTorch and --preload only, not what the script imports at its top",
    )
    own.add_argument(
        "--grace",
        type=float,
        default=3.0,
        metavar="S",
        help="seconds that healthy workers get to obey SIGTERM when an attempt is torn down (default: 3)",
    )
    own.add_argument(
        "--hang-floor",
        type=float,
        default=1.5,
        metavar="S",
        help="no silence in training shorter than this is ever suspicious; inf looks for no hangs (default: 1.5)",
    )
    own.add_argument(
        "--inject",
        action="append",
        default=[],
        metavar="FAULT",
        help="cause a fault, e.g. kill:rank=1,step=40, where kind is one of "
        "kill freeze exception exit segfault gil sleep loader maintenance; may be repeated; the ledger says so",
    )
    own.add_argument(
        "--checkpoint-mirror",
        default="",
        metavar="URL",
        help="keep copies of the checkpoints there, e.g. s3://bucket/run, and go on from them on a host without any; "
        "needs pip install 'everstep[objects]' and the store's fsspec plugin",
    )
    own.add_argument(
        "--checkpoint-mirror-keep",
        type=int,
        default=2,
        metavar="N",
        help="complete checkpoints that stay in the mirror (default: 2)",
    )
    add_own_host_flags(own)
    own.add_argument("--quiet", action="store_true", help="say only what went wrong")
    parser.add_argument(
        "program", metavar="script.py", help="the script, or module with -m, or command with --no-python"
    )
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="args", help="its arguments")


def _add_torchrun_flags(parser: argparse.ArgumentParser) -> None:
    flags = parser.add_argument_group("torchrun's flags")

    def add(name: str, *aliases: str, **options: object) -> None:
        underscored = name.replace("-", "_").replace("__", "--", 1)
        names = [*aliases, name] + ([underscored] if underscored != name else [])
        flags.add_argument(*names, dest=name[2:].replace("-", "_"), **options)  # type: ignore[arg-type]

    add(
        "--nproc-per-node",
        default="1",
        metavar="N",
        help="workers on this host: a number, auto, cpu or gpu (default: 1)",
    )
    add_host_flags(add)
    add("--standalone", action="store_true", help="one host, no outside rendezvous; everstep's default")
    add(
        "--rdzv-backend", default="c10d", metavar="B", help="accepted; the store is always a fresh one for each attempt"
    )
    add("--rdzv-id", default="", metavar="ID", help="TORCHELASTIC_RUN_ID (default: the run's own id)")
    add("--rdzv-conf", default="", metavar="K=V", help="accepted")
    add(
        "--master-addr",
        default="",
        metavar="A",
        help="one host: MASTER_ADDR, where the store listens (default: 127.0.0.1); several, without --rdzv-endpoint: "
        "the coordinator's address, with --master-port",
    )
    add("--master-port", default=0, type=int, metavar="P", help="MASTER_PORT (default: a free one for each attempt)")
    add(
        "--max-restarts",
        default=None,
        type=int,
        metavar="N",
        help="restarts in all (default: as many as bring progress; a repeated script bug stops after two)",
    )
    add("--monitor-interval", default=None, type=float, metavar="S", help="accepted; exits are seen at once")
    add(
        "--start-method",
        default=None,
        choices=("spawn", "fork", "forkserver"),
        help="accepted; workers are forks of a warm standby",
    )
    add(
        "--shutdown-timeout",
        type=float,
        default=30.0,
        metavar="S",
        help="seconds that workers get to obey SIGTERM when the job itself is stopped (default: 30)",
    )
    add("--virtual-local-rank", action="store_true", help="LOCAL_RANK 0 for all, and one visible device each")
    for name in _MEANINGLESS:
        add(name, default=None, metavar="X", help="accepted")
    add("--run-path", action="store_true", help="accepted")
    add("--role", default="default", metavar="NAME", help="accepted")
    add("--module", "-m", action="store_true", help="the script is a module, as in python -m")
    add("--no-python", action="store_true", help="run the command as it is, without Python and without an observer")
    add("--log-dir", default="", metavar="DIR", help="where the workers' output goes (default: RUN_DIR/logs)")
    add(
        "--redirects",
        "-r",
        default="0",
        metavar="STD",
        help="keep streams off the console: 1 stdout, 2 stderr, 3 both, or 0:3,1:2 by local rank",
    )
    add("--tee", "-t", default="0", metavar="STD", help="show streams with [default0]: before each line")
    add("--local-ranks-filter", default="", metavar="R,R", help="show only these local ranks on the console")


def plan_run(args: argparse.Namespace) -> RunPlan:
    """Check everything that can be checked before a process is started.

    Raises:
        ConfigError: a flag or path is wrong; the sentence says what to write instead.
    """
    hosts = plan_hosts(args)
    if not 0 <= args.master_port <= _PORT_MAX:
        raise ConfigError(f"--master-port {args.master_port} is no port; write 1 to {_PORT_MAX}, or leave it out")
    worker_count = _worker_count(args.nproc_per_node)
    program = _program(args)
    run_dir = hosts.run_dir if hosts else Path(args.run_dir) if args.run_dir else _fresh_run_dir(args.program)
    if args.grace < 0 or args.shutdown_timeout < 0 or not args.hang_floor > 0:
        raise ConfigError(
            "--grace, --shutdown-timeout and --hang-floor are seconds from 0, and --hang-floor is above 0"
        )
    if args.checkpoint_mirror:
        ObjectStore(args.checkpoint_mirror)  # says now what is missing
        if args.checkpoint_mirror_keep < 1:
            raise ConfigError(
                f"--checkpoint-mirror-keep {args.checkpoint_mirror_keep}: the last one always stays; write 1 or more"
            )
    if args.max_restarts is not None and args.max_restarts < 0:
        raise ConfigError(f"--max-restarts {args.max_restarts} is below 0; leave it out to restart as long as it helps")
    return RunPlan(
        program=program,
        worker_count=worker_count,
        run_dir=run_dir,
        log_dir=Path(args.log_dir) if args.log_dir else run_dir / "logs",
        logs=LogChoice(
            redirects=StreamChoice.parse(args.redirects, flag="--redirects"),
            tee=StreamChoice.parse(args.tee, flag="--tee"),
            ranks=_rank_filter(args.local_ranks_filter),
        ),
        address=args.master_addr or "127.0.0.1",
        port=hosts.fixed_port if hosts else args.master_port,
        rdzv_id=args.rdzv_id,
        standby=not (args.no_standby or args.no_python),
        preload=_preload(args.preload),
        script_imports=not args.no_script_imports,
        virtual_local_rank=args.virtual_local_rank,
        faults=tuple(
            parse_fault(text, number=number, world_size=worker_count * (hosts.need if hosts else 1))
            for number, text in enumerate(args.inject, 1)
        ),
        recovery=RecoveryConfig(
            grace_s=args.grace,
            stop_grace_s=args.shutdown_timeout,
            restarts=RestartConfig(restart_count_max=args.max_restarts),
            spares=SpareConfig(waits_for_hosts=True, wait_s=hosts.wait_s) if hosts else SpareConfig(),
        ),
        stall=StallConfig(floor_s=args.hang_floor),
        quiet=args.quiet,
        mirror=args.checkpoint_mirror,
        mirror_keep=args.checkpoint_mirror_keep,
        hosts=hosts,
        notices=_notices(args, several_hosts=hosts is not None),
    )


def _worker_count(text: str) -> int:
    gpus, cpus = gpu_count(), cpu_count()
    match text:
        case "gpu":
            if not gpus:
                raise ConfigError("--nproc-per-node gpu: this machine shows no GPU; write a number or cpu")
            return gpus
        case "cpu":
            return cpus
        case "auto":
            return gpus or cpus
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"--nproc-per-node {text!r} is not understood; write a number from 1, auto, cpu or gpu")
    count = int(text)
    if gpus and count > gpus:
        raise ConfigError(
            f"--nproc-per-node {count}: this machine has {gpus} GPUs; write {gpus} or gpu, "
            "or set CUDA_VISIBLE_DEVICES= for a job without GPUs"
        )
    if count > cpus * WORKERS_PER_CPU_MAX:
        raise ConfigError(
            f"--nproc-per-node {count}: this machine has {cpus} CPUs, and more than {WORKERS_PER_CPU_MAX} workers "
            f"on each are surely a slip; write {cpus * WORKERS_PER_CPU_MAX} or fewer"
        )
    return count


def _program(args: argparse.Namespace) -> Program:
    if not args.module and not args.no_python:
        script = Path(args.program)
        if not os.access(script, os.F_OK) or script.is_dir():  # Path.exists raises where a folder may not be entered
            hint = "; with -m give a module name" if not args.program.endswith(".py") else ""
            raise ConfigError(f"there is no script {args.program!r} here ({Path.cwd()}){hint}")
        if not os.access(script, os.R_OK):
            raise ConfigError(f"the script {args.program!r} can't be read; check its permissions")
    if args.module and args.no_python:
        raise ConfigError("-m and --no-python exclude each other; leave one out")
    if args.no_python and shutil.which(args.program) is None:
        raise ConfigError(f"there is no command {args.program!r}; check its path and permissions")
    return Program(arguments=(args.program, *args.arguments), module=args.module, python=not args.no_python)


def _fresh_run_dir(program: str) -> Path:
    name = re.sub(r"[^A-Za-z0-9_.-]", "_", Path(program).stem or "run")
    return Path("everstep-runs") / f"{name}-{datetime.now().astimezone():%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def _preload(text: str) -> tuple[str, ...]:
    names = tuple(name for name in text.split(",") if name)
    for name in names:
        if importlib.util.find_spec(name.partition(".")[0]) is None:
            raise ConfigError(f"--preload {name}: there is no such module in {sys.prefix}; install it or leave it out")
    return names


def _rank_filter(text: str) -> frozenset[int] | None:
    if not text:
        return None
    try:
        return frozenset(int(rank) for rank in text.split(","))
    except ValueError:
        raise ConfigError(f"--local-ranks-filter {text!r} is not understood; write numbers, as in 0,2") from None


def _notices(args: argparse.Namespace, *, several_hosts: bool) -> tuple[str, ...]:
    notices = []
    if args.monitor_interval is not None:
        notices.append("--monitor-interval has no meaning here: exits are seen at once")
    if args.start_method is not None:
        notices.append("--start-method has no meaning here: workers are forks of a warm standby, or cold interpreters")
    given = (name for name in _MEANINGLESS if getattr(args, name[2:].replace("-", "_")) is not None)
    notices += [f"{name} has no meaning here" for name in given]
    is_foreign = args.rdzv_backend not in ("c10d", "static") or bool(args.rdzv_conf)
    if several_hosts and is_foreign:
        notices.append("--rdzv-backend and --rdzv-conf have no meaning here: the coordinator is everstep's own")
    elif not several_hosts and (is_foreign or args.rdzv_endpoint or args.local_addr):
        notices.append("--rdzv-backend, -endpoint, -conf and --local-addr have no meaning on one host")
    if args.no_python:
        notices.append("with --no-python there is no observer: deaths are seen, hangs are not")
    if "OMP_NUM_THREADS" not in os.environ and args.nproc_per_node != "1" and not args.quiet:
        notices.append("OMP_NUM_THREADS is not set, so every worker gets 1 thread, as with torchrun")
    return tuple(notices)


def command_line() -> tuple[str, ...]:
    """What was typed, for the ledger."""
    return ("everstep", *sys.argv[1:])
