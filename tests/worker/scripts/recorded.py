"""Two ranks that communicate in every way there is, with the recorder in place; the test reads the rings."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from everstep.adapters.evidence.operation_ring import RingWriter, create_ring
from everstep.worker.recorder import OperationRecorder


def communicate(rank: int) -> None:
    x, peer = torch.ones(16), 1 - rank
    dist.all_reduce(x)
    dist.broadcast(x, 1)
    dist.send(x, 1) if rank == 0 else dist.recv(x, 0)
    sent, into = torch.ones(3), torch.empty(3)
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, sent, peer), dist.P2POp(dist.irecv, into, peer)]):
        work.wait()
    model = DistributedDataParallel(torch.nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()
    dist.reduce_scatter_tensor(torch.empty(2), torch.ones(4))
    dist.all_gather_object([None, None], rank)
    with torch.inference_mode():
        dist.all_reduce(torch.ones(5, dtype=torch.int64), op=dist.ReduceOp.MAX)
    side = dist.new_group([0, 1], group_desc="side")
    dist.monitored_barrier(side)
    assert torch.equal(x, torch.full((16,), 2.0))
    assert torch.equal(into, sent)


def main() -> None:
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    create_ring(folder / f"{rank}.ring", rank=rank)
    recorder = OperationRecorder(RingWriter(folder / f"{rank}.ring"))
    recorder.install()
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 2), rank=rank, world_size=2)
    communicate(rank)
    recorder.refresh()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
