"""The README's and the pages' commands run as they stand, in a fresh folder."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e
ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def commands(page: Path) -> list[str]:
    """Every line of a shell block that calls everstep, without its comment. `make` and `pip` are CI's own."""
    lines = [line for block in blocks(page.read_text(), "sh") for line in block.splitlines()]
    return [line.partition("  #")[0].strip() for line in lines if line.startswith("everstep ")]


def write_scripts(page: Path, folder: Path) -> None:
    """Python blocks that begin with `# name.py` are files that the commands run; so are the examples."""
    (folder / "examples").symlink_to(ROOT / "examples")
    for block in blocks(page.read_text(), "python"):
        if match := re.match(r"# (\w+\.py)\n", block):
            (folder / match[1]).write_text(block)


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=lambda page: page.name)
def test_the_commands_of_a_page_run_in_order(page: Path, tmp_path: Path) -> None:
    write_scripts(page, tmp_path)
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    for command in commands(page):
        done = subprocess.run(
            shlex.split(command),
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"


def test_the_readme_names_the_two_commands_that_set_everything_up_first() -> None:
    first = blocks((ROOT / "README.md").read_text(), "sh")[0].split("\n")
    assert [line.split("#")[0].strip() for line in first if line] == ["make demo", "make test"]
    targets = re.findall(r"^([a-z0-9]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    assert {"demo", "test", "check", "e2e", "sim", "bench"} <= set(targets)


def test_every_link_of_a_page_leads_to_a_file() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_readme_lists_every_exit_code() -> None:
    from everstep.domain.errors import ExitCode

    table = (ROOT / "README.md").read_text()
    for code in ExitCode:
        assert re.search(rf"^\| {int(code)} \|", table, flags=re.MULTILINE), code
