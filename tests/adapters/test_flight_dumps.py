"""Loading dumps of any kind: versions, names, pickle and JSON, torn and hostile files, and nothing executed."""

import json
import pickle
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.policy.dumping import collective, dump

from everstep.adapters.evidence.flight_dumps import load_dumps
from everstep.domain.errors import ConfigError

PAIR = {"0": (0, 1)}


def write(folder: Path, dumps: dict[str, Any]) -> Path:
    for name, content in dumps.items():
        (folder / name).write_bytes(content if isinstance(content, bytes) else pickle.dumps(content, protocol=2))
    return folder


def ring(seq: int = 2) -> dict[str, Any]:
    return dump([collective(one) for one in range(1, seq + 1)], PAIR)


def ranks(path: Path, **limits: int) -> list[int]:
    return [trace.rank for trace in load_dumps([path], **limits).traces]


@pytest.mark.parametrize(
    "names",
    [
        ("comm_lib_trace_rank_0", "comm_lib_trace_rank_1"),
        ("nccl_trace_rank_0", "nccl_trace_rank_1"),
        ("_dump_0", "_dump_1"),
        ("0", "1"),
        ("job17_rank0.pickle", "job17_rank1.pickle"),
        ("trace-host3-rank-0", "trace-host3-rank-1"),
    ],
)
def test_the_rank_is_read_off_any_name(tmp_path: Path, names: tuple[str, str]) -> None:
    assert ranks(write(tmp_path, {name: ring() for name in names})) == [0, 1]


def test_the_content_overrules_a_name_that_cannot_be(tmp_path: Path) -> None:
    alone = dump([], {"0": (0, 1), "5": (1,)})
    assert ranks(write(tmp_path, {"trace_of_2026": alone})) == [1]


def test_a_name_that_contradicts_the_groups_is_reported(tmp_path: Path) -> None:
    loaded = load_dumps([write(tmp_path, {"rank_0": ring(), "rank_7": ring()})])
    assert [trace.rank for trace in loaded.traces] == [0]
    assert "rank 7" in loaded.problems[0]


@pytest.mark.parametrize("version", [f"2.{minor}" for minor in range(1, 11)])
def test_all_versions_of_the_format(tmp_path: Path, version: str) -> None:
    raw = ring() | {"version": version}
    minor = int(version.split(".")[1])
    if minor < 4:
        del raw["pg_status"]
    if minor < 8:
        raw["nccl_version"] = raw.pop("comm_lib_version")
    if minor < 2:
        for entry in raw["entries"]:
            del entry["time_discovered_started_ns"], entry["output_dtypes"]
    (trace,) = load_dumps([write(tmp_path, {"rank_0": raw})]).traces
    assert trace.groups[0].completed == 2


def test_another_version_is_refused_and_reported(tmp_path: Path) -> None:
    loaded = load_dumps([write(tmp_path, {"rank_0": ring(), "rank_1": ring() | {"version": "3.0"}})])
    assert len(loaded.traces) == 1
    assert "format version '3.0'" in loaded.problems[0]


def test_json_as_the_worker_server_gives_it(tmp_path: Path) -> None:
    status = {"last_enqueued_collective": "2", "last_started_collective": "-1", "last_completed_collective": "2"}
    entries = [collective(seq, profiling_name="gloo:all_reduce", state="scheduled") for seq in (1, 2)]
    for entry in entries:
        entry["time_discovered_started_ns"] = 0
    gloo = dump(entries, {}, pg_config={"": {"name": "", "desc": "", "ranks": "[]"}}, pg_status={"0": status})
    empty = {key: value for key, value in gloo.items() if key != "entries"}
    files = {f"rank-{r}.1.flight_recorder.json": json.dumps(one).encode() for r, one in enumerate((gloo, gloo, empty))}
    loaded = load_dumps([write(tmp_path, files)])
    assert [trace.rank for trace in loaded.traces] == [0, 1, 2]
    assert not loaded.problems
    assert loaded.memberships[0].ranks == (0, 1, 2)


def test_two_snapshots_tell_who_moved_and_the_newer_one_counts(tmp_path: Path) -> None:
    files = {
        f"rank-{r}.{look}.flight_recorder.json": json.dumps(ring(2 if (r, look) == (1, 2) else 1)).encode()
        for r in (0, 1)
        for look in (1, 2)
    }
    loaded = load_dumps([write(tmp_path, files)])
    assert loaded.moved == {1}
    assert [trace.groups[0].enqueued for trace in loaded.traces] == [1, 2]


class _Calls:
    def __init__(self, function: Any, arguments: tuple[Any, ...]) -> None:
        self._reduced = function, arguments

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self._reduced


