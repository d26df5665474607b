"""Makes 3D-parallel training jobs that hang: exact blocking in the last step, one fault and its truth, real dumps.

TP x PP x DP in Megatron's rank order, per-layer collectives, a pipeline of single or batched messages, two groups with
the same members, run-ahead, wrapped rings (flight_recorder.md, section 4.6). It knows nothing of who judges them.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

STEPS_BEFORE = 7
_LAYERS, _MICROBATCHES = 2, 2
FAULTS = (
    "never", "dead", "killed", "frozen", "wrong_op", "shape", "dtype", "extra", "skipped", "loop_bound", "ended",
    "order", "creation", "gpu_lag", "gpu_unstarted", "link", "healthy", "slow",
)  # fmt: skip
"""never includes point-to-point places; dead leaves no dump, killed leaves its shared memory."""


@dataclass(frozen=True, slots=True)
class Op:
    """kind: collective, or `message` with its (sends, to the next stage) pairs."""

    group: str
    name: str = ""
    sizes: tuple[tuple[int, ...], ...] = ()
    dtype: str = "BFloat16"
    line: int = 0
    messages: tuple[tuple[bool, bool], ...] = ()


@dataclass(frozen=True, slots=True)
class Shape:
    tp: int
    pp: int
    dp: int

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * self.dp

    def place(self, rank: int) -> tuple[int, int, int]:
        """(stage, replica, tensor index)."""
        return rank // (self.tp * self.dp), rank // self.tp % self.dp, rank % self.tp

    def rank(self, stage: int, replica: int, tensor: int) -> int:
        return (stage * self.dp + replica) * self.tp + tensor

    def members(self, group: str, rank: int) -> tuple[int, ...]:
        stage, replica, tensor = self.place(rank)
        if group == "tp":
            return tuple(self.rank(stage, replica, one) for one in range(self.tp))
        if group in ("dp", "opt"):
            return tuple(self.rank(stage, one, tensor) for one in range(self.dp))
        if group == "pp":
            return tuple(self.rank(one, replica, tensor) for one in range(self.pp))
        return tuple(range(self.ranks))

    def name(self, group: str, rank: int) -> str:
        """Numbers in the order of creation, as PyTorch's counter gives them."""
        stage, replica, tensor = self.place(rank)
        tps, dps, pps = self.pp * self.dp, self.pp * self.tp, self.dp * self.tp
        start = {"world": 0, "tp": 1, "pp": 1 + tps, "dp": 1 + tps + pps, "opt": 1 + tps + pps + dps}
        start["eval"] = 1 + tps + pps + 2 * dps
        offset = {"tp": stage * self.dp + replica, "pp": replica * self.tp + tensor}
        offset["dp"] = offset["opt"] = stage * self.tp + tensor
        return str(start[group] + offset.get(group, 0))


GROUPS = ("world", "tp", "pp", "dp", "opt", "eval")


def program(shape: Shape, stage: int, *, batched: bool) -> list[Op]:
    """One step of a stage."""
    ops: list[Op] = []
    first, last = stage == 0, stage == shape.pp - 1

    def layer(line: int) -> None:
        ops.append(Op("tp", "_all_gather_base", ((4096, 1, 512),), line=line))
        ops.append(Op("tp", "_reduce_scatter_base", ((8192, 1, 512),), line=line + 1))

    for forward in (True, False):
        comes_from_next = not forward
        has_source, has_target = (not first, not last) if forward else (not last, not first)
        for batch in range(_MICROBATCHES):
            messages = []
            if has_source and not (batched and batch and has_target):
                ops.append(Op("pp", messages=((False, comes_from_next),), line=10))
            for number in range(_LAYERS):
                layer(100 + 10 * number + (50 if comes_from_next else 0))
            if has_target:
                messages.append((True, forward))
            if batched and has_source and has_target and batch + 1 < _MICROBATCHES:
                messages.append((False, comes_from_next))
            if messages:
                ops.append(Op("pp", messages=tuple(messages), line=20))
    ops.append(Op("dp", "_reduce_scatter_base", ((1 << 20,),), line=300))
    ops.append(Op("opt", "_all_gather_base", ((1 << 18,),), line=301))
    ops.append(Op("world", "all_reduce", ((1,),), "Float", line=302))
    return ops


