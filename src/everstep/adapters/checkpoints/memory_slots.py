"""The memory tier's pages in shared memory: a header for each slot of each rank, the plan of saves, the saver's word.

Everything is a file in one folder, so that a dead rank's slots can be read by whoever maps them. It knows numbers and
checksums, not what is inside of a slot.
"""

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from everstep.adapters.checkpoints.shared_pages import map_page, read_twice, write_twice
from everstep.policy.checkpoints import Slot, SlotState
from everstep.policy.staging import Course, Way

SLOT_COUNT = 3
HEADER_BYTES = 4096
_MAGIC, _VERSION = b"EVSTMEM1", 1
_HEADER = struct.Struct("<8sIIQ32sQQIIIII")  # + crc32 of these fields
_CRC = struct.Struct("<I")
_FACTS_AT = _HEADER.size + _CRC.size
FACTS_BYTES_MAX = HEADER_BYTES - _FACTS_AT
_PLAN = struct.Struct("<QQBQQBI")  # from step, stride, way, and the same for later; world size
_WORD = struct.Struct("<QQQdQQQQQQ")
# pinned step, durable step, its bytes and seconds, saves, failures, failed step, pid, when work began and last moved
PLAN_NAME, WORD_NAME, JOB_NAME = "plan", "saver", "job.json"
_PAGE = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotHeader:
    """What a complete slot says of itself.

    Attributes:
        layout: digest of names, shapes and places of what is inside, 32 hexadecimal digits.
        image_bytes, rest_bytes: sizes of the two files.
        image_seal, rest_seal: their checksums (worker/format/seal.py, and crc32).
        attempt: which wrote it.
        facts: JSON for the manifest.
    """

    state: SlotState = SlotState.EMPTY
    step: int = 0
    layout: str = ""
    image_bytes: int = 0
    rest_bytes: int = 0
    image_seal: int = 0
    rest_seal: int = 0
    attempt: int = 0
    facts: bytes = b""

    def pack(self) -> bytes:
        fields = _HEADER.pack(
            _MAGIC,
            _VERSION,
            self.state,
            self.step,
            self.layout.encode(),
            self.image_bytes,
            self.rest_bytes,
            self.image_seal,
            self.rest_seal,
            self.attempt,
            len(self.facts),
            zlib.crc32(self.facts),
        )
        return fields + _CRC.pack(zlib.crc32(fields))


def image_path(folder: Path, rank: int, slot: int) -> Path:
    """The slot's tensors, in the form of Distributed Checkpoint (worker/format/layout.py)."""
    return folder / f"rank-{rank:05d}.slot-{slot}.pt"


def rest_path(folder: Path, rank: int, slot: int) -> Path:
    """What changes its size from save to save, a file that `torch.load` reads."""
    return folder / f"rank-{rank:05d}.rest-{slot}.pt"


def _header_path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.headers"


