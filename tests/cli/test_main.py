"""The `everstep` command itself: one line and exit code 64 for a wrong flag, help with examples, and no torch."""

import subprocess
import sys

import pytest

import everstep
from everstep.cli.main import main
from everstep.domain.errors import ExitCode


def leave(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(list(arguments))
    return int(caught.value.code or 0)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--invented"],
        ["run", "--invented", "train.py"],
        ["run", "--nproc", "2", "train.py"],  # no abbreviations
        ["run"],
        ["run", "--master-port", "http", "train.py"],
        ["invented"],
        [],
    ],
)
def test_a_wrong_flag_ends_with_64_and_one_line_that_says_where_to_look(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert leave(*arguments) == ExitCode.USAGE
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("everstep: ")
    assert shown.err.count("\n") == 1
    assert "--help" in shown.err


def test_a_mistake_that_is_seen_later_is_one_line_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "no-such-script.py"]) == ExitCode.USAGE
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"]])
def test_help_shows_examples(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert leave(*arguments) == 0
    shown = capsys.readouterr().out
    assert "examples:\n" in shown
    assert "everstep run --" in shown


def test_the_help_of_run_tells_every_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    leave("run", "--help")
    shown = " ".join(capsys.readouterr().out.split())
    missing = [code.name for code in ExitCode if f" {int(code)} " not in shown]
    assert not missing


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert leave("--version") == 0
    assert capsys.readouterr().out == f"everstep {everstep.__version__}\n"


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["run", "gone.py"]])
def test_neither_help_nor_a_mistake_loads_torch(arguments: list[str]) -> None:
    code = (
        "import sys\n"
        "from everstep.cli.main import main\n"
        "try:\n"
        f"    main({arguments!r})\n"
        "except SystemExit:\n"
        "    print('left')\n"
        "print(sorted(name for name in ('torch', 'numpy') if name in sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.endswith("[]\n")
