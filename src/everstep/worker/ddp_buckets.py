"""DDP's buckets, which decide how sums are rounded: read from one DDP, and given to another before its first step.

DDP finds them in its first iteration, from the order in which gradients arrive (torch 2.13, reducer.cpp). Knows neither
data nor files; docs/decisions/0019-a-checkpoint-knows-ddps-buckets.md says why this is exact.
"""

import hashlib
import logging
import zlib
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from everstep.domain.errors import WorldError
from everstep.worker.exactness import iterations_until_settled
from everstep.worker.ranks import Ranks
from everstep.worker.state import TrainingState

_log = logging.getLogger(__name__)
_NEEDED = ("_push_all_rebuilt_params", "_rebuild_buckets", "_update_process_group", "_reset_state")
"""The reducer's methods by which DDP itself takes buckets from rank 0, joins and changes its group."""
_RANKS_MIN = 3
"""The sum of two is the same in any order."""


class Buckets:
    """The buckets of a model that has one DDP wrapper; without record and effect for any other.

    Args:
        extra: what else is trained, perhaps in a wrapper of its own.
    """

    def __init__(self, state: TrainingState, extra: Iterable[object]) -> None:
        self._ddp = _only_wrapper(state, extra)
        self._traits = "" if self._ddp is None else _traits(self._ddp)
        self._given = self._told = ""

    @property
    def are_settled(self) -> bool:
        """Whether `settle` has succeeded."""
        return bool(self._given)

    @property
    def record(self) -> str:
        """What `settle` needs in a later attempt; empty as long as DDP has not told its buckets, or never does."""
        if not self._told and self._ddp is not None:
            self._told = self._as_told(self._ddp)
            if self._told and self._given and self._told != self._given:
                _log.warning("everstep: DDP sums in other buckets than it was given; the resume is not bit-identical")
        return self._told or self._given

    def settle(self, record: str, ranks: Ranks) -> bool:
        """Make DDP sum as it did when `record` was taken, from its first iteration on. A collective.

        Returns:
            Whether it does now. If not, nothing has changed, and it takes iterations to settle.

        Raises:
            WorldError: it worked on some ranks only; start the script again.
        """
        if ranks.world_size < _RANKS_MIN:
            return False
        buckets = self._read(record)
        words = ranks.gather(hashlib.blake2b(record.encode(), digest_size=16).digest() if buckets else b"")
        members = dist.get_process_group_ranks(self._ddp.process_group) if self._ddp is not None else []
        agreed = bool(members) and all(words[rank] == words[members[0]] != b"" for rank in members)
        done = agreed and self._give(buckets)
        outcomes = ranks.gather(b"1" if done else b"")
        if any(outcomes[rank] for rank in members) and not all(outcomes[rank] for rank in members):
            raise WorldError("DDP took the buckets of the checkpoint on some ranks only", retryable=True)
        if done:
            self._given = record
        return done

    def _read(self, record: str) -> list[list[int]]:
        """The parameters of each bucket; empty where they cannot be this DDP's, or it cannot be given any."""
        ddp, (traits, _, told) = self._ddp, record.partition(": ")
        if ddp is None or not told or traits != self._traits or iterations_until_settled(ddp) == 0:
            return []
        if getattr(ddp, "_has_rebuilt_buckets", True) or getattr(ddp, "_use_python_reducer", True):
            return []
        if not all(hasattr(ddp.reducer, name) for name in _NEEDED):
            return []
        return [[int(number) for number in bucket.split()] for bucket in told.split(",")]

    def _give(self, buckets: list[list[int]]) -> bool:
        """Let DDP rebuild its buckets, with a group in which rank 0 says these."""
        ddp: Any = self._ddp
        said = _Said(ddp.process_group.rank(), ddp.process_group.size(), buckets)
        done = False
        try:
            ddp.reducer._push_all_rebuilt_params()
            ddp.reducer._update_process_group(said)
            done = bool(ddp.reducer._rebuild_buckets()) and said.is_over
        except (RuntimeError, TypeError) as error:  # TypeError: another signature in another version
            _log.warning("everstep: DDP does not take the buckets of the checkpoint (%s)", error)
        finally:
            ddp.reducer._update_process_group(ddp.process_group)
            if not done:
                ddp.reducer._reset_state()  # the next backward pass finds what it would have found
        ddp._has_rebuilt_buckets = done
        return done

    def _as_told(self, ddp: DistributedDataParallel) -> str:
        if not hasattr(ddp, "_get_ddp_logging_data") or not getattr(ddp, "_has_rebuilt_buckets", False):
            return ""
        logger: Any = ddp.logger
        if hasattr(logger, "set_runtime_stats_and_log"):
            logger.set_runtime_stats_and_log()  # as in every forward pass; the next one is too late for this save
        data = ddp._get_ddp_logging_data()
        told = str(data.get("rebuilt_per_bucket_param_indices", "")) if data.get("has_rebuilt_buckets") else ""
        numbers = sorted(int(number) for number in told.replace(",", " ").split())
        if not told or numbers != list(range(len(_summed(ddp)))):
            return ""
        return f"{self._traits}: {told}"


