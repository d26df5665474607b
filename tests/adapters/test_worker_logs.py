"""Workers' output is kept in files, and shown as torchrun's --redirects, --tee and filter say."""

import io
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.adapters.workers.worker_logs import LogChoice, StreamChoice, WorkerLogs
from everstep.domain.errors import ConfigError, WorldError

TEE_ALL = LogChoice(tee=StreamChoice(everywhere=3))


class Host:
    """Two ranks that write, and the console beside them."""

    def __init__(self, folder: Path, choice: LogChoice, *, first_rank: int = 0) -> None:
        self.out, self.err = io.BytesIO(), io.BytesIO()
        self.logs = WorkerLogs(folder, choice=choice, console=(self.out, self.err))
        self.ranks = [first_rank, first_rank + 1]
        self.files = self.logs.open(attempt=1, ranks=self.ranks)

    def write(self, rank: int, text: bytes, *, stream: int = 1) -> None:
        os.write(self.files[rank][stream - 1], text)
        self.logs.copy_to_console()

    def close(self) -> None:
        self.logs.finish()
        for pair in self.files.values():
            for descriptor in pair:
                os.close(descriptor)


def shown(folder: Path, choice: LogChoice) -> tuple[bytes, bytes]:
    """What the console shows when both ranks write a line to each stream."""
    host = Host(folder, choice)
    for rank in host.ranks:
        host.write(rank, b"out %d\n" % rank)
        host.write(rank, b"err %d\n" % rank, stream=2)
    host.close()
    return host.out.getvalue(), host.err.getvalue()


def test_by_default_everything_is_shown_as_it_is(tmp_path: Path) -> None:
    assert shown(tmp_path, LogChoice()) == (b"out 0\nout 1\n", b"err 0\nerr 1\n")


def test_redirected_streams_are_kept_off_the_console_and_in_their_files(tmp_path: Path) -> None:
    assert shown(tmp_path, LogChoice(redirects=StreamChoice(everywhere=1))) == (b"", b"err 0\nerr 1\n")
    assert shown(tmp_path, LogChoice(redirects=StreamChoice(everywhere=3))) == (b"", b"")
    assert (tmp_path / "attempt-0001" / "rank-1.stdout.log").read_bytes() == b"out 1\n" * 2


def test_teed_streams_carry_the_local_rank_before_each_line(tmp_path: Path) -> None:
    out, err = shown(tmp_path, TEE_ALL)
    assert out == b"[default0]:out 0\n[default1]:out 1\n"
    assert err == b"[default0]:err 0\n[default1]:err 1\n"


def test_a_choice_by_rank_is_for_that_rank_alone(tmp_path: Path) -> None:
    choice = LogChoice(redirects=StreamChoice.parse("0:3,1:2", flag="-r"))
    assert shown(tmp_path, choice) == (b"out 1\n", b"")


def test_the_filter_shows_only_its_local_ranks(tmp_path: Path) -> None:
    assert shown(tmp_path, LogChoice(ranks=frozenset({1}))) == (b"out 1\n", b"err 1\n")
    assert shown(tmp_path, LogChoice(ranks=frozenset())) == (b"", b"")


def test_choices_go_by_local_rank_and_files_by_global_rank(tmp_path: Path) -> None:
    host = Host(tmp_path, TEE_ALL, first_rank=8)
    host.write(9, b"x\n")
    host.close()
    assert host.out.getvalue() == b"[default1]:x\n"
    assert (tmp_path / "attempt-0001" / "rank-9.stdout.log").read_bytes() == b"x\n"


def test_half_a_line_waits_for_its_rest_when_there_is_a_prefix(tmp_path: Path) -> None:
    host = Host(tmp_path, TEE_ALL)
    host.write(0, b"half")
    host.write(1, b"whole\n")
    assert host.out.getvalue() == b"[default1]:whole\n"
    host.write(0, b" and half\nrest")
    assert host.out.getvalue().endswith(b"[default0]:half and half\n")
    host.close()
    assert host.out.getvalue().endswith(b"[default0]:rest\n")


@given(pieces=st.lists(st.binary(max_size=40).map(lambda piece: piece.replace(b"x", b"\n")), max_size=12))
@settings(max_examples=30, deadline=None)
def test_however_a_line_comes_it_is_shown_whole_and_once(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[bytes]
) -> None:
    host = Host(tmp_path_factory.mktemp("logs"), TEE_ALL)
    for piece in pieces:
        host.write(0, piece)
    host.close()
    text = b"".join(pieces)
    lines = text.split(b"\n")
    expected = [b"[default0]:" + line + b"\n" for line in (lines if lines[-1] else lines[:-1])]
    assert host.out.getvalue() == b"".join(expected)


def test_the_last_lines_are_those_of_stderr_else_of_stdout(tmp_path: Path) -> None:
    host = Host(tmp_path, LogChoice())
    assert host.logs.last_lines(0) == ""
    host.write(0, b"only out\n")
    assert host.logs.last_lines(0) == "only out"
    host.write(0, b"x" * 20_000 + b"\xff the end\n", stream=2)
    assert host.logs.last_lines(0).endswith("\ufffd the end")
    assert len(host.logs.last_lines(0)) <= 8192
    assert host.logs.last_lines(77) == ""
    host.close()


def test_the_next_attempt_has_files_of_its_own(tmp_path: Path) -> None:
    host = Host(tmp_path, LogChoice())
    host.write(0, b"first\n")
    second = host.logs.open(attempt=2, ranks=host.ranks)
    os.write(second[0][0], b"second\n")
    host.logs.copy_to_console()
    host.close()
    assert host.out.getvalue() == b"first\nsecond\n"
    assert {path.name for path in tmp_path.iterdir()} == {"attempt-0001", "attempt-0002"}
    for pair in second.values():
        os.close(pair[0])
        os.close(pair[1])


def test_a_folder_that_cannot_be_made_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "logs").write_bytes(b"a file")
    logs = WorkerLogs(tmp_path / "logs", choice=LogChoice(), console=None)
    with pytest.raises(WorldError, match=r"cannot write logs in .*free some space or give another --log-dir"):
        logs.open(attempt=1, ranks=[0])


def test_a_console_that_is_gone_ends_no_job_and_the_files_go_on(tmp_path: Path) -> None:
    """`everstep run ... | head`: the reader has left, and training goes on."""
    read_end, write_end = os.pipe()
    with os.fdopen(write_end, "wb", buffering=0) as gone:
        os.close(read_end)
        logs = WorkerLogs(tmp_path, choice=TEE_ALL, console=(gone, gone))
        ((out, err),) = logs.open(attempt=1, ranks=[0]).values()
        for text in (b"one\n", b"two\n"):
            os.write(out, text)
            logs.copy_to_console()
        logs.finish()
        os.close(out)
        os.close(err)
    assert (tmp_path / "attempt-0001" / "rank-0.stdout.log").read_bytes() == b"one\ntwo\n"
    assert logs.last_lines(0) == "one\ntwo"


@pytest.mark.parametrize("text", ["4", "-1", "", "x", "0:4", "a:1", "0:1,", "0:1:2", "1,2"])
def test_a_choice_of_streams_that_is_none_says_what_to_write(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--tee '.*' is not understood; write 0, 1 \(stdout\)"):
        StreamChoice.parse(text, flag="--tee")