def payloads(mark: Path) -> Sequence[bytes]:
    """Pickles that would leave a mark on the disk, or worse, if they were believed."""
    import os
    import subprocess

    command = f"touch {mark}"
    text = command.encode()
    return [
        pickle.dumps(_Calls(os.system, (command,)), protocol=2),
        pickle.dumps({"version": "2.10", "entries": [_Calls(subprocess.getoutput, (command,))]}, protocol=2),
        pickle.dumps(_Calls(eval, (f"open({str(mark)!r}, 'w')",)), protocol=4),
        b"\x80\x02cos\nsystem\nX" + struct.pack("<I", len(text)) + text + b"\x85R.",  # REDUCE
        b"\x80\x02(X" + struct.pack("<I", len(text)) + text + b"ios\nsystem\n.",  # INST
        b"\x80\x04\x8c\x08builtins\x8c\x04exec\x93.",  # STACK_GLOBAL
        b"\x80\x02\x82\x01.",  # EXT1
        b"\x80\x02Pan-id\n.",  # PERSID
        b"\x80\x02cbuiltins\ndict\n)\x81.",  # even a harmless class
    ]


@pytest.mark.parametrize("number", range(9))
def test_a_pickle_that_names_code_is_refused_without_losing_the_others(tmp_path: Path, number: int) -> None:
    mark = tmp_path / "mark.log"
    hostile = payloads(mark)[number]
    loaded = load_dumps([write(tmp_path, {"rank_0": ring(), "rank_1": hostile})])
    assert [trace.rank for trace in loaded.traces] == [0]
    assert len(loaded.problems) == 1
    assert "rank_1" in loaded.problems[0]
    assert not mark.exists()


def test_a_pickle_that_asks_for_all_memory_is_refused(tmp_path: Path) -> None:
    greedy = b"\x80\x02}r\xff\xff\xff\xff."  # numbers an object 2**32 - 1
    loaded = load_dumps([write(tmp_path, {"rank_0": ring(), "rank_1": greedy})])
    assert len(loaded.traces) == 1
    assert "memory" in loaded.problems[0]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x80",
        b"\x80\x02",
        b"no dump at all",
        b"{",
        b"[]",
        b"\x80\x02]q\x00.",
        b"\x80\x02K\x01.",
        b'{"version": 3}',
        b'{"version": "2.10", "entries": [17]}',
        b'{"version": "2.10", "entries": [{"record_id": "x"}]}',
        b'{"version": "2.10", "pg_status": {"0": {"last_enqueued_collective": "x"}}}',
        b'{"a":' * 100_000,
        pickle.dumps({"version": "2.10", "entries": 17}, protocol=2),
        pickle.dumps({"version": "2.10", "entries": [[]]}, protocol=2),
        pickle.dumps({"version": "2.10", "entries": [{"process_group": 5}]}, protocol=2),
    ],
    ids=range(16),
)
def test_torn_and_foreign_files_are_reported_without_losing_the_others(tmp_path: Path, content: bytes) -> None:
    loaded = load_dumps([write(tmp_path, {"rank_0": ring(), "rank_1": content})])
    assert [trace.rank for trace in loaded.traces] == [0]
    assert len(loaded.problems) == 1
    assert loaded.problems[0].startswith("rank_1 could not be used: ")


def test_every_truncation_of_a_dump_is_survived(tmp_path: Path) -> None:
    whole = pickle.dumps(ring(), protocol=2)
    for length in range(0, len(whole), 37):
        loaded = load_dumps([write(tmp_path, {"rank_0": ring(), "rank_1": whole[:length]})])
        assert len(loaded.problems) == 1, length


def test_an_oversized_file_is_not_read(tmp_path: Path) -> None:
    write(tmp_path, {"rank_0": ring(), "rank_1": ring(900)})
    loaded = load_dumps([tmp_path], dump_bytes_max=20_000)
    assert [trace.rank for trace in loaded.traces] == [0]
    assert "over the limit of 20000" in loaded.problems[0]


def test_other_files_beside_dumps_are_left_alone(tmp_path: Path) -> None:
    write(tmp_path, {"rank_0": ring(), "fault_injection.log": b"x", "notes.md": b"1", "LICENSE": b"Apache", ".x1": b""})
    loaded = load_dumps([tmp_path])
    assert len(loaded.traces) == 1
    assert not loaded.problems


def test_a_second_dump_of_a_rank_is_reported(tmp_path: Path) -> None:
    (tmp_path / "again").mkdir()
    write(tmp_path, {"rank_0": ring()})
    write(tmp_path / "again", {"rank_0": ring()})
    assert "another dump of rank 0" in load_dumps([tmp_path]).problems[0]


def test_a_path_that_is_not_there_or_empty_is_the_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        load_dumps([tmp_path / "nowhere"])
    with pytest.raises(ConfigError, match="no flight recorder dump"):
        load_dumps([tmp_path])


def test_a_missing_rank_is_only_missing(tmp_path: Path) -> None:
    loaded = load_dumps([write(tmp_path, {"rank_1": ring()})])
    assert [trace.rank for trace in loaded.traces] == [1]
    assert loaded.memberships[0].ranks == (0, 1)
