"""Who holds up a job in which nothing moves: a verdict from two snapshots of rank summaries.

Takes summaries, never files, so that the same code judges four ranks on a laptop and dumps of thousands.
A rank that waits for others is never blamed. The steps follow flight_recorder.md section 4.3, in its order:
movement, dead, frozen, never entered, inside the operation; what is not sure is UNKNOWN with what is missing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from everstep.domain.causes import Cause
from everstep.domain.evidence import Frame, ProcessState, RankSummary
from everstep.domain.ids import Rank
from everstep.domain.phases import Phase
from everstep.domain.verdicts import Trouble, Verdict
from everstep.policy.excuses import excuse_for
from everstep.policy.second_opinion import opinion_on_silence
from everstep.policy.wording import fold_ranks, name_ranks, own_line

_SPINNING_SHARE = 0.5
_WAITING_FILES = ("torch/distributed/",)
_NAMED_MAX = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class HangFinding:
    """Attributes:
    excuse: the phase that a culprit seems to be in without having said so, such as a checkpoint seen on its stack:
        a reason to wait as long as that phase may last. None when there is none.
    stopped: the kernel itself says that the culprit does not run: no pause on purpose looks like that.
    """

    verdict: Verdict
    excuse: Phase | None = None
    stopped: bool = False


def locate_hang(first: Sequence[RankSummary], second: Sequence[RankSummary], *, apart_s: float) -> HangFinding:
    """Judge a silence.

    Args:
        first, second: summaries of all ranks that could be had, at two moments.
        apart_s: seconds between them.
    """
    now = {summary.rank: summary for summary in second}
    before = {summary.rank: summary for summary in first}
    if moved := _moved(before, now):
        return HangFinding(verdict=_slow(moved))
    finding = (
        _dead(now)
        or _frozen(before, now)
        or _busy_alone(now)
        or _holding_the_gil(before, now)
        or _never_entered(before, now, apart_s=apart_s)
        or _inside(now)
        or _unknown(now)
    )
    return _by_operations(finding, before, now, apart_s=apart_s) or finding


def _by_operations(
    finding: HangFinding, before: dict[Rank, RankSummary], now: dict[Rank, RankSummary], *, apart_s: float
) -> HangFinding | None:
    """A better finding from the operations themselves, where there is a record of them."""
    opinion = opinion_on_silence(finding.verdict, list(now.values()))
    if opinion is None:
        return None
    verdict, excuse = opinion
    if excuse is None and verdict.trouble is Trouble.NEVER_ENTERED:
        rank = verdict.ranks[0]
        if rank in before and _computes(before[rank], now[rank], apart_s=apart_s):
            excuse = Phase.EVALUATING
    return HangFinding(verdict=verdict, excuse=excuse)


def _moved(before: dict[Rank, RankSummary], now: dict[Rank, RankSummary]) -> list[Rank]:
    return [
        rank
        for rank, summary in sorted(now.items())
        if (old := before.get(rank)) is not None
        and (
            (old.step, old.phase) != (summary.step, summary.phase)
            or summary.silence_s < old.silence_s
            or (old.groups and summary.groups and _counts(old) != _counts(summary))
            or (old.trace is not None and summary.trace is not None and old.trace.last_ns != summary.trace.last_ns)
        )
    ]


def _counts(summary: RankSummary) -> list[tuple[str, int, int]]:
    return [(group.group, group.enqueued, group.completed) for group in summary.groups]


def _slow(moved: list[Rank]) -> Verdict:
    return Verdict(
        trouble=Trouble.SLOW,
        ranks=(),
        hosts=(),
        reason=f"Not a hang: {name_ranks(moved)} made progress between two snapshots.",
        cause=Cause(component="None", category="None"),
        signature="slow",
    )


def _finding(
    trouble: Trouble,
    culprits: list[RankSummary],
    now: dict[Rank, RankSummary],
    *,
    what: str,
    cause: Cause,
    evidence: tuple[str, ...] = (),
    excuse: Phase | None = None,
    stopped: bool = False,
) -> HangFinding:
    """Put a verdict together. `what` completes the sentence `rank 2 on host h …`."""
    ranks = tuple(sorted(summary.rank for summary in culprits))
    hosts = tuple(sorted({summary.host for summary in culprits}))
    line = own_line(culprits[0].stack)
    others = _others(now, ranks)
    missing = tuple(f"rank {summary.rank}: {text}" for summary in culprits for text in summary.missing)
    return HangFinding(
        verdict=Verdict(
            trouble=trouble,
            ranks=ranks,
            hosts=hosts,
            reason=f"{name_ranks(ranks)} on {', '.join(hosts)} {what}{others}.",
            evidence=(*evidence, *missing),
            where=str(line) if line else "",
            cause=cause,
            signature=f"hang {trouble} {line.file + ':' + line.function if line else ''} {fold_ranks(ranks)}".strip(),
        ),
        excuse=excuse,
        stopped=stopped,
    )


def _others(now: dict[Rank, RankSummary], ranks: tuple[Rank, ...]) -> str:
    waiting = [summary for rank, summary in now.items() if rank not in ranks and _waits(summary)]
    if not waiting:
        return ""
    newest = next((group.newest for summary in waiting for group in summary.groups if group.newest), "")
    verb = "waits" if len(waiting) == 1 else "wait"
    return f"; {name_ranks([s.rank for s in waiting])} {verb} in {newest or 'a collective'}"


def _waits(summary: RankSummary) -> bool:
    """Inside a collective that has not ended: it can't be the one that others wait for."""
    if summary.groups:
        return any(group.enqueued > group.completed for group in summary.groups)
    return any(part in frame.file for frame in summary.stack[:3] for part in _WAITING_FILES)


