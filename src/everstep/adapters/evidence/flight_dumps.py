"""Finds and loads flight recorder dumps of any torchrun job, and admits no code; knows nothing of what they mean.

Each dump is reduced to a trace as soon as it is decoded, so that thousands fit into memory.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from everstep.adapters.evidence.dump_files import DumpFile, find_dump_files
from everstep.adapters.evidence.evidence_snapshots import HostFacts, facts_of, read_snapshots
from everstep.adapters.evidence.safe_pickle import bounded_loading, load_data
from everstep.domain.ids import HostId, Rank
from everstep.domain.recorder import Membership, RankTrace
from everstep.domain.recorder_dump import Dump, Entry
from everstep.policy.trace_members import fill_members
from everstep.policy.trace_summary import MemberLists, reduce_dump

DUMP_BYTES_MAX = 256 << 20
"""A ring of 20,000 entries with stacks takes 1 MB."""
_COMMON_MAX = 4096
_VERSION = re.compile(r"[12]\.\d+")
_MALFORMED = (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError, OverflowError)
UNUSABLE = (*_MALFORMED, MemoryError, OSError, msgspec.ValidationError)
"""What reading a file that is no dump, or a torn one, can raise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedDumps:
    """Attributes:
    traces: one for each rank of which anything is known, by rank.
    memberships: the member lists that they name.
    problems: one sentence for each file that could not be used, or not fully.
    moved: ranks whose counters differ between the two newest snapshots; None when there is one look only.
    """

    traces: tuple[RankTrace, ...]
    memberships: tuple[Membership, ...]
    problems: tuple[str, ...] = ()
    moved: frozenset[Rank] | None = None


class _PickledEntries(Sequence[Entry]):
    """The ring as unpickled, each entry checked when it is looked at: most never are."""

    def __init__(self, raw: Sequence[Any]) -> None:
        self._raw = raw

    def __len__(self) -> int:
        return len(self._raw)

    def __getitem__(self, position: Any) -> Any:
        return msgspec.convert(self._raw[position], Entry)


class _JsonDump(Dump):
    entries: Sequence[Entry] = ()


_JSON = msgspec.json.Decoder(_JsonDump, strict=False)


def decode_dump(content: bytes) -> Dump:
    """Decode one dump, pickle or JSON, of any version.

    Raises:
        ValueError: with one clause that says why it was refused.
    """
    try:
        if content[:1] == b"\x80":
            raw = load_data(content)
            if not isinstance(raw, dict):
                raise ValueError("it holds no dump")
            entries = raw.pop("entries", ())
            if not isinstance(entries, list | tuple):
                raise ValueError("its entries are no list")
            dump = msgspec.convert(raw, Dump)
            dump.entries = _PickledEntries(entries)
        else:
            dump = _JSON.decode(content)
    except msgspec.DecodeError as error:
        raise ValueError(f"it is torn or no dump ({error})") from error
    except RecursionError as error:
        raise ValueError("it is nested too deeply for a dump") from error
    if not _VERSION.match(dump.version):
        raise ValueError(f"it has the format version {dump.version!r}; known are 2.1 to 2.10")
    return dump


def read_dump(path: Path, dump_bytes_max: int) -> Dump:
    """Read and decode one file.

    Raises:
        ValueError, OSError: with one clause that says why it can't be used.
    """
    size = path.stat().st_size
    if size > dump_bytes_max:
        raise ValueError(f"it has {size} bytes, over the limit of {dump_bytes_max}")
    if size == 0:
        raise ValueError("it is empty")
    return decode_dump(path.read_bytes())


