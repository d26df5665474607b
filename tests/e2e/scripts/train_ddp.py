"""A plain torchrun script that knows nothing of everstep: DDP over gloo, 50 ms steps."""

import os
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    steps = int(sys.argv[1])
    pause_s = float(sys.argv[2]) if len(sys.argv) > 2 else 0.05
    dist.init_process_group("gloo")
    assert dist.get_rank() == int(os.environ["RANK"])
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(64, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(steps):
        begun_s = time.monotonic()
        model(torch.ones(4, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(max(0.0, pause_s - (time.monotonic() - begun_s)))
    if dist.get_rank() == 0:
        print("finished", steps, "steps, restart", os.environ["TORCHELASTIC_RESTART_COUNT"], flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
