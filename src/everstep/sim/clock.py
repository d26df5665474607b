"""A clock that stands still until it is told to move."""


class SimClock:
    """The `Clock` port. `advance` is the only thing that moves it."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def now_s(self) -> float:
        return self._now_s

    def wall(self) -> str:
        return f"simulated+{self._now_s:.3f}s"

    def advance(self, by_s: float) -> None:
        assert by_s >= 0
        self._now_s += by_s
