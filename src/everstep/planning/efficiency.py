"""What failures leave of a job's time: the best checkpoint interval, effective training time, and what a loss may cost.

Every time is in seconds. The letters in formulas: M, mean time between failures of the job; d, a checkpoint's pause;
R, everything from a failure to the next useful step except the lost work; t, useful work between checkpoints. Failures
are exponential, also during restarts and checkpoints; it knows neither spares nor maintenance.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

_NEWTON_STEPS_MAX = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """The four times that decide how much of a job's time is useful, in seconds.

    Attributes:
        mtbf_s: M, mean time between failures of the whole job; `inf` for none.
        pause_s: d, how long training stands still for a checkpoint.
        restart_s: R, detection, restart, restore and first step together.
    """

    mtbf_s: float
    pause_s: float
    restart_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Lever:
    """What an improvement would buy.

    Attributes:
        name: what is halved, such as `restart_s`.
        share: effective training time after it.
        gain: the difference to before.
    """

    name: str
    share: float
    gain: float


def young_interval_s(*, pause_s: float, mtbf_s: float) -> float:
    """Young 1974: t = √(2 d M), the first order. Good for d ≪ M."""
    if pause_s <= 0:
        return 0.0
    return math.sqrt(2.0 * pause_s * mtbf_s)


def daly_first_order_interval_s(*, pause_s: float, mtbf_s: float) -> float:
    """Daly's first order: √(2 d M) − d, and not below 0."""
    return max(0.0, young_interval_s(pause_s=pause_s, mtbf_s=mtbf_s) - pause_s)


def daly_interval_s(*, pause_s: float, mtbf_s: float) -> float:
    """Daly 2006, the higher-order estimate: √(2dM)·[1 + ⅓√(d/2M) + ⅑(d/2M)] − d for d < 2M, else M."""
    if pause_s <= 0:
        return 0.0
    if math.isinf(mtbf_s):
        return math.inf
    if pause_s >= 2.0 * mtbf_s:
        return mtbf_s
    ratio = pause_s / (2.0 * mtbf_s)
    return math.sqrt(2.0 * pause_s * mtbf_s) * (1.0 + math.sqrt(ratio) / 3.0 + ratio / 9.0) - pause_s


def exact_interval_s(*, pause_s: float, mtbf_s: float) -> float:
    """The interval that is best under `exact_share`: t = M·(1 + W₀(−e^{−(1 + d/M)})), with Lambert's W.

    It solves x = 1 − e^{−(x + d/M)} for x = t/M, where the derivative of `exact_share` is 0. R does not matter.
    """
    if pause_s <= 0:
        return 0.0
    if math.isinf(mtbf_s):
        return math.inf
    pause = pause_s / mtbf_s
    x = min(1.0, math.sqrt(2.0 * pause))  # above the root, so that Newton falls to it from one side
    for _ in range(_NEWTON_STEPS_MAX):
        done = -math.expm1(-(x + pause))
        following = x - (x - done) / done
        if abs(following - x) <= 1e-15 * x:
            break
        x = following
    return x * mtbf_s


def exact_share(*, interval_s: float, recovery: Recovery) -> float:
    """Effective training time: t / (M e^{R/M} (e^{(t+d)/M} − 1)) (Daly 2006; exact for exponential failures).

    Args:
        interval_s: t, useful work between two checkpoints; 0 is the limit of ever more of them.

    Returns:
        Useful time ÷ all time, from 0 to 1.
    """
    m, d, r = recovery.mtbf_s, recovery.pause_s, recovery.restart_s
    if math.isinf(m):
        return 1.0 if math.isinf(interval_s) or interval_s + d == 0 else interval_s / (interval_s + d)
    if interval_s <= 0:
        return math.exp(-r / m) if d <= 0 else 0.0
    exponent = (interval_s + d) / m
    if exponent > 700.0 or r / m > 700.0:
        return 0.0
    return interval_s / m * math.exp(-r / m) / math.expm1(exponent)


def best_share(recovery: Recovery) -> float:
    """Effective training time with the best interval."""
    interval_s = exact_interval_s(pause_s=recovery.pause_s, mtbf_s=recovery.mtbf_s)
    return exact_share(interval_s=interval_s, recovery=recovery)


def linear_share(*, interval_s: float, recovery: Recovery) -> float:
    """Meta's linear form: (1 − (R + t/2)/M) / (1 + d/t), and not below 0 (arXiv 2410.21680).

    Within 1 % of the exact model while (R + t/2)/M < 0.1; 0.520 where exact says 0.615 at 100,000 GPUs. Not for plans:
    it is here to be compared.
    """
    if interval_s <= 0:
        return 0.0
    lost = (recovery.restart_s + interval_s / 2.0) / recovery.mtbf_s
    return max(0.0, 1.0 - lost) / (1.0 + recovery.pause_s / interval_s)


def replica_share(*, stall_s: float, rejoin_s: float, replica_count: int, mtbf_s: float) -> float:
    """With replica-level recovery: 1 − (S + T/k)/M, and not below 0 (arXiv 2602.00277, FT-HSDP).

    All of the job stalls for `stall_s`; then one of `replica_count` replicas is away for `rejoin_s`. Linear, so it
    holds while failures do not overlap: (S + T)/M below 1.
    """
    return max(0.0, 1.0 - (stall_s + rejoin_s / replica_count) / mtbf_s)


def loss_budget_s(*, mtbf_s: float, target_share: float) -> float:
    """What one failure may cost, all in all, for a target: M·(1 − target)."""
    return mtbf_s * (1.0 - target_share)


def expected_lost_work_s(*, interval_s: float) -> float:
    """Work that a failure takes with it: half the interval (a failure is as likely at any point of it)."""
    return interval_s / 2.0


def restart_limits_s(*, recovery: Recovery, target_shares: Sequence[float]) -> tuple[float, ...]:
    """The longest R with which each target is reached at the best interval: M·ln(share with R = 0 ÷ target).

    Below 0 the target is out of reach by faster restarts alone: checkpoints cost too much. R itself does not matter.
    """
    share = best_share(replace(recovery, restart_s=0.0))
    if share <= 0:
        return (-math.inf,) * len(target_shares)
    return tuple(recovery.mtbf_s * math.log(share / target) for target in target_shares)


def levers(recovery: Recovery, *, interval_s: float | None = None) -> tuple[Lever, ...]:
    """What halving each of the failure rate, R and d would buy, and moving to the best interval; most first.

    Args:
        interval_s: the interval in use; None for the best one, which then moves with the lever.
    """
    now = best_share(recovery) if interval_s is None else exact_share(interval_s=interval_s, recovery=recovery)

    def after(changed: Recovery) -> float:
        return best_share(changed) if interval_s is None else exact_share(interval_s=interval_s, recovery=changed)

    shares = {
        "failure rate": after(replace(recovery, mtbf_s=recovery.mtbf_s * 2.0)),
        "restart": after(replace(recovery, restart_s=recovery.restart_s / 2.0)),
        "checkpoint pause": after(replace(recovery, pause_s=recovery.pause_s / 2.0)),
    }
    if interval_s is not None:
        shares["best interval"] = best_share(recovery)
    found = [Lever(name=name, share=share, gain=share - now) for name, share in shares.items()]
    return tuple(sorted(found, key=lambda lever: -lever.gain))
