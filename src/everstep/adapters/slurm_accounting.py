"""Slurm's accounting as `sacct -P` prints it: jobs with their state, hosts and time, out of text that is often broken.

Fields hold line breaks and bytes that are no UTF-8, and lines are cut off; what can be put together again is, the rest
is counted. It knows nothing of what a state means for a plan.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from everstep.domain.errors import ConfigError, EvidenceError

WANTED = "sacct -P -D -X -o JobID,State,NNodes,ElapsedRaw,AllocTRES"
LINES_JOINED_MAX = 200
"""A field with more line breaks than this is given up."""
_DELIMITERS = ("|#", "|", "\t", ",")
_ELAPSED = re.compile(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)(?:\.\d+)?")
_GPUS = re.compile(r"gres/gpu(?::[^=,]*)?=(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmJob:
    """One allocation, not its steps.

    Attributes:
        state: the first word of the state, such as `NODE_FAIL` or `CANCELLED`.
        host_count: allocated hosts; 0 for a job that never started.
        gpu_count: allocated GPUs; None when the output does not say.
    """

    job_id: str
    state: str
    host_count: int
    elapsed_s: float
    gpu_count: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmAccounting:
    """What a file of sacct's output holds.

    Attributes:
        joined_count: records that were put together from several lines.
        broken_count: lines or records that could not be read.
    """

    jobs: tuple[SlurmJob, ...]
    joined_count: int
    broken_count: int


def read_sacct(path: Path) -> SlurmAccounting:
    """Read a file.

    Raises:
        ConfigError: it isn't there or can't be read.
        EvidenceError: it is not sacct's output with a header, or lacks a needed column.
    """
    try:
        text = path.read_bytes().decode("utf-8", errors="replace")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; give a file with the output of `{WANTED}`") from error
    return parse_sacct(text, name=str(path))


def parse_sacct(text: str, *, name: str) -> SlurmAccounting:
    """Read sacct's output.

    Args:
        name: what the sentences of errors call it.

    Raises:
        EvidenceError: it is not sacct's output with a header, or lacks a needed column.
    """
    lines = text.replace("\r\n", "\n").split("\n")
    header = next((line for line in lines if line.strip()), "")
    delimiter = next((d for d in _DELIMITERS if d in header), None)
    if delimiter is None or "JobID" not in header:
        raise EvidenceError(f"{name} is not sacct's output with a header line: write it with `{WANTED}`")
    columns = _Columns(header, delimiter, name)
    records = _Records(lines[lines.index(header) + 1 :], delimiter, header.count(delimiter))
    jobs: list[SlurmJob] = []
    bad_count = 0
    for record in records:
        try:
            job = columns.job(record.split(delimiter))
        except ValueError:
            bad_count += 1
            continue
        if job is not None:
            jobs.append(job)
    return SlurmAccounting(
        jobs=tuple(jobs), joined_count=records.joined_count, broken_count=records.broken_count + bad_count
    )


class _Records:
    """Lines put together until each has the header's number of delimiters; counts what it had to do."""

    def __init__(self, lines: list[str], delimiter: str, wanted: int) -> None:
        self._lines = lines
        self._delimiter = delimiter
        self._wanted = wanted
        self.joined_count = 0
        self.broken_count = 0

    def __iter__(self) -> Iterator[str]:
        parts: list[str] = []
        count = 0
        for line in self._lines:
            if not line.strip() and not parts:
                continue
            found = line.count(self._delimiter)
            if parts and (count + found > self._wanted or len(parts) >= LINES_JOINED_MAX):
                self.broken_count += 1  # what came before was cut off: this line begins anew
                parts, count = [], 0
            if found > self._wanted:
                self.broken_count += 1
                continue
            parts.append(line)
            count += found
            if count == self._wanted:
                self.joined_count += len(parts) > 1
                yield "\n".join(parts)
                parts, count = [], 0
        if any(part.strip() for part in parts):
            self.broken_count += 1


class _Columns:
    """Where the needed fields are."""

    def __init__(self, header: str, delimiter: str, name: str) -> None:
        names = [column.strip() for column in header.split(delimiter)]
        self._at = {column: at for at, column in reversed([*enumerate(names)])}
        self._id = self._need(name, "JobID", "JobIDRaw")
        self._state = self._need(name, "State")
        self._hosts = self._need(name, "AllocNodes", "NNodes")
        self._elapsed = self._need(name, "ElapsedRaw", "Elapsed")
        self._tres = self._at.get("AllocTRES")

    def job(self, fields: list[str]) -> SlurmJob | None:
        """The job of a record; None for a step or a repeated header.

        Raises:
            ValueError: a field is not what it should be.
        """
        job_id, state = fields[self._id].strip(), fields[self._state].strip()
        if "." in job_id or job_id in {"JobID", "JobIDRaw"}:
            return None
        if not job_id or not job_id[0].isdigit() or not re.match(r"[A-Z_]+\b", state):
            raise ValueError(job_id)
        gpus = _GPUS.search(fields[self._tres]) if self._tres is not None else None
        return SlurmJob(
            job_id=job_id,
            state=state.split()[0].rstrip("+"),
            host_count=int(fields[self._hosts] or 0),
            elapsed_s=_elapsed_s(fields[self._elapsed].strip()),
            gpu_count=None if self._tres is None else int(gpus[1]) if gpus else 0,
        )

    def _need(self, name: str, *columns: str) -> int:
        for column in columns:
            if column in self._at:
                return self._at[column]
        raise EvidenceError(f"{name} has no column {' or '.join(columns)}: write it with `{WANTED}`")


def _elapsed_s(text: str) -> float:
    """Seconds from `ElapsedRaw` or from `[D-][HH:]MM:SS`; 0 for an empty field.

    Raises:
        ValueError: it is neither.
    """
    if not text or text.isdigit():
        return float(text or 0)
    match = _ELAPSED.fullmatch(text)
    if match is None:
        raise ValueError(text)
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
