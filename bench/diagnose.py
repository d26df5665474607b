"""Measures `everstep diagnose`: verdicts on synthetic 3D jobs and real dumps, speed, memory, torchfrtrace beside.

Everything is generated from a seed. `make bench-diagnose` runs it all; --faults, --sizes and --parts make it shorter.
"""

import argparse
import gc
import json
import pickle
import random
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import everstep
from bench.synthetic_jobs import FAULTS, GROUPS, Job, Shape, dump_of, hang
from everstep.adapters.evidence.flight_dumps import decode_dump
from everstep.domain.diagnosis import HangVerdict
from everstep.domain.ids import HostId, Rank
from everstep.domain.recorder import ChannelTrace, GroupTrace, HostState, Membership, RankTrace
from everstep.policy.diagnosis import diagnose
from everstep.policy.trace_summary import MemberLists, identity_of, reduce_dump

SHAPES = {
    64: Shape(4, 4, 4),
    256: Shape(8, 4, 8),
    1024: Shape(8, 8, 16),
    16_384: Shape(8, 16, 128),
    131_072: Shape(8, 16, 1024),
}
REAL = Path(__file__).resolve().parent.parent.parent / "shared/data/flight_recorder"
_LIST_MAX = 8
_QUOTED = "torchfrtrace at 1,024 ranks (quoted from our reference measurements): 77 CPU s, 3.9 GB, culprit buried"


