"""What bench/checkpoint_kills.py trains: DDP with a state of 13 MB, so that saves take a good part of the time."""

import hashlib
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from everstep.worker import attach


def main() -> None:
    steps, digest_file = int(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(512, 1024), nn.Dropout(0.1), nn.Linear(1024, 512))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
    torch.manual_seed(100 + dist.get_rank())
    run = attach(model=model, optimizer=optimizer, save_every_s=0.2, save_within_s=0.2)
    for batch in run.steps([torch.randn(64, 512) for _ in range(16)], until=steps):
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if dist.get_rank() == 0:
        tensors = [*net.state_dict().values(), *(t for s in optimizer.state.values() for t in s.values())]
        digest_file.write_text(hashlib.sha256(b"".join(t.numpy().tobytes() for t in tensors)).hexdigest())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
