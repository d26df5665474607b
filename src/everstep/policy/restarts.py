"""Whether a failed job is worth another attempt: budgets per cause, backoff, the repeat stop and the storm breaker.

Repeats of the same failure climb the ladder, progress resets them; a bad script stops after two identical failures
while a bad cluster keeps going.
"""

from collections import deque
from dataclasses import dataclass

from everstep.domain.commands import Rung
from everstep.domain.errors import ExitCode
from everstep.domain.verdicts import Trouble, Verdict

_SAME_PLACE_STEPS = 3
_OWN_FAULTS = (Trouble.SCRIPT_ERROR, Trouble.DISK_FULL)
_EXIT_CODES = {
    Trouble.SCRIPT_ERROR: ExitCode.SCRIPT_BUG,
    Trouble.DISK_FULL: ExitCode.RETRY_HERE,
    Trouble.LOST_CONNECTION: ExitCode.RETRY_HERE,
    Trouble.STORE_LOST: ExitCode.RETRY_HERE,
    Trouble.START_FAILED: ExitCode.RETRY_HERE,
    Trouble.DEAD: ExitCode.RETRY_ELSEWHERE,
    Trouble.HOST_LOST: ExitCode.RETRY_ELSEWHERE,
}
"""How a job ends when the same failure keeps coming; the others are hangs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartConfig:
    """Limits.

    Attributes:
        restart_count_max: all restarts together, torchrun's --max-restarts; None sets no such limit.
        identical_script_errors_max: the same error this often without progress in between is the script's bug.
        identical_failures_max: the same for deaths and hangs, which a host may cause.
        storm_count_max, storm_window_s: more restarts than this within the window open the breaker.
        fruitful_steps: an attempt of so many steps was worth it, whatever their numbers: a script that loads its
            own checkpoint counts from 1 again. Not so when it fails as before at the same count.
        backoff_s: waits before the second, third, … restart without progress; the first comes at once.
    """

    restart_count_max: int | None = None
    identical_script_errors_max: int = 2
    identical_failures_max: int = 4
    storm_count_max: int = 30
    storm_window_s: float = 300.0
    fruitful_steps: int = 20
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
        self._bugs: dict[str, int] = {}  # signature -> how often without a new step; forgiven by progress alone
        self._repeats: dict[str, int] = {}  # the same for deaths and hangs; forgiven by a worthwhile attempt as well
        self._failed_at: dict[str, int] = {}
        self._times: deque[float] = deque()

    @property
    def restart_count(self) -> int:
        return self._restarts

    def saw_step(self, step: int) -> None:
        """The job has finished a step: one that no attempt had reached before is progress, and forgives."""
        if step > self._best_step:
            self._best_step = step
            self._fruitless = 0
            self._bugs.clear()
            self._repeats.clear()

    def repeats(self, verdict: Verdict, *, steps: int) -> int:
        """How often this failure has come before without progress in between, had the attempt failed after `steps`."""
        return self._forgiving(verdict.signature, steps).get(verdict.signature, 0)

    def decide(self, verdict: Verdict, *, planned: bool, at_s: float, steps: int = 0) -> Decision:
        """The next rung after a failure.

        Args:
            planned: ordered from outside, so no repeat of anything.
            steps: how many steps the failed attempt has finished.
        """
        config = self._config
        own_fault = verdict.trouble in _OWN_FAULTS
        repeats = self._count(verdict, steps)
        limit = config.identical_script_errors_max if own_fault else config.identical_failures_max
        if repeats >= limit and not planned:
            why = f"the same failure came {repeats} times without a new step in between"
            return _stop(_EXIT_CODES.get(verdict.trouble, ExitCode.HANG_UNRESOLVED), why)
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
        delay_s = 0.0 if planned else config.backoff_s[min(self._fruitless, len(config.backoff_s) - 1)]
        self._fruitless += not planned
        return Decision(
            rung=Rung.RESTART_ALL,
            delay_s=delay_s,
            why=f"restart {self._restarts}: all workers start again from the newest complete checkpoint",
        )

    def _count(self, verdict: Verdict, steps: int) -> int:
        signature = verdict.signature
        self._repeats = self._forgiving(signature, steps)
        self._failed_at[signature] = steps
        if steps >= self._config.fruitful_steps:
            self._fruitless = 0
        counts = self._bugs if verdict.trouble in _OWN_FAULTS else self._repeats
        counts[signature] = counts.get(signature, 0) + 1
        return counts[signature]

    def _forgiving(self, signature: str, steps: int) -> dict[str, int]:
        """The repeats that still count when an attempt fails in this way after `steps` steps.

        A worthwhile attempt forgives them all but its own failure, when that came at the same count as before.
        """
        if steps < self._config.fruitful_steps:
            return self._repeats
        same_place = abs(steps - self._failed_at.get(signature, -_SAME_PLACE_STEPS)) < _SAME_PLACE_STEPS
        return {signature: self._repeats[signature]} if same_place and signature in self._repeats else {}

    def _spent(self, verdict: Verdict) -> Decision:
        limit = self._config.restart_count_max
        if limit == 0 and verdict.trouble is Trouble.SCRIPT_ERROR:
            return _stop(ExitCode.SCRIPT_BUG, "--max-restarts 0 allows no second attempt")
        return _stop(ExitCode.BUDGET_SPENT, f"--max-restarts {limit} is used up")


def _stop(code: ExitCode, why: str) -> Decision:
    rung = Rung.GIVE_BACK if code in (ExitCode.RETRY_HERE, ExitCode.RETRY_ELSEWHERE) else Rung.ASK_A_PERSON
    return Decision(rung=rung, exit_code=code, why=why)
