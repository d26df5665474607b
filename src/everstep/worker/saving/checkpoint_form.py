"""What the ranks agree on before they write a checkpoint themselves: who holds which tensors, and where."""

from collections.abc import Sequence
from typing import Any

import msgspec
from torch import Tensor

from everstep.worker.format import layout as layouts
from everstep.worker.format.dcp_metadata import complete
from everstep.worker.format.layout import Layout, Offer, RankLayout
from everstep.worker.format.rank_file import seal_of_tensors
from everstep.worker.ranks import Ranks
from everstep.worker.saving.memory_state import Bulk, Unfit, shares_of
from everstep.worker.saving.replicas import agree_on_replicas
from everstep.worker.state import Sharing, TrainingState


class Form:
    """The layout of a run's checkpoints, made anew where the state has changed its form.

    Attributes:
        name: digest of the layout.
        content, metadata: what lies beside the tensors; `metadata` on rank 0 alone.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._bulk: Bulk | None = None
        self._replicas: frozenset[str] = frozenset()
        self._agreed: list[bytes] = []
        self._layout: Layout | None = None
        self._may_be_twins = False
        self.name, self.content, self.metadata = "", b"", b""

    @property
    def own_layout(self) -> RankLayout:
        assert self._layout is not None
        return self._layout.ranks[self._ranks.rank]

    def capture(self, state: TrainingState) -> tuple[list[Tensor], dict[str, Any]]:
        """This rank's tensors in the order of its file, and the rest. A collective."""
        if (replicas := agree_on_replicas(state, self._ranks)) != self._replicas:
            self._bulk, self._replicas = None, replicas
        tensors, small = self._capture(state)
        assert self._bulk is not None
        self._agree(self._bulk.offer)
        self._may_be_twins = state.sharing is Sharing.UNKNOWN and self._ranks.world_size > 1
        return tensors, small

    def is_twin(self, tensors: Sequence[Tensor]) -> bool:
        """Whether rank 0 holds the very same tensors. A collective."""
        if not self._may_be_twins:
            return False
        seals = self._ranks.gather(seal_of_tensors(self.own_layout, tensors).to_bytes(8, "little"))
        own = self._ranks.rank
        return own > 0 and (seals[own], self._agreed[own]) == (seals[0], self._agreed[0])

    def _capture(self, state: TrainingState) -> tuple[list[Tensor], dict[str, Any]]:
        if self._bulk is not None:
            try:
                return self._bulk.capture()
            except Unfit:  # it has changed its form
                self._bulk = None
        share, count = shares_of(state.sharing, self._ranks.rank, self._ranks.world_size)
        self._bulk = Bulk(state, share=share, share_count=count, replicas=self._replicas, whole_optimizer=True)
        return self._bulk.capture()

    def _agree(self, offer: Offer) -> None:
        mine = msgspec.json.encode(offer)
        digests = self._ranks.gather(layouts.digest_of(mine).encode())
        if digests == self._agreed:
            return
        offers = [msgspec.json.decode(content, type=Offer) for content in self._ranks.gather(mine)]
        if self._ranks.leads:
            layout, self.metadata = complete(offers)
            self.content = layouts.encode(layout)
        self.content = self._ranks.broadcast(self.content)
        self.name = layouts.digest_of(self.content)
        self._layout = layouts.decode(self.content, self.name)
        self._agreed = digests