def _dead(now: dict[Rank, RankSummary]) -> HangFinding | None:
    """Ranks that ended in the middle; ranks that ended well only when somebody still waits for them."""
    gone = [summary for summary in now.values() if summary.process is ProcessState.GONE]
    culprits = [summary for summary in gone if summary.phase is not Phase.ENDING or summary.exit_code != 0]
    if not culprits and any(_waits(summary) for summary in now.values() if summary.process is not ProcessState.GONE):
        culprits = gone
    if not culprits:
        return None
    codes = ", ".join(str(summary.exit_code) for summary in culprits)
    return _finding(
        Trouble.DEAD,
        culprits,
        now,
        what=f"ended at step {culprits[0].step} with exit code {codes}, and the others wait for it in vain",
        cause=Cause(component="Dependency", category="Dependency"),
    )


def _frozen(before: dict[Rank, RankSummary], now: dict[Rank, RankSummary]) -> HangFinding | None:
    stopped = [s for s in now.values() if s.process is ProcessState.STOPPED]
    if stopped:
        return _finding(
            Trouble.FROZEN,
            stopped,
            now,
            what=f"is frozen since step {stopped[0].step}: stopped by a signal, "
            f"silent for {stopped[0].silence_s:.1f} s",
            evidence=("the kernel reports state T (stopped)",),
            stopped=True,
            cause=Cause(component="Frozen Process", category="Host"),
        )
    blocked = [s for s in now.values() if s.process is ProcessState.BLOCKED and _was(before, s, ProcessState.BLOCKED)]
    if blocked:
        return _finding(
            Trouble.FROZEN,
            blocked,
            now,
            what=f"is stuck inside the kernel at step {blocked[0].step} (D state) for {blocked[0].silence_s:.1f} s",
            evidence=("the kernel reports state D (uninterruptible), usually a disk or driver",),
            cause=Cause(component="Storage or Driver", category="Host"),
        )
    mute = [s for s in now.values() if s.answers is False and not s.stack and _never_answered(before, s)]
    if mute and any(s.answers for s in now.values()):
        return _finding(
            Trouble.FROZEN,
            mute,
            now,
            what=f"answers nothing since step {mute[0].step}, neither its server nor the stack signal",
            cause=Cause(component="Frozen Process", category="Host"),
        )
    return None


def _was(before: dict[Rank, RankSummary], summary: RankSummary, state: ProcessState) -> bool:
    old = before.get(summary.rank)
    return old is not None and old.process is state


def _never_answered(before: dict[Rank, RankSummary], summary: RankSummary) -> bool:
    old = before.get(summary.rank)
    return old is not None and old.answers is False and not old.stack


def _busy_alone(now: dict[Rank, RankSummary]) -> HangFinding | None:
    """Nobody waits for anybody: every living rank is at work outside of collectives, as in an evaluation or at the end.

    Only ranks whose recorder or stack was seen can be said not to wait; one that shows neither leaves it open.
    """
    living = [summary for summary in now.values() if summary.process is not ProcessState.GONE]
    if not living or any(_waits(summary) or not (summary.groups or summary.stack) for summary in living):
        return None
    ended = len(living) < len(now)
    lines = ", ".join(f"rank {s.rank} at {line}" for s in living[:_NAMED_MAX] if (line := own_line(s.stack)))
    return HangFinding(
        verdict=Verdict(
            trouble=Trouble.UNKNOWN,
            ranks=(),
            hosts=(),
            reason=f"{name_ranks([s.rank for s in living])} have made no step for {living[0].silence_s:.1f} s, "
            f"and nobody waits in a collective: {lines or 'no line of Python is known'}.",
            cause=Cause(component="Unknown", category="Unknown"),
            signature="hang busy",
        ),
        excuse=Phase.ENDING if ended else Phase.EVALUATING,
    )


def _holding_the_gil(before: dict[Rank, RankSummary], now: dict[Rank, RankSummary]) -> HangFinding | None:
    holders = [
        summary
        for summary in now.values()
        if summary.gil_free is False
        and (old := before.get(summary.rank)) is not None
        and old.gil_free is False
        and not _waits(summary)
    ]
    if not holders or len(holders) == len(now) > 1:
        return None
    excuse = excuse_for(holders[0].stack)
    return _finding(
        Trouble.FROZEN,
        holders,
        now,
        what=f"holds Python's global lock in a call that does not return, at step {holders[0].step}, "
        f"for {holders[0].silence_s:.1f} s",
        evidence=("its worker server answers, but no Python code can run in it",),
        cause=Cause(component="Native Code Holding the GIL", category="Dependency"),
        excuse=excuse,
    )


