"""The three kinds of failure that are not our own bugs; each says whose fault it is and what to do.

The exit-code contract lives here too, since an error decides how the job ends.
"""

from enum import IntEnum


class ExitCode(IntEnum):
    """What `everstep run` tells the scheduler: stable, and clear of the codes of shells (1, 2, 126-165, 255)."""

    DONE = 0
    SCRIPT_BUG = 10
    """The script itself fails in the same way again and again: do not retry."""
    RETRY_HERE = 11
    """The job failed for a reason outside the script; the same hosts are worth another try."""
    RETRY_ELSEWHERE = 12
    """The same rank keeps dying on this host without the script's fault: use another host."""
    HANG_UNRESOLVED = 13
    """The job hangs again and again at the same place."""
    PREEMPTED = 14
    """Stopped from outside, by SIGTERM or Ctrl-C."""
    BUDGET_SPENT = 15
    """--max-restarts or the storm breaker ended the job."""
    USAGE = 64
    """A flag, path or file of the user's is wrong; nothing was started."""
    INTERNAL = 70
    """A defect of everstep."""
    IO_ERROR = 74
    """The ledger can't be written: the disk is full or gone."""


class EverstepError(Exception):
    """An error whose text is one sentence for the person who reads it."""

    exit_code = ExitCode.INTERNAL


class ConfigError(EverstepError):
    """The user's: names the flag or key, and what to write instead."""

    exit_code = ExitCode.USAGE


class EvidenceError(EverstepError):
    """A file or a peer sent something malformed."""

    exit_code = ExitCode.USAGE


class WorldError(EverstepError):
    """A process, disk or network failed; `retryable` says whether the same call may work later."""

    exit_code = ExitCode.IO_ERROR

    def __init__(self, message: str, *, retryable: bool = False) -> None:
        super().__init__(message)
        self.retryable = retryable
