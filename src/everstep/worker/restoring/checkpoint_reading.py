"""One rank's reading of one checkpoint: what of which shard it needs, read in place, and handed over at the end."""

import io
import pickle
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from everstep.domain.errors import ConfigError, EvidenceError, WorldError
from everstep.worker.format.frame import dtype_named
from everstep.worker.format.layout import Layout
from everstep.worker.format.manifest import Manifest
from everstep.worker.format.pieces import Live
from everstep.worker.ranks import Ranks
from everstep.worker.restoring.landing import Landing
from everstep.worker.restoring.read_plan import Index, Part, run_in
from everstep.worker.restoring.reading import Segment, Source, read_into
from everstep.worker.state import OWN, TrainingState


class Reading:
    """Call `take_rest`, `prepare`, `read` for each shard that it names, and `settle`.

    Args:
        ranks: this process's place among how many.
    """

    def __init__(self, state: TrainingState, manifest: Manifest, ranks: Ranks, beat: Callable[[], None]) -> None:
        self._state = state
        self._manifest = manifest
        self._rank, self._world_size = ranks.rank, ranks.world_size
        self._beat = beat
        self._small: dict[str, Any] = {}
        self._landing: Landing | None = None
        self._index: Index | None = None
        self._sources: dict[int, Source] = {}
        self._plan: _Plan | None = None
        self.has_begun = False

    @property
    def rest_of(self) -> int:
        """The shard whose rest is this rank's: its own, or the first one's where it has none."""
        return self._rank if self._rank < self._manifest.world_size else 0

    def take_rest(self, content: bytes) -> None:
        """The rest, tested.

        Raises:
            ConfigError: another version of torch wrote it.
        """
        try:
            self._small = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        except (pickle.UnpicklingError, RuntimeError) as error:
            raise ConfigError(
                f"the checkpoint of step {self._manifest.step} is undamaged and torch {torch.__version__} cannot read "
                f"it (written by {self._manifest.torch}): {error}"
            ) from error

    def prepare(self, layout: Layout) -> list[int]:
        """Make room and plan; the shards to read. Nothing of the attached objects changes yet.

        Raises:
            ConfigError: the attached objects are not those that were saved.
        """
        whole = self._small.get("optimizer")
        if whole is not None and whole["sharded"] and self._world_size != self._manifest.world_size:
            raise ConfigError(
                "the optimizer saves its shards in a way of its own, so start the job with "
                f"{self._manifest.world_size} ranks as before, or give attach() another directory"
            )
        self._index = Index(layout, self._rank)
        self._landing = Landing(self._state, layout, self._index)
        self._plan = _Plan(self._landing.targets, self._index)
        own = {self._rank} if self._rank < len(layout.ranks) else set()
        return sorted({*self._plan.shards, *own})

    def read(self, shard: int, source: Source) -> None:
        """Read what is needed of one shard.

        Raises:
            EvidenceError: it is damaged; then the attached objects are, too.
        """
        assert self._plan is not None
        self.has_begun, self._sources[shard] = True, source
        test_all = shard == self._rank
        read_into(source, self._plan.segments(shard), self._beat, test_all=test_all)

    def settle(self) -> dict[str, Any]:
        """Hand everything over; what this rank has of its own: random numbers, and its place in the data."""
        assert self._plan is not None
        assert self._landing is not None
        self._plan.finish()
        own: dict[str, Any] = self._small[OWN]
        if self._world_size != self._manifest.world_size:  # gradients that wait are of the other shards
            own = {**own, "gradients": dict.fromkeys(own["gradients"])}
        self._landing.settle({**self._small, OWN: own})
        return own

    def again(self) -> Callable[[], None] | None:
        """See `Restored.again`."""
        landing, index = self._landing, self._index
        assert landing is not None
        if not landing.can_repeat or "optimizer" in self._small:
            return None
        numbers = self._small["numbers"]

        def again() -> None:
            assert index is not None
            plan = _Plan(landing.weights, index)
            try:
                for shard in plan.shards:
                    read_into(self._sources[shard], plan.segments(shard), self._beat, test_all=False)
            except EvidenceError as error:
                raise WorldError(
                    f"the checkpoint was damaged during the rehearsal ({error}); start the script again", retryable=True
                ) from error
            plan.finish()
            landing.adopt(self._state.held.groups(), numbers)

        return again


class _Plan:
    """From which shards the targets come."""

    def __init__(self, targets: Iterable[Live], index: Index) -> None:
        self._segments: dict[int, list[Segment]] = {}
        self._detours: list[Callable[[], None]] = []
        with torch.no_grad():
            for target in targets:
                for part in index.parts(target.key, target.offset, target.tensor.shape):
                    self._add(target, part)

    @property
    def shards(self) -> list[int]:
        return sorted(self._segments)

    def segments(self, shard: int) -> list[Segment]:
        return self._segments.get(shard, [])

    def finish(self) -> None:
        """Bring what was read beside its place to its place."""
        with torch.no_grad():
            for detour in self._detours:
                detour()
        self._detours = []

    def _add(self, target: Live, part: Part) -> None:
        piece, tensor = part.piece, target.tensor
        if piece.offset == target.offset and piece.shape == tensor.shape and _takes_bytes(tensor):
            self._segments.setdefault(part.rank, []).append(Segment(at=piece.at, memory=_bytes_of(tensor)))
            return
        size = tensor.element_size()
        count = 1
        for low, high in zip(part.low, part.high, strict=True):
            count *= high - low
        there = run_in(piece.offset, piece.shape, part.low, part.high)
        here = run_in(target.offset, tensor.shape, part.low, part.high)
        if there is not None and here is not None and _takes_bytes(tensor):
            memory = _bytes_of(tensor)[here * size : (here + count) * size]
            self._segments.setdefault(part.rank, []).append(Segment(at=piece.at + there * size, memory=memory))
            return
        self._add_detour(target, part)

    def _add_detour(self, target: Live, part: Part) -> None:
        """Read the rows of the piece that hold the box, and copy the box out of them afterwards."""
        piece, tensor = part.piece, target.tensor
        rows = slice(part.low[0] - piece.offset[0], part.high[0] - piece.offset[0]) if piece.shape else slice(0, 1)
        shape = (rows.stop - rows.start, *piece.shape[1:]) if piece.shape else ()
        held = torch.empty(shape, dtype=dtype_named(piece.dtype))
        row_bytes = piece.size_bytes // piece.shape[0] if piece.shape else piece.size_bytes
        segment = Segment(at=piece.at + rows.start * row_bytes, memory=_bytes_of(held))
        self._segments.setdefault(part.rank, []).append(segment)
        inside = tuple(
            slice(low - o, high - o) for low, high, o in zip(part.low[1:], part.high[1:], piece.offset[1:], strict=True)
        )
        place = tuple(slice(low - o, high - o) for low, high, o in zip(part.low, part.high, target.offset, strict=True))

        def copy() -> None:
            source = held[(slice(None), *inside)] if piece.shape else held
            tensor[place].copy_(source)

        self._detours.append(copy)


def _takes_bytes(tensor: Tensor) -> bool:
    """Whether a file's bytes can be put into it as they are."""
    return tensor.is_contiguous() and tensor.is_cpu


def _bytes_of(tensor: Tensor) -> "np.ndarray[Any, np.dtype[np.uint8]]":
    """The memory of a contiguous tensor."""
    found: np.ndarray[Any, np.dtype[np.uint8]] = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return found
