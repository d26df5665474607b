"""Training in one process, with augmentation and an averaged model, that goes on where it was, whatever kills it.

everstep run examples/plain.py --steps 2000 --out model.pt
everstep run --inject kill:rank=0,step=300 examples/plain.py --steps 2000 --out model.pt
"""

import argparse
import random

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset

from everstep.worker import EpochSampler, SeededDataset, attach


class Noisy(Dataset):
    """Samples that are different each time they are drawn; also those come again after a restart."""

    def __init__(self) -> None:
        self._inputs = torch.randn(1024, 64)

    def __len__(self) -> int:
        return len(self._inputs)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._inputs[index] + 0.1 * random.random() * torch.randn(64)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--out", default="model.pt")
    args = parser.parse_args()

    random.seed(0)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 64))
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = SeededDataset(Noisy())
    loader = DataLoader(data, batch_size=32, sampler=EpochSampler(data), num_workers=2, persistent_workers=True)

    run = attach(model=model, optimizer=optimizer, extra={"average": average})
    for batch in run.steps(loader, until=args.steps):
        loss = nn.functional.mse_loss(model(batch), batch.sin())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
        run.log(loss=loss.item())

    torch.save(average.module.state_dict(), args.out)


if __name__ == "__main__":
    main()
