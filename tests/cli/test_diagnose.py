"""`everstep diagnose` as it is typed: text, JSON, one HTML file, following a folder, and mistakes in one sentence."""

import json
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.policy.dumping import collective, dump, one_missing

import everstep
from everstep.cli.main import main

ALL = {"0": (0, 1, 2, 3)}


@pytest.fixture
def dumps(tmp_path: Path) -> Path:
    folder = tmp_path / "dumps"
    folder.mkdir()
    for rank, entries in enumerate(one_missing(ranks=4, missing=2)):
        write(folder, rank, entries)
    return folder


def write(folder: Path, rank: int, entries: list[dict[str, object]]) -> None:
    (folder / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(dump(entries, ALL), protocol=2))


def test_the_text_names_the_culprit_its_line_and_who_waits(dumps: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagnose", str(dumps)]) == 0
    text = capsys.readouterr().out
    assert text.startswith("NEVER_ENTERED: Rank 2 never entered all_reduce of [[17]]")
    assert "/job/train.py:12 in step" in text
    assert "0-1, 3  in all_reduce of GROUP0  -> 2 (not entered)" in text
    assert "last agreed: all_reduce of [[17]] Float, number 2" in text
    assert max(map(len, text.splitlines())) <= 120


def test_the_json_has_everything(dumps: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagnose", "--json", str(dumps)]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["trouble"], document["ranks"], document["rank_count"]) == ("never_entered", [2], 4)
    assert document["waits"][0]["missing"] == [2]


def test_the_page_stands_alone(dumps: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "hang.html"
    assert main(["diagnose", str(dumps), "--html", str(page)]) == 0
    text = page.read_text(encoding="utf-8")
    assert "<svg" in text
    assert "http" not in text
    assert "<script" not in text
    assert "rank 2 of 4" in text


def test_what_a_dump_says_is_escaped_in_the_page(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    folder.mkdir()
    entry = collective(1, state="scheduled", retired=False, profiling_name="nccl:<script>alert(1)</script>")
    for rank in range(3):
        write(folder, rank, [entry])
    write(folder, 3, [])
    page = tmp_path / "x.html"
    assert main(["diagnose", str(folder), "--html", str(page)]) == 0
    assert "<script" not in page.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere"], "does not exist"),
        ([], "name a folder"),
        (["."], "no flight recorder dump"),
        ([".", "--world-size", "0"], "starts at 1"),
    ],
)
def test_mistakes_are_one_sentence(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["diagnose", *arguments]) == 64
    error = capsys.readouterr().err
    assert words in error
    assert len(error.splitlines()) == 1


def test_a_page_that_cannot_be_written_is_said(dumps: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagnose", str(dumps), "--html", str(dumps / "no" / "x.html")]) == 74
    assert "can't be written" in capsys.readouterr().err


def test_following_says_a_changed_verdict_once(dumps: Path) -> None:
    late = dumps / "nccl_trace_rank_2"
    content = late.read_bytes()
    late.unlink()
    command = [sys.executable, "-m", "everstep", "diagnose", str(dumps), "--follow"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        try:
            first = next(line for line in process.stdout if ":" in line and not line.startswith("--"))
            assert first.startswith("DEAD: Rank 2 has left no dump")
            (dumps / ".part").write_bytes(content)
            (dumps / ".part").rename(late)
            assert any(line.startswith("NEVER_ENTERED: Rank 2") for line in process.stdout)
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=10) == 0


def test_the_python_face_gives_the_same_and_needs_no_torch(dumps: Path) -> None:
    assert everstep.diagnose(dumps).ranks == (2,)
    assert everstep.diagnose([str(dumps)]).trouble.value == "never_entered"
    code = f"import sys, everstep; everstep.diagnose({str(dumps)!r}); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_importing_everstep_is_light() -> None:
    code = "import sys; before = set(sys.modules); import everstep; print(*(set(sys.modules) - before))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not [name for name in loaded if name.startswith(("everstep.", "msgspec", "torch"))]
    with pytest.raises(AttributeError):
        _ = everstep.nothing_of_the_kind


def test_a_thousand_ranks_fit_on_a_screen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    everybody = {"0": tuple(range(256))}
    for rank in range(256):
        entries = [collective(1)] if rank == 77 else [collective(1), collective(2, state="scheduled", retired=False)]
        (tmp_path / f"rank_{rank}").write_bytes(pickle.dumps(dump(entries, everybody), protocol=2))
    began = time.monotonic()
    assert main(["diagnose", str(tmp_path)]) == 0
    assert time.monotonic() - began < 20
    text = capsys.readouterr().out
    assert "0-76, 78-255  in all_reduce of GROUP0  -> 77" in text
    assert len(text.splitlines()) < 20