@dataclass(slots=True)
class Truth:
    fault: str
    troubles: tuple[str, ...]
    ranks: frozenset[int]
    """Whom the verdict has to name."""
    group: str = ""


@dataclass(slots=True)
class Job:
    """A job that stands still.

    Attributes:
        programs: the last step of ranks that differ from their stage's.
        done, entered: how much of the last step each rank has finished, and enqueued.
        missing: ranks without a dump.
        moved: what a second look shows; None for one look.
    """

    shape: Shape
    stages: list[list[Op]]
    batched: bool
    timed: bool
    framed: bool
    run_ahead: int
    truth: Truth
    programs: dict[int, list[Op]] = field(default_factory=dict)
    done: list[int] = field(default_factory=list)
    entered: list[int] = field(default_factory=list)
    unstarted: frozenset[int] = frozenset()
    missing: frozenset[int] = frozenset()
    ended: dict[int, int] = field(default_factory=dict)
    frozen: frozenset[int] = frozenset()
    wrong_members: dict[int, str] = field(default_factory=dict)
    moved: frozenset[int] | None = None
    skew_ns: list[int] = field(default_factory=list)

    def program(self, rank: int) -> list[Op]:
        return self.programs.get(rank) or self.stages[self.shape.place(rank)[0]]


def run_to_hang(job: Job, limits: dict[int, int], broken: tuple[int, int] | None) -> None:
    """Advance every rank until nothing moves.

    Args:
        limits: how much of its step a rank enqueues at all.
        broken: (rank, place): the operation there never ends.
    """
    shape = job.shape
    done = job.done = [0] * shape.ranks
    arrived: dict[tuple[str, int, int], list[int]] = {}
    signatures: dict[tuple[str, int, int], tuple[object, ...]] = {}
    stuck: set[tuple[str, int, int]] = set()
    met: dict[tuple[int, int, int], int] = {}
    pending: dict[int, int] = {}
    numbers = _Numbers(job)
    if broken is not None:
        stuck.update(_keys_at(job, numbers, *broken))
    work = list(range(shape.ranks))
    while work:
        rank = work.pop()
        place = done[rank]
        steps = job.program(rank)
        if place >= len(steps) or place >= limits.get(rank, len(steps)):
            continue
        op = steps[place]
        if op.messages:
            keys = numbers.messages(rank, place)
            pending[rank] = len(keys)
            for key in keys:
                peer = met.pop(key, -1)
                if key in stuck or peer < 0:
                    met[key] = rank
                    continue
                for one in (rank, peer):
                    pending[one] -= 1
                    if pending[one] == 0:
                        done[one] += 1
                        work.append(one)
            continue
        key2 = (
            op.group,
            min(shape.members(op.group, rank)) if op.group != "world" else 0,
            numbers.collective(rank, place),
        )
        if op.group == "eval":
            key2 = ("eval", 0, key2[2])
        there = arrived.setdefault(key2, [])
        there.append(rank)
        signature = (op.name, op.sizes, op.dtype)
        if signatures.setdefault(key2, signature) != signature or key2 in stuck:
            stuck.add(key2)
            continue
        size = {"tp": shape.tp, "dp": shape.dp, "opt": shape.dp}.get(op.group, shape.ranks)
        if len(there) == size:
            for one in there:
                done[one] += 1
            work += there
    job.entered = [
        min(done[rank] + 1 + job.run_ahead, limits.get(rank, 1 << 30), len(job.program(rank)))
        for rank in range(shape.ranks)
    ]


def _keys_at(job: Job, numbers: "_Numbers", rank: int, place: int) -> list[Any]:
    op = job.program(rank)[place]
    if op.messages:
        return list(numbers.messages(rank, place))
    first = min(job.shape.members(op.group, rank)) if op.group not in ("world", "eval") else 0
    return [(op.group, first, numbers.collective(rank, place))]


