"""How long a silence that has a culprit is borne before anybody is killed: not at all, unless we may be wrong.

A rank that keeps the others waiting for seconds may be hanging, or doing something slow on purpose, unannounced.
The first time it is restarted, which costs about as much as having waited. If it then stands at the same place again,
without a step in between, it gets more time; and what turned out to be a pause is remembered and allowed from then on.
"""

from everstep.domain.phases import Phase
from everstep.domain.verdicts import Trouble
from everstep.policy.hang import HangFinding

_AFTER_REPEATS_S = (0.0, 10.0, 60.0, 300.0)
_KNOWN_PAUSE_FACTOR = 2.0
_CAN_BE_MEANT = (Trouble.NEVER_ENTERED, Trouble.FROZEN)


class Patience:
    """Remembers pauses.

    Args:
        unsure_s: for a silence that nobody can be blamed for.
        excused_s: for one whose stack speaks of a long phase, or in which nobody waits.
        ending_s: for one in which other ranks have ended well: the last ones may be exporting the result.
    """

    def __init__(self, *, unsure_s: float, excused_s: float, ending_s: float) -> None:
        self._unsure_s = unsure_s
        self._excused_s = excused_s
        self._ending_s = ending_s
        self._pauses: dict[str, float] = {}
        self._borne: tuple[str, float] | None = None

    def with_finding(self, finding: HangFinding, *, repeats: int) -> float:
        """Seconds of silence to bear.

        Args:
            repeats: how often the same verdict has come without a step in between.
        """
        if finding.excuse is Phase.ENDING:
            return self._ending_s
        if finding.excuse is not None:
            return self._excused_s
        if not finding.verdict.ranks:
            return self._unsure_s
        if finding.verdict.trouble not in _CAN_BE_MEANT or finding.stopped:
            return 0.0
        known_s = _KNOWN_PAUSE_FACTOR * self._pauses.get(finding.verdict.signature, 0.0)
        return max(known_s, _AFTER_REPEATS_S[min(repeats, len(_AFTER_REPEATS_S) - 1)])

    def bear(self, signature: str, since_s: float) -> None:
        """A silence since `since_s` is borne for now."""
        self._borne = (signature, since_s)

    def saw_step(self, at_s: float) -> None:
        """A step has ended: what was borne was a pause, and this is how long it was."""
        if self._borne is not None:
            signature, since_s = self._borne
            self._pauses[signature] = max(self._pauses.get(signature, 0.0), at_s - since_s)
            self._borne = None

    def forget_borne(self) -> None:
        """The attempt is over: what was borne never ended by itself."""
        self._borne = None
