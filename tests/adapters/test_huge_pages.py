"""A file has all its pages afterwards, huge ones where the kernel gives them; a mapping lives as long as its users."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep.adapters.checkpoints import huge_pages

SIZE = 2 * huge_pages.HUGE_BYTES + 12_345


@pytest.fixture
def file() -> Iterator[int]:
    path = Path("/dev/shm") / f"everstep-test-{os.getpid()}"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    path.unlink()
    yield fd
    os.close(fd)


def maps_with(inode: int) -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if f" {inode} " in line]


def test_a_filled_file_has_every_page_and_zeros(file: int) -> None:
    huge_pages.fill(file, SIZE)
    status = os.fstat(file)
    assert status.st_size == SIZE
    assert status.st_blocks * 512 >= SIZE
    assert not any(os.pread(file, SIZE, 0))


def test_what_is_written_through_a_mapping_is_in_the_file_and_seen_by_others(file: int) -> None:
    huge_pages.fill(file, SIZE)
    memory, other = huge_pages.mapped(file, SIZE), huge_pages.mapped(file, SIZE, writable=False)
    memory[SIZE - 3 :] = b"end"
    memory[5:8] = b"abc"
    assert os.pread(file, 3, SIZE - 3) == other[SIZE - 3 :] == b"end"
    assert bytes(memoryview(other)[5:8]) == b"abc"
    assert len(memory) == SIZE


def test_a_mapping_begins_where_a_huge_page_may_and_ends_with_its_last_user(file: int) -> None:
    huge_pages.fill(file, SIZE)
    memory = huge_pages.mapped(file, SIZE)
    (line,) = maps_with(os.fstat(file).st_ino)
    assert int(line.partition("-")[0], 16) % huge_pages.HUGE_BYTES == 0
    view = memoryview(memory)
    del memory
    assert maps_with(os.fstat(file).st_ino)
    view.release()
    del view
    assert not maps_with(os.fstat(file).st_ino)


def test_full_shared_memory_is_an_error_and_not_a_signal(file: int) -> None:
    room = os.fstatvfs(file)
    with pytest.raises(OSError, match="No space left"):
        huge_pages.fill(file, (room.f_blocks + 1) * room.f_frsize)
