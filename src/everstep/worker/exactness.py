"""Why a resume may not be bit-identical, in sentences: what is known when saving, and what differs when resuming.

It knows torch's settings and the loader's kind; it cannot see randomness that the script keeps to itself.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from everstep.worker.data.global_order import global_order_of, seeds_each_sample
from everstep.worker.format.manifest import Manifest


def doubts_at_save(ddp: DistributedDataParallel | None, rehearse: object, loader: Any) -> tuple[str, ...]:
    """What the manifest should say; empty when a resume on the same machines is exact.

    Args:
        ddp: whose buckets are not on record.
        rehearse: the setting; False leaves DDP's order of sums to chance, where it is not on record.
    """
    doubts = []
    if rehearse is False and iterations_until_settled(ddp):
        doubts.append("rehearse=False: DDP sums gradients in another order in the first step after a resume")
    if torch.cuda.is_available() and not torch.are_deterministic_algorithms_enabled():
        doubts.append("torch.use_deterministic_algorithms() is off, and some CUDA kernels add in any order")
    doubts.extend(_doubts_about_workers(loader))
    return tuple(doubts)


def _doubts_about_workers(loader: Any) -> list[str]:
    """Why a resume may not get from the loader's worker processes what an uninterrupted run would."""
    if getattr(loader, "num_workers", 0) == 0:
        return []
    if not getattr(loader, "in_order", True):
        return ["in_order=False: batches come as they are ready, so a resume may repeat some and leave out others"]
    if seeds_each_sample(loader):
        return []
    order = global_order_of(loader)
    if order is not None and order.cheap:
        return ["what the data set draws in the loader's workers, if anything, is not repeated without SeededDataset"]
    if hasattr(loader, "load_state_dict"):
        return ["the loader keeps its own position, and not the random numbers of its workers"]
    if getattr(loader, "persistent_workers", False):
        return [
            "persistent_workers=True: what the data set draws in them, if anything, is repeated in the first epoch only"
        ]
    return []


def doubts_at_resume(manifest: Manifest) -> list[str]:
    """What is not as it was when the checkpoint was written."""
    doubts = list(manifest.inexact_because)
    if manifest.torch != (version := str(torch.__version__)):
        doubts.append(f"torch was {manifest.torch} and is {version}")
    if manifest.world_size != (ranks := _rank_count()):
        doubts.append(f"the job had {manifest.world_size} ranks and has {ranks}, and so sums in another order")
    if manifest.thread_count != (now := torch.get_num_threads()):
        doubts.append(f"torch used {manifest.thread_count} threads and uses {now}")
    return doubts


def _rank_count() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def iterations_until_settled(ddp: DistributedDataParallel | None) -> int:
    """How many iterations DDP takes until it sums gradients in the order that it keeps.

    In the forward pass after them it rebuilds its buckets in the order in which gradients arrived, unless it looks for
    unused parameters; with a static graph it watches one iteration before (torch 2.13, reducer.cpp, measured in
    tests/worker). The sum of two is the same in either order; with three ranks or more it is not.
    """
    if ddp is None or ddp.process_group.size() < 3:
        return 0
    if ddp.static_graph:
        return 2
    return 0 if ddp.find_unused_parameters else 1
