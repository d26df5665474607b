"""Imports torch once and then forks ranks on order, so that a test of three attempts does not pay nine imports.

Orders are JSON lines on stdin: {"start": spec} answers with pids, {"wait": true} with exit codes.
"""

import importlib
import json
import os
import random
import resource
import signal
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed.fsdp
import torch.distributed.tensor

from everstep.worker.store import serve

sys.path.insert(0, str(Path(__file__).parent))

torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])  # a second, hidden import


class Store:
    """The rendezvous store of one attempt, in a process of its own as under `everstep run`: its port is never free."""

    def __init__(self) -> None:
        read_end, write_end = os.pipe()
        self._pid = os.fork()
        if not self._pid:
            os.dup2(write_end, 1)
            os._exit(serve("127.0.0.1", 0))
        os.close(write_end)
        with os.fdopen(read_end) as said:
            self.port = int(said.readline().removeprefix("port "))

    def end(self) -> None:
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)


def start(spec: dict, port: int) -> list[int]:
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "a fork with threads would hang"
    return [start_rank(spec, rank, port) for rank in range(spec["world"])]


def start_rank(spec: dict, rank: int, port: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.dup2(os.open(f"{spec['out']}.err.{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), 2)
        os.dup2(2, 1)
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": spec["world"], "MASTER_PORT": port}
        place |= {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 0}
        os.environ.update({key: str(value) for key, value in place.items()})
        paths = {"run": "test", "attempt": spec.get("attempt", 1), "rank": rank, "notes": f"{spec['out']}.notes"}
        paths["memory"] = spec["memories"][rank] if "memories" in spec else spec.get("memory", "")
        paths["page"] = spec.get("pages", [""] * spec["world"])[rank]
        os.environ["EVERSTEP_WORKER"] = json.dumps(paths)
        if rank in spec.get("file_limit_ranks", ()):
            limit = spec["file_limit"]
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        random.seed(rank)
        importlib.import_module(spec.get("module", "train")).main(spec)
        code = 0
    except BaseException:  # outermost frame
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    pids: list[int] = []
    store = Store()
    for line in sys.stdin:
        order = json.loads(line)
        if "start" in order:
            store.end()
            store = Store()
            answer = pids = start(order["start"], store.port)
        else:
            answer = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
    store.end()


main()
