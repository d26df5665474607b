"""Trains with `attach` and saves often; arguments: steps, where the digest goes, seconds between saves and per step."""

import hashlib
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from everstep.worker import attach


def main() -> None:
    steps, digest_file, every_s, step_s = int(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4])
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Linear(64, 4)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    run = attach(model=model, optimizer=optimizer, save_every_s=every_s, save_within_s=every_s)
    for batch in run.steps([torch.randn(4, 32) for _ in range(8)], until=steps):
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(step_s)
    if dist.get_rank() == 0:
        content = b"".join(tensor.numpy().tobytes() for _, tensor in sorted(model.state_dict().items()))
        digest_file.write_text(hashlib.sha256(content).hexdigest())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