class Traces:
    """A job's traces: each kind of rank is dumped, pickled, decoded and reduced once, and its likes are renamed."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._kinds: dict[object, tuple[int, RankTrace]] = {}
        self._members: dict[str, Membership] = {}

    def all(self) -> tuple[list[RankTrace], list[Membership]]:
        job = self._job
        traces = [self._trace(rank) for rank in range(job.shape.ranks) if rank not in job.missing]
        return traces, list({one.identity: one for one in self._members.values()}.values())

    def _trace(self, rank: int) -> RankTrace:
        job = self._job
        stage = job.shape.place(rank)[0]
        special = rank in job.programs or rank in job.wrong_members or rank in job.unstarted
        key = (stage, job.done[rank], job.entered[rank], rank if special else -1)
        if key not in self._kinds:
            self._kinds[key] = (rank, self._reduced(rank))
        model, trace = self._kinds[key]
        return self._like(trace, model, rank)

    def _reduced(self, rank: int) -> RankTrace:
        content = pickle.dumps(dump_of(self._job, rank, history=30), protocol=2)
        lists = MemberLists()
        trace = reduce_dump(decode_dump(content), lists, rank=Rank(rank), host=HostId(""))
        if rank in self._job.wrong_members:
            self._members |= {one.identity: one for one in lists.memberships()}
        return trace

    def _membership(self, group: str, rank: int) -> str:
        name = self._job.shape.name(group, rank)
        if name not in self._members:
            ranks = tuple(map(Rank, self._job.shape.members(group, rank)))
            self._members[name] = Membership(identity=identity_of(ranks), ranks=ranks)
        return self._members[name].identity

    def _like(self, trace: RankTrace, model: int, rank: int) -> RankTrace:
        job, shape = self._job, self._job.shape
        own = rank in job.wrong_members
        groups = tuple(
            GroupTrace(
                name=shape.name(part.description.lower(), rank),
                description=part.description,
                members=part.members if own else self._membership(part.description.lower(), rank),
                enqueued=part.enqueued,
                started=part.started,
                completed=part.completed,
                tail=part.tail,
                counted=part.counted,
            )
            for part in trace.groups
        )
        if own:
            for group in GROUPS:
                self._membership(group, rank)
        channels = tuple(
            ChannelTrace(
                group=shape.name("pp", rank),
                peer=Rank(one.peer - model + rank),
                sends=one.sends,
                posted=one.posted,
                started=one.started,
                done=one.done,
                order=one.order,
                done_order=one.done_order,
            )
            for one in trace.channels
        )
        state = HostState.ENDED if rank in job.ended else HostState.FROZEN if rank in job.frozen else HostState.UNKNOWN
        return RankTrace(
            rank=Rank(rank),
            host=HostId(f"host{rank // 8}"),
            groups=groups,
            channels=channels,
            host_state=state,
            blocked_order=trace.blocked_order,
            exit_code=job.ended.get(rank),
            last_ns=trace.last_ns + job.skew_ns[rank // 8],
            wrapped=trace.wrapped,
        )


@dataclass
class Score:
    """Counts over the faults of one size."""

    right: int = 0
    wrong: list[str] = field(default_factory=list)
    innocents: int = 0
    unknown: int = 0
    listed: int = 0
    """Misses that name nobody and have the ranks at fault among no more than `_LIST_MAX` suspects."""
    seconds: list[float] = field(default_factory=list)
    by_fault: Counter[str] = field(default_factory=Counter)

    def take(self, job: Job, verdict: HangVerdict, *, seed: int) -> None:
        truth = job.truth
        self.innocents += len(set(verdict.ranks) - truth.ranks)
        named = set(verdict.ranks) == truth.ranks
        there = truth.group.upper() in verdict.operation or not truth.group or truth.group == "pp"
        if verdict.trouble.value in truth.troubles and named and there:
            self.right += 1
            return
        self.unknown += verdict.trouble.value == "unknown" or not verdict.ranks
        self.listed += not verdict.ranks and truth.ranks <= set(verdict.suspects) and len(verdict.suspects) <= _LIST_MAX
        self.by_fault[truth.fault] += 1
        self.wrong.append(
            f"seed {seed} {truth.fault} {sorted(truth.ranks)}: said {verdict.trouble.value} {verdict.ranks[:8]} "
            f"{verdict.reason[:160]}"
        )


def score(size: int, faults: int, seed: int, *, only: str = "") -> Score:
    """Judge random faults over all classes in turn."""
    result = Score()
    for number in range(faults):
        fault = only or FAULTS[number % len(FAULTS)]
        rng = random.Random(f"{seed} {size} {number}")
        job = hang(SHAPES[size], fault, rng)
        traces, memberships = Traces(job).all()
        with _no_collections():
            began = time.process_time()
            verdict = diagnose(
                traces,
                memberships,
                expected_ranks=range(job.shape.ranks),  # type: ignore[arg-type]
                moved=job.moved,  # type: ignore[arg-type]
            )
            result.seconds.append(time.process_time() - began)
        result.take(job, verdict, seed=number)
    return result


@contextmanager
def _no_collections() -> Iterator[None]:
    """As the command does: no cyclic garbage collection while it decides."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def real() -> bool:
    """Bar 1: the real dumps, when they are there."""
    if not REAL.is_dir():
        print("real dumps: not here, skipped")
        return True
    fine = True
    for folder in sorted(one for one in REAL.iterdir() if one.is_dir()):
        text = (folder / "fault_injection.log").read_text(encoding="utf-8")
        truth = tuple(json.loads(re.search(r"Fault ranks: (\[.*?\])", text)[1]))  # type: ignore[index]
        verdict = everstep.diagnose(folder)
        right = verdict.ranks == truth
        fine &= right
        print(
            f"real dumps {folder.name}: {'right' if right else 'WRONG'}: {verdict.trouble.value} {verdict.ranks}, "
            f"truth {truth}"
        )
    return fine


def write_dumps(folder: Path, size: int, entries: int, seed: int, *, repaired: bool = True) -> Job:
    """A folder of pickles with 18 frames per entry, as NCCL's writer leaves them."""
    frames = [{"name": f"forward{i}", "filename": f"/job/model/layer{i}.py", "line": 10 * i} for i in range(17)]
    job = hang(SHAPES[size], "never", random.Random(f"{seed} speed"))
    job.missing = frozenset()
    for rank in range(size):
        dump = dump_of(job, rank, history=entries, frames=frames, entries_max=entries)
        (folder / f"rank_{rank}").write_bytes(pickle.dumps(dump, protocol=2))
    return job


