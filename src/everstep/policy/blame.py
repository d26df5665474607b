"""Who is to blame when workers have ended: the one that failed by itself, never one that lost a peer.

The first exit that is seen is often a victim's (peers.md: torchrun names a survivor in 4 of 4 freezes, and the first
exception of a gloo job may be "connection closed by peer"). So ends are ranked by what they prove, then by time.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from everstep.domain.causes import Cause
from everstep.domain.events import WorkerExited
from everstep.domain.phases import Phase
from everstep.domain.verdicts import Trouble, Verdict
from everstep.policy.wording import name_ranks, name_signal

_COMMUNICATION = re.compile(
    r"gloo|nccl|c10d|collective|TCPStore|ProcessGroup|DistNetworkError|DistBackendError|DistStoreError", re.I
)
"""Where a lost peer is lost: a script's own server that refuses a connection is no rank of the job."""
_LOST_A_PEER = re.compile(
    r"Connection closed by peer|Connection reset by peer|Connection refused|Broken pipe|connectFullMesh"
    r"|remote process exited|DistNetworkError|DistBackendError|Socket Timeout|socketStartConnect"
    r"|Timed out waiting|timed out after \d+ seconds|NCCL communicator was aborted|ncclRemoteError"
    r"|recvValue failed|sendBytes failed|Failed to recv|EnforceNotMet|watchdog",
    re.IGNORECASE,
)
_DISK_FULL = re.compile(r"\[Errno 28\]|No space left on device|\[Errno 122\]|Disk quota exceeded")
_MAINTENANCE_SIGNAL = 15
_ABORT_SIGNAL = 6
_KILL_SIGNAL = 9
_DETAIL_CHARACTERS_MAX = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Blame:
    """Attributes:
    certain: False when a better suspect may still turn up, since only victims have ended so far.
    culprit: the exit that the verdict is about.
    planned: the end was ordered from outside, as in maintenance.
    """

    verdict: Verdict
    culprit: WorkerExited
    certain: bool
    planned: bool = False


def is_victim(end: WorkerExited) -> bool:
    """Whether the end looks like that of a rank which lost a peer."""
    if end.error_type:
        return _speaks_of_a_lost_peer(f"{end.error_type}: {end.error_message}")
    own_choice = end.exit_code > 0 or end.exit_code == -_ABORT_SIGNAL
    return own_choice and _speaks_of_a_lost_peer(end.last_lines)


def _speaks_of_a_lost_peer(text: str) -> bool:
    return bool(_COMMUNICATION.search(text) and _LOST_A_PEER.search(text))


def blame(exits: Sequence[WorkerExited], *, world_size: int) -> Blame | None:
    """The verdict over all ends so far; None while every end is a proper one.

    Args:
        exits: all ends of the attempt, in the order in which they were seen.
        world_size: how many ranks there are, to tell a silent leave from a common end.
    """
    failed = [end for end in exits if end.exit_code != 0]
    left = [end for end in exits if end.exit_code == 0 and end.phase is not Phase.ENDING]
    own_errors = [end for end in failed if (end.exit_code > 0 or end.error_type) and not is_victim(end)]
    killed = [end for end in failed if end.exit_code < 0 and not end.error_type and not is_victim(end)]
    if killed:
        return _killed(min(killed, key=_time), exits)
    if own_errors:
        return _script_error(min(own_errors, key=_time), exits)
    if left and len(exits) - len(failed) < world_size:
        return _left_silently(min(left, key=_time), exits)
    if failed:
        return _only_victims(min(failed, key=_time), exits, world_size=world_size)
    return None


def _time(end: WorkerExited) -> float:
    return end.at_s if end.error_at_s is None else end.error_at_s


