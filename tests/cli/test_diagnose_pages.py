"""The hang that README and docs/diagnose.md explain in twenty lines is what the command says of it at this commit."""

from pathlib import Path

import pytest

from bench.diagnose import write_dumps
from everstep.cli.main import main

ROOT = Path(__file__).parents[2]
LINES_MAX = 20


def test_the_pages_show_a_hang_as_it_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_dumps(tmp_path, 1024, entries=40, seed=3)
    (tmp_path / "rank_41").unlink()
    assert main(["diagnose", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert len(told.splitlines()) <= LINES_MAX
    for page in ("README.md", "docs/diagnose.md"):
        assert f"```text\n{told}```\n" in (ROOT / page).read_text(encoding="utf-8"), f"{page} should show\n{told}"