def _never_entered(
    before: dict[Rank, RankSummary], now: dict[Rank, RankSummary], *, apart_s: float
) -> HangFinding | None:
    absent, fact = _absent(now)
    culprits = [summary for summary in absent if not _waits(summary)]
    if not culprits:
        return None
    culprit = culprits[0]
    old = before.get(culprit.rank)
    excuse = excuse_for(culprit.stack)
    if excuse is None and old is not None and _computes(old, culprit, apart_s=apart_s):
        excuse = Phase.EVALUATING
    line = own_line(culprit.stack)
    return _finding(
        Trouble.NEVER_ENTERED,
        culprits,
        now,
        what=f"never entered the collective after step {culprit.step}"
        f"{f': it stands at {line}' if line else ''}, silent for {culprit.silence_s:.1f} s",
        evidence=(fact,),
        cause=_cause_of_absence(culprit.stack),
        excuse=excuse,
    )


def _absent(now: dict[Rank, RankSummary]) -> tuple[list[RankSummary], str]:
    """Ranks that are behind in a group in which others wait, or without a recorder: behind in steps, or not waiting.

    One that is behind but waits in another group is passed over: the one that it waits for is to be found there.
    """
    frontier: dict[str, int] = {}
    for summary in now.values():
        for group in summary.groups:
            if group.enqueued > group.completed:
                frontier[group.group] = max(frontier.get(group.group, 0), group.enqueued)
    for name, newest in sorted(frontier.items()):
        behind = [
            summary
            for summary in now.values()
            for group in summary.groups
            if group.group == name and group.enqueued < newest and not _waits(summary)
        ]
        if behind:
            counts = ", ".join(f"rank {s.rank} {_enqueued(s, name)}" for s in behind)
            return behind, f"group {name}: the others have entered collective {newest}; {counts}"
    if frontier:
        return [], ""
    waiting = [summary for summary in now.values() if _waits(summary)]
    with_stack = [summary for summary in now.values() if summary.stack and not _waits(summary)]
    if waiting and with_stack:
        return with_stack, "no recorder: the other ranks' stacks are inside torch.distributed, this one's is not"
    steps = {summary.step for summary in now.values()}
    if len(steps) > 1:
        return [summary for summary in now.values() if summary.step == min(steps)], "no recorder: it is a step behind"
    return [], ""


def _enqueued(summary: RankSummary, name: str) -> int:
    return next(group.enqueued for group in summary.groups if group.group == name)


def _computes(old: RankSummary, new: RankSummary, *, apart_s: float) -> bool:
    """Busy and moving: it uses a CPU and its stack goes through different functions. A tight loop does not."""
    if old.cpu_s is None or new.cpu_s is None or apart_s <= 0:
        return False
    busy = (new.cpu_s - old.cpu_s) / apart_s >= _SPINNING_SHARE
    return busy and [f.function for f in old.stack] != [f.function for f in new.stack]


def _cause_of_absence(stack: Sequence[Frame]) -> Cause:
    text = " ".join(f"{frame.file} {frame.function}" for frame in stack[:6]).lower()
    if "dataloader" in text or "next_batch" in text or "/data/" in text or "dataset" in text:
        return Cause(component="Data Loader", category="Storage")
    return Cause(component="Stuck Before a Collective", category="Software")


def _inside(now: dict[Rank, RankSummary]) -> HangFinding | None:
    """Every rank is inside the same newest collective of some group, and none comes out."""
    if len(now) < 2 or not all(summary.groups and _waits(summary) for summary in now.values()):
        return None
    newest = {tuple((g.group, g.enqueued) for g in s.groups if g.enqueued > g.completed) for s in now.values()}
    if len(newest) != 1:
        return None
    operation = next((g.newest for s in now.values() for g in s.groups if g.enqueued > g.completed), "")
    ranks = sorted(now)
    return HangFinding(
        verdict=Verdict(
            trouble=Trouble.INSIDE_OP,
            ranks=(),
            hosts=(),
            reason=f"{name_ranks(ranks)} are all inside {operation or 'the same collective'} and none comes out: "
            "a link or device between them, which this evidence does not narrow down.",
            evidence=(f"every rank has entered {newest.pop()}",),
            cause=Cause(component="Network Switch/Cable", category="Network"),
            signature="hang inside_op",
        )
    )


def _unknown(now: dict[Rank, RankSummary]) -> HangFinding:
    blind = [s.rank for s in now.values() if not s.stack and not s.groups]
    why = f"no stack and no recorder from {name_ranks(blind)}" if blind else "the snapshots point at no single rank"
    return HangFinding(
        verdict=Verdict(
            trouble=Trouble.UNKNOWN,
            ranks=(),
            hosts=(),
            reason=f"Nothing moves and the culprit is unknown, because {why}.",
            evidence=tuple(f"rank {s.rank}: {text}" for s in now.values() for text in s.missing),
            cause=Cause(component="Unknown", category="Unknown"),
            signature="hang unknown",
        )
    )