class _Done(dist.Work):
    """A broadcast that has ended."""

    def wait(self, timeout: Any = None) -> bool:
        return True


class _Said(dist.ProcessGroup):
    """A group in which rank 0 has said the buckets already: the numbers of all parameters and buckets, then sizes."""

    def __init__(self, rank: int, size: int, buckets: list[list[int]]) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        numbers = [number for bucket in buckets for number in bucket]
        self._words = [[*numbers, len(buckets)], [len(bucket) for bucket in buckets]]
        self._works: list[_Done] = []  # C++ may look at them after Python has let them go

    @property
    def is_over(self) -> bool:
        return not self._words

    def broadcast(self, tensors: list[Tensor], _: Any) -> _Done:  # type: ignore[override]
        if not self._words or len(tensors) != 1 or tensors[0].numel() != len(self._words[0]):
            raise RuntimeError("it asks its ranks for something else than buckets of its parameters")
        tensors[0].copy_(torch.tensor(self._words.pop(0), dtype=tensors[0].dtype))
        self._works.append(_Done())
        return self._works[-1]

    def getBackendName(self) -> str:  # noqa: N802 - PyTorch's name
        return "said"


def _only_wrapper(state: TrainingState, extra: Iterable[object]) -> DistributedDataParallel | None:
    """The DDP of this training, where it is the only one: every other needs iterations to settle, too."""
    inner = [module for module in state.model.modules() if isinstance(module, DistributedDataParallel)]
    others = (value for value in extra if not isinstance(value, torch.optim.swa_utils.AveragedModel))
    if inner or any(isinstance(value, nn.Module | torch.optim.Optimizer) for value in others):
        return None
    return state.ddp


def _summed(ddp: DistributedDataParallel) -> list[tuple[str, Tensor]]:
    """The parameters that DDP sums, in the order of its numbers for them."""
    return [
        (name, parameter)
        for name, parameter in ddp.module.named_parameters()
        if parameter.requires_grad and name not in ddp.parameters_to_ignore
    ]


def _traits(ddp: DistributedDataParallel) -> str:
    """A checksum of what buckets belong to: parameters and how large buckets may be. Changed, DDP finds others."""
    shapes = [(name, tuple(parameter.shape), str(parameter.dtype)) for name, parameter in _summed(ddp)]
    sparse = [name for name, module in ddp.module.named_modules() if getattr(module, "sparse", False) is True]
    limits = ddp.bucket_bytes_cap, repr(getattr(ddp, "_bucket_config", None)), ddp.static_graph
    return f"{zlib.crc32(repr((shapes, sparse, limits)).encode()):08x}"
