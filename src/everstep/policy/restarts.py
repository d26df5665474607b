"""Whether a failed job is worth another attempt: budgets per cause, backoff, the repeat stop and the storm breaker.

Repeats of the same failure climb the ladder, progress resets them; a bad script stops after two identical failures
while a bad cluster keeps going.
"""

from collections import deque
from dataclasses import dataclass

from everstep.domain.commands import Rung
from everstep.domain.errors import ExitCode
from everstep.domain.verdicts import Trouble, Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartConfig:
    """Limits.

    Attributes:
        restart_count_max: all restarts together, torchrun's --max-restarts; None sets no such limit.
        identical_script_errors_max: the same error this often without progress in between is the script's bug.
        identical_failures_max: the same for deaths and hangs, which a host may cause.
        storm_count_max, storm_window_s: more restarts than this within the window open the breaker.
        backoff_s: waits before the second, third, … restart without progress; the first comes at once.
    """

    restart_count_max: int | None = None
    identical_script_errors_max: int = 2
    identical_failures_max: int = 4
    storm_count_max: int = 30
    storm_window_s: float = 300.0
    backoff_s: tuple[float, ...] = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)

    def __post_init__(self) -> None:
        assert self.backoff_s
        assert self.storm_count_max > 0
        assert self.identical_script_errors_max > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What comes after a failure.

    Attributes:
        rung: the rung of the ladder.
        delay_s: wait before the next attempt.
        exit_code: how the job ends; None when it goes on.
        why: one sentence.
    """

    rung: Rung
    delay_s: float = 0.0
    exit_code: ExitCode | None = None
    why: str


class RestartBudget:
    """Remembers failures and decides. Time comes with each call."""

    def __init__(self, config: RestartConfig) -> None:
        self._config = config
        self._restarts = 0
        self._best_step = 0
        self._fruitless = 0
        self._repeats: dict[str, int] = {}
        self._times: deque[float] = deque()

    @property
    def restart_count(self) -> int:
        return self._restarts

    def saw_step(self, step: int) -> None:
        """The job has finished a step: one that no attempt had reached before is progress, and forgives."""
        if step > self._best_step:
            self._best_step = step
            self._fruitless = 0
            self._repeats.clear()

    def decide(self, verdict: Verdict, *, planned: bool, at_s: float) -> Decision:
        """The next rung after a failure."""
        self._repeats[verdict.signature] = repeats = self._repeats.get(verdict.signature, 0) + 1
        config = self._config
        if verdict.trouble is Trouble.SCRIPT_ERROR and repeats >= config.identical_script_errors_max:
            return _stop(ExitCode.SCRIPT_BUG, f"the same error came {repeats} times without a new step in between")
        if not planned and repeats >= config.identical_failures_max:
            return self._elsewhere(verdict, repeats)
        if config.restart_count_max is not None and self._restarts >= config.restart_count_max:
            return self._spent(verdict)
        while self._times and self._times[0] < at_s - config.storm_window_s:
            self._times.popleft()
        if len(self._times) >= config.storm_count_max:
            return _stop(
                ExitCode.BUDGET_SPENT, f"{len(self._times)} restarts within {config.storm_window_s:.0f} s are a storm"
            )
        self._times.append(at_s)
        self._restarts += 1
        delay_s = config.backoff_s[min(self._fruitless, len(config.backoff_s) - 1)]
        self._fruitless += 1
        return Decision(
            rung=Rung.RESTART_ALL,
            delay_s=delay_s,
            why=f"restart {self._restarts}: all workers start again from the newest complete checkpoint",
        )

    def _elsewhere(self, verdict: Verdict, repeats: int) -> Decision:
        why = f"the same failure came {repeats} times without a new step in between"
        if verdict.trouble in (Trouble.FROZEN, Trouble.NEVER_ENTERED, Trouble.INSIDE_OP, Trouble.UNKNOWN):
            return _stop(ExitCode.HANG_UNRESOLVED, why)
        return Decision(rung=Rung.GIVE_BACK, exit_code=ExitCode.RETRY_ELSEWHERE, why=f"{why}; try other hosts")

    def _spent(self, verdict: Verdict) -> Decision:
        limit = self._config.restart_count_max
        if limit == 0 and verdict.trouble is Trouble.SCRIPT_ERROR:
            return _stop(ExitCode.SCRIPT_BUG, "--max-restarts 0 allows no second attempt")
        return _stop(ExitCode.BUDGET_SPENT, f"--max-restarts {limit} is used up")


def _stop(code: ExitCode, why: str) -> Decision:
    return Decision(rung=Rung.ASK_A_PERSON, exit_code=code, why=why)
