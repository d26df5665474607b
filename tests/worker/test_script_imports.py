"""What a script imports at its top is read from its text, and its own modules are never run for it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from everstep.worker.script_imports import (
    Wanted,
    import_wanted,
    imports_of_module,
    imports_of_script,
    is_installed,
)

RUNS = "raise AssertionError('a module of the script was run')\n"


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def names(wanted: list[Wanted]) -> list[str]:
    return [".".join(filter(None, (item.module, item.name))) for item in wanted]


def test_imports_at_the_top_are_found_in_their_order(tmp_path: Path) -> None:
    text = '"""Doc."""\nfrom __future__ import annotations\nimport json, csv as c\nfrom os import path\nx = 1\n'
    text += "import wave\n"
    write(tmp_path, {"train.py": text})
    assert names(imports_of_script(tmp_path / "train.py")) == ["json", "csv", "os.path", "wave"]


def test_only_imports_that_are_sure_to_happen_are_foreseen(tmp_path: Path) -> None:
    text = (
        "try:\n    import wave\nexcept ImportError:\n    import csv\n"
        "if x():\n    import json\ndef f():\n    import html\nimport colorsys\n"
    )
    write(tmp_path, {"train.py": text})
    assert names(imports_of_script(tmp_path / "train.py")) == ["wave", "colorsys"]


@pytest.mark.parametrize(
    "line",
    ["os.environ['X'] = '1'", "sys.path.insert(0, 'lib')", "os.putenv('X', '1')", "if 1:\n    os.environ.pop('X')"],
)
def test_nothing_is_foreseen_after_a_line_that_may_change_imports(tmp_path: Path, line: str) -> None:
    write(tmp_path, {"train.py": f"import os, sys\n{line}\nimport wave\n"})
    assert names(imports_of_script(tmp_path / "train.py")) == ["os", "sys"]


def test_modules_of_the_scripts_own_folder_are_read_and_not_imported(tmp_path: Path) -> None:
    files = {
        "train.py": "import model\nfrom pack import parts\nfrom pack.deep.leaf import x\n",
        "model.py": "import wave\nimport train\n" + RUNS,
        "pack/__init__.py": "from . import parts\n" + RUNS,
        "pack/parts.py": "from .deep import leaf\nimport csv\n",
        "pack/deep/__init__.py": "",
        "pack/deep/leaf.py": "from ..parts import y\nimport html.parser\n",
    }
    write(tmp_path, files)
    assert names(imports_of_script(tmp_path / "train.py")) == ["wave", "html.parser", "csv"]


def test_a_script_that_compiles_wants_the_compiler(tmp_path: Path) -> None:
    write(tmp_path, {"train.py": "import model\nimport wave\n", "model.py": "def f(m):\n    return torch.compile(m)\n"})
    assert names(imports_of_script(tmp_path / "train.py")) == ["wave", "torch._inductor.compile_fx"]


def test_a_module_that_m_runs_is_found_without_importing_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, {"pack/__init__.py": RUNS, "pack/go.py": "from . import near\nimport wave\n", "pack/near.py": ""})
    write(tmp_path, {"pack/__main__.py": "import colorsys\n"})
    monkeypatch.chdir(tmp_path)
    assert names(imports_of_module("pack.go")) == ["wave"]
    assert names(imports_of_module("pack")) == ["colorsys"]
    assert imports_of_module("there.is.none") == []


@pytest.mark.parametrize("text", ["import (", "\0", "x = " + "(" * 5000, "import unknown_module_1234"])
def test_a_script_that_cannot_run_is_no_trouble_here(tmp_path: Path, text: str) -> None:
    write(tmp_path, {"train.py": text})
    assert [w for w in imports_of_script(tmp_path / "train.py") if import_wanted(w)] == []
    assert imports_of_script(tmp_path / "missing.py") == []


def test_what_a_user_is_writing_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, {"mine_1234.py": RUNS, "site-packages/theirs_1234.py": ""})
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path / "site-packages"))
    assert is_installed("theirs_1234")
    assert is_installed("json")
    assert is_installed("msgspec")
    assert not is_installed("mine_1234")
    assert not is_installed("nowhere_1234")


HEIR = """
import json, os, sys
from dataclasses import asdict
from everstep.worker import zygote
zygote._SCRIPT_IMPORTED_WITHIN_S = 2.0
heir = zygote._fork_heir(zygote.Imports(modules=[], script=sys.argv[1]))
if heir is None:
    import time
    time.sleep(60)  # as an heir that serves; it dies with its parent
print(json.dumps(asdict(heir)))
"""


def heir_of(folder: Path, text: str) -> dict[str, Any]:
    write(folder, {"site-packages/theirs.py": text, "train.py": "import theirs\nimport wave\n"})
    paths = [str(folder / "site-packages"), str(Path(__file__).parents[2] / "src")]
    done = subprocess.run(
        [sys.executable, "-c", HEIR, str(folder / "train.py")],
        env={"PYTHONPATH": ":".join(paths)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout)  # nothing else was printed there
    return found


def test_an_heir_takes_over_with_the_scripts_imports(tmp_path: Path) -> None:
    heir = heir_of(tmp_path, "print('hello from an import')\n")
    assert heir["pid"]
    assert (heir["count"], heir["problem"]) == (2, "")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()", "2 threads"),
        ("raise ValueError('no GPU here')", "importing theirs raises ValueError: no GPU here"),
        ("raise SystemExit(3)", "importing theirs raises SystemExit"),
        ("import os\nos._exit(3)", "ends the process"),
        ("import time\ntime.sleep(60)", "more than 2 s"),
        ("import random\nrandom.seed(1)", "random numbers"),
    ],
)
def test_an_heir_whose_imports_do_harm_is_dropped(tmp_path: Path, text: str, problem: str) -> None:
    heir = heir_of(tmp_path, text + "\n")
    assert heir["pid"] == 0
    assert problem in heir["problem"]


def test_an_import_that_is_not_there_is_the_scripts_own_affair(tmp_path: Path) -> None:
    heir = heir_of(tmp_path, "import nowhere_1234\n")
    assert heir["pid"]
    assert heir["count"] == 1
