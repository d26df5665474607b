"""Makes one folder's storage hang or fail for processes that are started with `environment`. Needs gcc and glibc."""

import errno
import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent / "faults.c"
SOME = "open,write,fsync,rename,mkdir"


class FaultyStorage:
    """Storage below one folder, sound until told otherwise."""

    def __init__(self, folder: Path, scratch: Path) -> None:
        if shutil.which("gcc") is None:
            pytest.skip("no gcc here to build the library that makes storage fail")
        self._control = scratch / "storage-control"
        library = scratch / "storage-faults.so"
        command = ["gcc", "-shared", "-fPIC", "-O1", "-o", str(library), str(SOURCE), "-ldl"]
        built = subprocess.run(command, capture_output=True, text=True, check=False)
        if built.returncode:
            pytest.skip(f"gcc cannot build the library that makes storage fail: {built.stderr[-300:]}")
        self.environment = {
            "LD_PRELOAD": str(library),
            "STORAGE_FOLDER": str(folder),
            "STORAGE_CONTROL": str(self._control),
        }

    def hang(self, calls: str = "all") -> None:
        """From now on calls wait until `heal`."""
        self._say(f"hang {calls}")

    def fail(self, number: int, calls: str = SOME) -> None:
        """From now on calls fail with an errno."""
        assert number in errno.errorcode
        self._say(f"{number} {calls}")

    def heal(self) -> None:
        self._control.unlink(missing_ok=True)

    def close(self) -> None:
        """So that no process hangs for ever in a test that fails."""
        self.heal()

    def _say(self, text: str) -> None:
        fresh = self._control.with_suffix(".new")
        fresh.write_text(text)
        fresh.rename(self._control)