_MEASURED = """
import gc, pathlib, pickle, resource, sys, time
import everstep
everstep.diagnose
began = time.process_time()
verdict = everstep.diagnose(sys.argv[1])
spent = time.process_time() - began
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
gc.disable()
began = time.process_time()
files = list(pathlib.Path(sys.argv[1]).iterdir())
for one in files[::8]:
    pickle.loads(one.read_bytes())
floor = (time.process_time() - began) * len(files) / len(files[::8])
print(spent, peak, floor, verdict.trouble.value, *verdict.ranks)
"""
"""The floor is what `pickle.loads` alone takes on the same files and the same machine, from every eighth of them."""


def speed(size: int, entries: int, seed: int, *, trace: bool) -> None:
    """Bar 4, first part: from pickles, in a process of its own; torchfrtrace on the same files."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        job = write_dumps(folder, size, entries, seed)
        megabytes = sum(one.stat().st_size for one in folder.iterdir()) / 1e6
        command = [sys.executable, "-c", _MEASURED, name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        print(
            f"{size} ranks x {entries} entries ({megabytes:.0f} MB of pickles): {float(said[0]):.2f} CPU s, "
            f"{float(said[1]):.0f} MB (pickle.loads alone {float(said[2]):.2f} s), "
            f"said {said[3]} {said[4:]}, truth {sorted(job.truth.ranks)}",
            flush=True,
        )
        if trace:
            _torchfrtrace(folder, job)


def _torchfrtrace(folder: Path, job: Job) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    command = [str(Path(sys.executable).parent / "torchfrtrace"), str(folder), "-p", "rank_"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    except (OSError, subprocess.TimeoutExpired) as error:
        print(f"    torchfrtrace: {type(error).__name__}")
        return
    spent = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before
    lines = (result.stdout + result.stderr).splitlines()
    culprit = next(iter(job.truth.ranks))
    named = next((n for n, line in enumerate(lines, 1) if re.search(rf"missing ranks: {{{culprit}}}", line)), None)
    print(
        f"    torchfrtrace on the same files: exit {result.returncode}, {spent:.1f} CPU s, {len(lines)} lines, "
        f"culprit alone in line {named}; last line: {lines[-1][:100] if lines else ''}"
    )


def summaries(size: int, seed: int) -> None:
    """Bar 4, second part: from summaries."""
    job = hang(SHAPES[size], "never", random.Random(f"{seed} summaries"))
    traces, memberships = Traces(job).all()
    with _no_collections():
        began = time.process_time()
        verdict = diagnose(traces, memberships, expected_ranks=range(size))  # type: ignore[arg-type]
        spent = time.process_time() - began
    print(
        f"{size} ranks from summaries: {spent:.2f} CPU s, said {verdict.trouble.value} {verdict.ranks}, "
        f"truth {sorted(job.truth.ranks)}",
        flush=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--sizes", type=int, nargs="*", default=[64, 1024, 16_384])
    parser.add_argument("--only", default="", choices=["", *FAULTS])
    parser.add_argument("--parts", nargs="*", default=["real", "faults", "summaries", "speed"])
    options = parser.parse_args()
    fine = real() if "real" in options.parts else True
    for size in options.sizes if "faults" in options.parts else ():
        result = score(size, options.faults, options.seed, only=options.only)
        share = result.right / options.faults
        fine &= share >= 0.99 and not result.innocents
        print(
            f"{size} ranks: {result.right} of {options.faults} right ({share:.1%}), "
            f"{result.innocents} innocent ranks named, {result.unknown} of the misses name nobody, "
            f"{result.listed} of them list at most {_LIST_MAX} suspects with the culprit; "
            f"verdict {max(result.seconds):.3f} CPU s at most",
            flush=True,
        )
        for line in result.wrong:
            print("   ", line)
    if "summaries" in options.parts:
        for size in (16_384, 131_072):
            summaries(size, options.seed)
    if "speed" in options.parts:
        speed(64, 2000, options.seed, trace=True)
        speed(256, 2000, options.seed, trace=True)
        speed(1024, 2000, options.seed, trace=False)
        print(f"    {_QUOTED}")
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
