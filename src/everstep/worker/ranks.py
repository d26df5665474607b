"""What the ranks of a job tell each other about checkpoints: bytes over a gloo group of their own, never pickles.

Every method is a collective: all ranks call it, in the same order.
"""

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from everstep.domain.errors import ConfigError

_TIMEOUT = timedelta(hours=1)  # as long as the slowest rank may take to write or read its file


class Ranks:
    """This rank's place and its way to the others.

    Raises:
        ConfigError: there are other ranks, and no process group to reach them.
    """

    def __init__(self) -> None:
        self.rank, self.world_size, self._group = 0, 1, None
        if dist.is_available() and dist.is_initialized():
            self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
            if self.world_size > 1:
                self._group = dist.new_group(backend="gloo", timeout=_TIMEOUT)
        elif (world := os.environ.get("WORLD_SIZE", "1")) != "1":
            raise ConfigError(
                f"attach() found no process group though WORLD_SIZE is {world}; "
                "call torch.distributed.init_process_group() before attach()"
            )

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def broadcast(self, data: bytes) -> bytes:
        """Rank 0's bytes, on every rank; what the others give is not looked at."""
        if self._group is None:
            return data
        size = torch.tensor([len(data)])
        dist.broadcast(size, src=0, group=self._group)
        content = _tensor(data) if self.leads else torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(content, src=0, group=self._group)
        return _bytes(content)

    def gather(self, data: bytes) -> list[bytes]:
        """Every rank's bytes, in the order of the ranks, on every rank."""
        if self._group is None:
            return [data]
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
        dist.all_gather(sizes, torch.tensor([len(data)]), group=self._group)
        longest = max(int(size) for size in sizes)
        padded = _tensor(data + bytes(longest - len(data)))
        contents = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.world_size)]
        dist.all_gather(contents, padded, group=self._group)
        return [_bytes(content[: int(size)]) for content, size in zip(contents, sizes, strict=True)]


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def _bytes(content: torch.Tensor) -> bytes:
    return bytes(content.tolist())