def _killed(end: WorkerExited, exits: Sequence[WorkerExited]) -> Blame:
    number = -end.exit_code
    signal = name_signal(number)
    where = f"rank {end.rank} on {end.host}"
    step = f"after step {end.step}" if end.step else "before its first step"
    planned = number == _MAINTENANCE_SIGNAL
    if planned:
        cause = Cause(component="Host Maintenance", category="Planned")
        reason = f"{where} was asked to stop (SIGTERM) from outside {step}: planned maintenance."
    elif end.oom_killed:
        cause = Cause(component="System Memory", category="Host")
        reason = f"{where} was killed by the kernel for want of memory {step} (pid {end.pid})."
    elif number == _KILL_SIGNAL:
        cause = Cause(component="Killed Process", category="Unknown")
        reason = f"{where} was killed by {signal} {step} (pid {end.pid}); nothing on this host says by whom."
    else:
        cause = Cause(component="Crash in Native Code", category="Dependency")
        reason = f"{where} crashed with {signal} {step} (pid {end.pid})."
    return Blame(
        verdict=Verdict(
            trouble=Trouble.DEAD,
            ranks=(end.rank,),
            hosts=(end.host,),
            reason=reason,
            evidence=(f"the kernel reports {signal} for pid {end.pid}", *_victims(end, exits)),
            cause=cause,
            signature=f"dead {signal} rank {end.rank}",
        ),
        culprit=end,
        certain=True,
        planned=planned,
    )


def _script_error(end: WorkerExited, exits: Sequence[WorkerExited]) -> Blame:
    step = f"after step {end.step}" if end.step else "before its first step"
    cause = Cause(component="Software Bug", category="Dependency")
    trouble = Trouble.SCRIPT_ERROR
    if end.error_type:
        what = f"{end.error_type}: {end.error_message}"[:_DETAIL_CHARACTERS_MAX].splitlines()[0]
        reason = f"rank {end.rank} on {end.host} raised {what} {step}, at {end.error_where}."
        if _DISK_FULL.search(what):
            trouble = Trouble.DISK_FULL
            cause = Cause(component="Disk Full", category="Host")
            reason += " The disk is full: free some space, or write to another with --log-dir and --run-dir."
    else:
        what = f"exit code {end.exit_code}"
        reason = f"rank {end.rank} on {end.host} ended with exit code {end.exit_code} {step}."
    return Blame(
        verdict=Verdict(
            trouble=trouble,
            ranks=(end.rank,),
            hosts=(end.host,),
            reason=reason,
            evidence=_victims(end, exits),
            where=end.error_where,
            cause=cause,
            signature=f"script error {what} at {end.error_where}",
        ),
        culprit=end,
        certain=True,
    )


def _left_silently(end: WorkerExited, exits: Sequence[WorkerExited]) -> Blame:
    return Blame(
        verdict=Verdict(
            trouble=Trouble.DEAD,
            ranks=(end.rank,),
            hosts=(end.host,),
            reason=f"rank {end.rank} on {end.host} left silently with exit code 0 after step {end.step}, "
            "while the other ranks were still at work.",
            evidence=("its script had not returned when the process ended", *_victims(end, exits)),
            cause=Cause(component="Dependency", category="Dependency"),
            signature=f"silent exit rank {end.rank}",
        ),
        culprit=end,
        certain=any(is_victim(other) for other in exits),  # else all the others may be about to leave in the same way
    )


def _only_victims(end: WorkerExited, exits: Sequence[WorkerExited], *, world_size: int) -> Blame:
    finished = [other.rank for other in exits if other.exit_code == 0]
    reason = f"rank {end.rank} on {end.host} lost the connection to a peer after step {end.step}"
    if finished:
        reason += (
            f"; {name_ranks(finished)} had ended with exit code 0 by then, so the ranks disagree on how long to train."
        )
    else:
        reason += ", and no rank shows a failure of its own."
    return Blame(
        verdict=Verdict(
            trouble=Trouble.LOST_CONNECTION,
            ranks=(),
            hosts=(),
            reason=reason,
            evidence=(f"rank {end.rank}: {end.error_type}: {end.error_message}"[:_DETAIL_CHARACTERS_MAX],),
            where=end.error_where,
            cause=Cause(component="Lost Connection", category="Network"),
            signature="lost connection",
        ),
        culprit=end,
        certain=len(exits) == world_size,
    )


def _victims(culprit: WorkerExited, exits: Sequence[WorkerExited]) -> tuple[str, ...]:
    victims = [end.rank for end in exits if end.rank != culprit.rank and end.exit_code != 0]
    return (f"{name_ranks(victims)} ended after it, having lost a peer",) if victims else ()