def rank_of(file: DumpFile, dump: Dump, members: MemberLists) -> Rank:
    """From the file's content, its name, or as the one rank that is in all of its groups.

    Raises:
        ValueError: neither tells, or they contradict each other.
    """
    if dump.rank is not None:
        return Rank(dump.rank)
    common: set[Rank] | None = None
    for config in dump.pg_config.values():
        if (membership := members.of(config.ranks)) is not None and len(membership.ranks) <= _COMMON_MAX:
            common = set(membership.ranks) if common is None else common & set(membership.ranks)
    if file.rank is not None and (common is None or file.rank in common):
        return Rank(file.rank)
    if common and len(common) == 1:
        return common.pop()
    if file.rank is not None:
        raise ValueError(f"its name says rank {file.rank}, and its groups have no such member")
    raise ValueError("neither its name nor its groups say which rank it is of")


def load_dumps(paths: Sequence[Path], *, prefix: str = "", dump_bytes_max: int = DUMP_BYTES_MAX) -> LoadedDumps:
    """Load folders and files: dumps of any name, or the evidence that everstep kept.

    Args:
        prefix: only files with this in their names.

    Raises:
        ConfigError: a path does not exist, or there is no dump in any of them.
    """
    files = find_dump_files(paths, prefix=prefix)
    loading = _Loading(dump_bytes_max, read_snapshots([file.path for file in files if file.is_snapshot]))
    with bounded_loading():
        for file in files:
            if not file.is_snapshot:
                loading.take(file)
    return loading.finish()


class _Loading:
    """The traces so far, by rank and snapshot."""

    def __init__(self, dump_bytes_max: int, facts: dict[int, dict[Rank, HostFacts]]) -> None:
        self._dump_bytes_max = dump_bytes_max
        self._facts = facts
        self._members = MemberLists()
        self._problems: list[str] = []
        self._snapshots: dict[int, dict[Rank, RankTrace]] = {}

    def take(self, file: DumpFile) -> None:
        try:
            dump = read_dump(file.path, self._dump_bytes_max)
            rank = rank_of(file, dump, self._members)
            facts = self._facts.get(file.snapshot, {}).get(rank, HostFacts())
            trace = reduce_dump(
                dump,
                self._members,
                rank=rank,
                host=facts.host or HostId(file.host),
                host_state=facts.state,
                stack=facts.stack,
                exit_code=facts.exit_code,
            )
        except UNUSABLE as error:
            self._problems.append(f"{file.path.name} could not be used: {clause_of(error)}")
            return
        traces = self._snapshots.setdefault(file.snapshot, {})
        if rank in traces:
            self._problems.append(f"{file.path.name} is another dump of rank {rank}; the first one was kept")
            return
        traces[rank] = trace

    def finish(self) -> LoadedDumps:
        self._prefer_rings()
        newest_first = sorted({*self._snapshots, *self._facts}, reverse=True)
        newest = newest_first[0] if newest_first else 0
        traces = dict(self._snapshots.get(newest, {}))
        for rank, facts in self._facts.get(newest, {}).items():
            if rank not in traces:
                traces[rank] = facts_of(rank, facts)
        moved = None
        if len(newest_first) > 1:
            before = self._snapshots.get(newest_first[1], {})
            moved = frozenset(r for r, t in traces.items() if r in before and _progress(before[r]) != _progress(t))
        ordered = fill_members([traces[rank] for rank in sorted(traces)], self._members)
        return LoadedDumps(
            traces=ordered,
            memberships=self._members.memberships(),
            problems=tuple(self._problems),
            moved=moved,
        )

    def _prefer_rings(self) -> None:
        """A trace from everstep's ring takes the place of the one from PyTorch's recorder: it has more in it."""
        for number, facts in self._facts.items():
            for rank, fact in facts.items():
                for membership in fact.memberships:
                    self._members.add(membership.ranks)
                if fact.trace is not None:
                    self._snapshots.setdefault(number, {})[rank] = fact.trace


def _progress(trace: RankTrace) -> tuple[object, ...]:
    groups = sorted((group.name, group.enqueued, group.completed) for group in trace.groups)
    return (*groups, trace.blocked_order)


def clause_of(error: BaseException) -> str:
    """Why a file can't be used, without line breaks."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return " ".join(str(error).split()) or type(error).__name__