class _Numbers:
    """How many operations of a group, or messages of a channel, a program has before a place."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._tables: dict[int, list[tuple[int, tuple[int, ...]]]] = {}

    def _table(self, steps: list[Op]) -> list[tuple[int, tuple[int, ...]]]:
        table = self._tables.get(id(steps))
        if table is None:
            table = []
            counts: dict[object, int] = {}
            for op in steps:
                if op.messages:
                    row = []
                    for message in op.messages:
                        row.append(counts.get(message, 0))
                        counts[message] = counts.get(message, 0) + 1
                    table.append((0, tuple(row)))
                else:
                    table.append((counts.get(op.group, 0), ()))
                    counts[op.group] = counts.get(op.group, 0) + 1
            self._tables[id(steps)] = table
        return table

    def collective(self, rank: int, place: int) -> int:
        return self._table(self._job.program(rank))[place][0]

    def messages(self, rank: int, place: int) -> list[tuple[int, int, int]]:
        """(from, to, number) of each message."""
        steps = self._job.program(rank)
        _, numbers = self._table(steps)[place]
        keys = []
        for (sends, to_next), number in zip(steps[place].messages, numbers, strict=True):
            peer = self.peer(rank, to_next)
            keys.append((rank, peer, number) if sends else (peer, rank, number))
        return keys

    def peer(self, rank: int, to_next: bool) -> int:
        step = self._job.shape.tp * self._job.shape.dp
        return rank + step if to_next else rank - step


def entries_of(job: Job, rank: int, *, history: int, frames: Sequence[dict[str, Any]] = ()) -> Iterator[dict[str, Any]]:
    """The ring of a rank: `history` finished operations of the steps before, then the last step."""
    stage = job.shape.place(rank)[0]
    usual = job.stages[stage]
    own = job.program(rank)
    seqs = dict.fromkeys(GROUPS, 0)
    for op in usual:
        if not op.messages:
            seqs[op.group] += STEPS_BEFORE
    sent = sum(1 for op in usual if op.messages) * STEPS_BEFORE
    records = sum(len(op.messages) + (len(op.messages) > 1) or 1 for op in usual) * STEPS_BEFORE
    past: list[Op] = [usual[-1 - place % len(usual)] for place in range(history)][::-1]
    now_ns = 1_790_000_000_000_000_000 + job.skew_ns[rank // 8]
    for op in past:
        if op.messages:
            sent -= 1
            records -= len(op.messages) + (len(op.messages) > 1)
        else:
            seqs[op.group] -= 1
            records -= 1
    for place, op in enumerate([*past, *own[: job.entered[rank]]]):
        at = place - len(past)
        state = "completed" if at < job.done[rank] else "scheduled"
        if job.timed and at == job.done[rank] and rank not in job.unstarted:
            state = "started"
        common = {
            "time_created_ns": now_ns + place * 1000,
            "retired": state == "completed",
            "thread_id": "1",
            "thread_name": "python",
        }
        if job.framed or frames:
            common["frames"] = [{"name": "train", "filename": "/job/train.py", "line": op.line}, *frames]
        if op.messages:
            sent += 1
            yield from _messages(job, rank, op, state, sent, records, common)
            records += len(op.messages) + (len(op.messages) > 1)
            continue
        seqs[op.group] += 1
        yield {
            "record_id": records,
            "pg_id": GROUPS.index(op.group),
            "process_group": (job.shape.name(op.group, rank), op.group.upper()),
            "collective_seq_id": seqs[op.group],
            "p2p_seq_id": 0,
            "op_id": seqs[op.group],
            "profiling_name": f"nccl:{op.name}",
            "input_sizes": [list(one) for one in op.sizes],
            "input_dtypes": [op.dtype] * len(op.sizes),
            "output_sizes": [list(one) for one in op.sizes],
            "output_dtypes": [op.dtype] * len(op.sizes),
            "state": state,
            "is_p2p": False,
            **common,
        }
        records += 1


def _messages(
    job: Job, rank: int, op: Op, state: str, number: int, record: int, common: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    stage = job.shape.place(rank)[0]
    batch = len(op.messages) > 1
    base = {
        "pg_id": 2,
        "process_group": (job.shape.name("pp", rank), "PP"),
        "collective_seq_id": 0,
        "p2p_seq_id": number,
        "op_id": number,
        "input_sizes": [[4096, 1, 512]],
        "input_dtypes": ["BFloat16"],
        "output_sizes": [[4096, 1, 512]],
        "output_dtypes": ["BFloat16"],
        "is_p2p": True,
        **common,
    }
    for place, (sends, to_next) in enumerate(op.messages):
        peer = stage + 1 if to_next else stage - 1
        name = f"nccl:send {stage}->{peer}" if sends else f"nccl:recv {stage}<-{peer}"
        member = {"state": "scheduled", "retired": False} if batch else {"state": state}
        yield {**base, "record_id": record + place, "profiling_name": name, **member}
    if batch:
        yield {**base, "record_id": record + len(op.messages), "profiling_name": "nccl:coalesced", "state": state}


def dump_of(
    job: Job, rank: int, *, history: int = 60, frames: Sequence[dict[str, Any]] = (), entries_max: int = 20_000
) -> dict[str, Any]:
    """A whole dump, format 2.10; the ring keeps `entries_max`."""
    config = {}
    for group in GROUPS:
        name = job.shape.name(group, rank)
        ranks = str(list(job.shape.members(group, rank)))
        if job.wrong_members.get(rank) == group:
            ranks = str(
                [*job.shape.members(group, rank)[:-1]] if job.shape.members(group, rank)[-1] != rank else [rank]
            )
        config[name] = {"name": name, "desc": group.upper(), "ranks": ranks}
    return {
        "version": "2.10",
        "comm_lib_version": "2.27.3",
        "pg_config": config,
        "pg_status": {},
        "entries": list(entries_of(job, rank, history=history, frames=frames))[-entries_max:],
    }


def hang(shape: Shape, fault: str, rng: random.Random) -> Job:
    """A job with one fault at a random rank and place."""
    batched = rng.random() < 0.5
    stages = [program(shape, stage, batched=batched) for stage in range(shape.pp)]
    job = Job(
        shape=shape,
        stages=stages,
        batched=batched,
        timed=fault == "gpu_unstarted" or rng.random() < 0.3,
        framed=fault in ("loop_bound",) or rng.random() < 0.5,
        run_ahead=rng.choice((0, 0, 2, 6)),
        truth=Truth(fault, (), frozenset()),
        skew_ns=[rng.randrange(-5_000_000_000, 5_000_000_000) for _ in range(shape.ranks // 8 + 1)],
    )
    rank = rng.randrange(shape.ranks)
    _INJECT[fault](job, rank, rng)
    spared = {rank, *job.truth.ranks}  # a lost dump of a rank at fault is the fault `dead`
    if fault == "link":
        spared.update(shape.members(job.truth.group, rank))
    lost = [one for one in range(shape.ranks) if rng.random() < 0.01 and one not in spared]
    job.missing = frozenset((*lost, *(job.truth.ranks if fault == "dead" else ())))
    return job


def _stop(job: Job, rank: int, rng: random.Random) -> None:
    run_to_hang(job, {rank: rng.randrange(len(job.program(rank)))}, None)


def _never(job: Job, rank: int, rng: random.Random) -> None:
    _stop(job, rank, rng)
    job.truth = Truth("never", ("never_entered",), frozenset((rank,)))


def _dead(job: Job, rank: int, rng: random.Random) -> None:
    _stop(job, rank, rng)
    job.truth = Truth("dead", ("dead",), frozenset((rank,)))


def _killed(job: Job, rank: int, rng: random.Random) -> None:
    _stop(job, rank, rng)
    job.ended[rank] = -9
    job.truth = Truth("killed", ("dead",), frozenset((rank,)))


def _frozen(job: Job, rank: int, rng: random.Random) -> None:
    _stop(job, rank, rng)
    job.frozen = frozenset((rank,))
    job.truth = Truth("frozen", ("frozen",), frozenset((rank,)))


def _ended(job: Job, rank: int, rng: random.Random) -> None:
    run_to_hang(job, {rank: 0}, None)
    job.ended[rank] = 0
    job.truth = Truth("ended", ("loop_bound",), frozenset((rank,)))


def _collective_place(
    job: Job, rank: int, rng: random.Random, groups: tuple[str, ...] = ("tp", "dp", "opt", "world")
) -> int:
    sizes = {"tp": job.shape.tp, "dp": job.shape.dp, "opt": job.shape.dp, "world": job.shape.ranks}
    steps = job.program(rank)
    return rng.choice(
        [i for i, op in enumerate(steps) if not op.messages and op.group in groups and sizes[op.group] > 1]
    )


def _change(job: Job, rank: int, rng: random.Random, fault: str) -> None:
    steps = list(job.program(rank))
    place = _collective_place(job, rank, rng)
    old = steps[place]
    name = "broadcast" if fault == "wrong_op" else old.name
    sizes = tuple((one[0] + 8, *one[1:]) for one in old.sizes) if fault == "shape" else old.sizes
    dtype = "Double" if fault == "dtype" else old.dtype
    steps[place] = Op(old.group, name, sizes, dtype, old.line)
    job.programs[rank] = steps
    run_to_hang(job, {}, None)
    job.truth = Truth(fault, ("mismatch",), frozenset((rank,)))


def _wrong_op(job: Job, rank: int, rng: random.Random) -> None:
    _change(job, rank, rng, "wrong_op")


def _shape(job: Job, rank: int, rng: random.Random) -> None:
    _change(job, rank, rng, "shape")


def _dtype(job: Job, rank: int, rng: random.Random) -> None:
    _change(job, rank, rng, "dtype")


def _extra(job: Job, rank: int, rng: random.Random) -> None:
    steps = list(job.program(rank))
    place = _collective_place(job, rank, rng, ("tp",) if job.shape.tp > 1 else ("dp",))
    steps.insert(place, steps[place])
    job.programs[rank] = steps
    run_to_hang(job, {}, None)
    job.truth = Truth("extra", ("extra_collective", "mismatch"), frozenset((rank,)))


def _skipped(job: Job, rank: int, rng: random.Random) -> None:
    steps = list(job.program(rank))
    place = _collective_place(job, rank, rng, ("tp",) if job.shape.tp > 1 else ("dp",))
    del steps[place]
    job.programs[rank] = steps
    run_to_hang(job, {}, None)
    job.truth = Truth(
        "skipped", ("mismatch", "order_deadlock"), frozenset((rank,))
    )  # at the end of a step both look alike


def _loop_bound(job: Job, rank: int, rng: random.Random) -> None:
    job.programs[rank] = [Op("eval", "all_reduce", ((3,),), "Float", line=900)]
    run_to_hang(job, {}, None)
    job.truth = Truth("loop_bound", ("loop_bound",), frozenset((rank,)))


def _order(job: Job, rank: int, rng: random.Random) -> None:
    steps = list(job.program(rank))
    place = next(i for i, op in enumerate(steps) if op.group == "dp")
    steps[place], steps[place + 1] = steps[place + 1], steps[place]
    job.programs[rank] = steps
    run_to_hang(job, {}, None)
    job.truth = Truth("order", ("order_deadlock",), frozenset((rank,)))


def _creation(job: Job, rank: int, rng: random.Random) -> None:
    group = "dp" if job.shape.dp > 2 else "tp"
    job.wrong_members[rank] = group
    place = next(i for i, op in enumerate(job.program(rank)) if op.group == group)
    run_to_hang(job, {rank: place}, None)
    job.truth = Truth("creation", ("group_creation",), frozenset((rank,)))


def _gpu_lag(job: Job, rank: int, rng: random.Random) -> None:
    """As in real GPU errors: peers have finished operations with it that it still shows as unfinished."""
    steps = job.program(rank)
    limit = rng.randrange(10, len(steps))
    run_to_hang(job, {rank: limit}, None)
    shown = max(0, job.done[rank] - rng.randrange(7, 10))
    job.done[rank], job.entered[rank] = shown, limit
    job.truth = Truth("gpu_lag", ("gpu_side",), frozenset((rank,)))


def _gpu_unstarted(job: Job, rank: int, rng: random.Random) -> None:
    big = [g for g, size in (("tp", job.shape.tp), ("dp", job.shape.dp), ("world", job.shape.ranks)) if size > 2]
    place = _collective_place(job, rank, rng, tuple(big))
    run_to_hang(job, {}, (rank, place))
    job.unstarted = frozenset((rank,))
    job.truth = Truth("gpu_unstarted", ("gpu_side",), frozenset((rank,)))


def _link(job: Job, rank: int, rng: random.Random) -> None:
    place = rng.randrange(len(job.program(rank)))
    run_to_hang(job, {}, (rank, place))
    job.truth = Truth("link", ("inside_op",), frozenset(), job.program(rank)[place].group)


def _healthy(job: Job, rank: int, rng: random.Random) -> None:
    run_to_hang(job, {}, None)
    job.truth = Truth("healthy", ("healthy",), frozenset())


def _slow(job: Job, rank: int, rng: random.Random) -> None:
    _stop(job, rank, rng)
    job.moved = frozenset((rank,))
    job.truth = Truth("slow", ("slow",), frozenset())


_INJECT = {name: globals()[f"_{name}"] for name in FAULTS}