class RankSlots:
    """The headers of one rank's slots. Its owner writes, everyone reads.

    Raises:
        WorldError: shared memory is full, gone or not ours.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._memory = map_page(_header_path(folder, rank), SLOT_COUNT * HEADER_BYTES)
        self._seen: list[tuple[bytes, Slot]] = [(b"", Slot())] * SLOT_COUNT

    def read(self, slot: int) -> SlotHeader:
        """The header; one that is torn or of another version reads as a slot in writing."""
        at = slot * HEADER_BYTES
        fields = self._memory[at : at + _HEADER.size]
        (
            magic,
            version,
            state,
            step,
            layout,
            image_bytes,
            rest_bytes,
            image_seal,
            rest_seal,
            attempt,
            size,
            facts_crc,
        ) = _HEADER.unpack(fields)
        if magic == bytes(8):
            return SlotHeader()
        (crc,) = _CRC.unpack_from(self._memory, at + _HEADER.size)
        if magic != _MAGIC or version != _VERSION or crc != zlib.crc32(fields) or size > FACTS_BYTES_MAX:
            return SlotHeader(state=SlotState.WRITING)
        facts = self._memory[at + _FACTS_AT : at + _FACTS_AT + size]
        if state == SlotState.COMPLETE and facts_crc != zlib.crc32(facts):
            return SlotHeader(state=SlotState.WRITING)
        return SlotHeader(
            state=SlotState(state),
            step=step,
            layout=layout.rstrip(b"\0").decode(errors="replace"),
            image_bytes=image_bytes,
            rest_bytes=rest_bytes,
            image_seal=image_seal,
            rest_seal=rest_seal,
            attempt=attempt,
            facts=facts,
        )

    def slots(self) -> list[Slot]:
        """State and step of each."""
        return [self._slot(slot) for slot in range(SLOT_COUNT)]

    def _slot(self, slot: int) -> Slot:
        """Reads a header again where it is another than at the last look: ranks look at all of them at each save."""
        at, (seen, known) = slot * HEADER_BYTES, self._seen[slot]
        if seen and self._memory[at : at + len(seen)] == seen:
            return known
        before = self._memory[at : at + HEADER_BYTES]
        header = self.read(slot)
        found = Slot(state=header.state, step=header.step)
        if self._memory[at : at + HEADER_BYTES] == before:
            self._seen[slot] = before[: _FACTS_AT + len(header.facts)], found
        return found

    def write(self, slot: int, header: SlotHeader) -> None:
        """Say what the slot holds; `COMPLETE` comes last, when everything it speaks of is there."""
        at = slot * HEADER_BYTES
        packed = header.pack()
        self._memory[at + _FACTS_AT : at + _FACTS_AT + len(header.facts)] = header.facts
        self._memory[at : at + len(packed)] = packed

    def find(self, step: int) -> int | None:
        """The slot that holds a step completely."""
        for slot in range(SLOT_COUNT):
            header = self.read(slot)
            if header.state is SlotState.COMPLETE and header.step == step:
                return slot
        return None

    def close(self) -> None:
        self._memory.close()


def ranks_present(folder: Path) -> list[int]:
    """The ranks that have headers in a folder, ascending."""
    return sorted(int(path.name[5:10]) for path in folder.glob("rank-?????.headers"))


_NO_COURSE = Course(stride=0, way=Way.TRIAL)


@dataclass(frozen=True, slots=True, kw_only=True)
class SavePlan:
    """When to save to memory, and how: `course` from `from_step` on; from `later_from` on, `later`.

    Rank 0 writes it, with `later_from` well ahead of every rank; 0 where nothing else is announced.
    """

    from_step: int = 0
    course: Course = _NO_COURSE
    later_from: int = 0
    later: Course = _NO_COURSE
    world_size: int = 0

    def at(self, step: int) -> Course:
        return self.later if step >= self.later_from > 0 else self.course

    def due(self, step: int) -> bool:
        start, stride = self.later_from if step >= self.later_from > 0 else self.from_step, self.at(step).stride
        return stride > 0 and step >= start and (step - start) % stride == 0

    def is_off(self, step: int) -> bool:
        return self.at(step).stride == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SaverWord:
    """What the saver last said.

    Attributes:
        pinned: the step it is reading, whose slots stay; 0 when none.
        durable: the newest step that it made durable, with its size and the seconds it took.
        saves, failures: how many of each so far; `failed` is the step of the last failure.
        began_ns, moved_ns: CLOCK_MONOTONIC when the work with the disk that is under way began, and when the disk last
            answered; 0 when none is under way. They are written before the disk is asked, so they tell of a hung one.
    """

    pinned: int = 0
    durable: int = 0
    size_bytes: int = 0
    took_s: float = 0.0
    saves: int = 0
    failures: int = 0
    failed: int = 0
    pid: int = 0
    began_ns: int = 0
    moved_ns: int = 0

    def silent_s(self, now_ns: int) -> float:
        """For how long the disk has not answered; 0 when nobody asked it anything."""
        return max(0, now_ns - self.moved_ns) / 1e9 if self.moved_ns else 0.0


class SavePages:
    """The plan of saves and the saver's word. Each has one writer; every read costs about a microsecond.

    Raises:
        WorldError: shared memory is full, gone or not ours.
    """

    def __init__(self, folder: Path) -> None:
        self._plan = map_page(folder / PLAN_NAME, _PAGE)
        self._word = map_page(folder / WORD_NAME, _PAGE)
        self._seen_plan, self._seen_word = (b"", SavePlan()), (b"", SaverWord())

    def plan(self) -> SavePlan:
        seen, plan = self._seen_plan
        if not seen or self._plan[: len(seen)] != seen:
            seen, fields = read_twice(self._plan, _PLAN)
            plan = _plan_of(fields)
            self._seen_plan = seen, plan
        return plan

    def write_plan(self, plan: SavePlan) -> None:
        now, later = plan.course, plan.later
        write_twice(
            self._plan,
            _PLAN.pack(plan.from_step, now.stride, now.way, plan.later_from, later.stride, later.way, plan.world_size),
        )

    def word(self) -> SaverWord:
        seen, word = self._seen_word
        if not seen or self._word[: len(seen)] != seen:
            seen, fields = read_twice(self._word, _WORD)
            word = _word_of(fields)
            self._seen_word = seen, word
        return word

    def write_word(self, word: SaverWord) -> None:
        write_twice(
            self._word,
            _WORD.pack(
                word.pinned,
                word.durable,
                word.size_bytes,
                word.took_s,
                word.saves,
                word.failures,
                word.failed,
                word.pid,
                word.began_ns,
                word.moved_ns,
            ),
        )

    def close(self) -> None:
        self._plan.close()
        self._word.close()


def _plan_of(fields: Sequence[float]) -> SavePlan:
    from_step, stride, way, later_from, later_stride, later_way, world_size = map(int, fields)
    return SavePlan(
        from_step=from_step,
        course=Course(stride=stride, way=Way(way)),
        later_from=later_from,
        later=Course(stride=later_stride, way=Way(later_way)),
        world_size=world_size,
    )


def _word_of(fields: Sequence[float]) -> SaverWord:
    pinned, durable, size_bytes, took_s, saves, failures, failed, pid, began, moved = fields
    return SaverWord(
        pinned=int(pinned),
        durable=int(durable),
        size_bytes=int(size_bytes),
        took_s=took_s,
        saves=int(saves),
        failures=int(failures),
        failed=int(failed),
        pid=int(pid),
        began_ns=int(began),
        moved_ns=int(moved),
    )
