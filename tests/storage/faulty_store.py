"""An object store for tests that fails, tears uploads and loses bits by chance; below it is a plain folder."""

import random
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem


class FaultyStore(LocalFileSystem):
    """`faulty:///folder`; `chance` decides at each call, and None makes it sound."""

    protocol = "faulty"
    cachable = False
    chance: random.Random | None = None
    calls = 0

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        return str(super()._strip_protocol(str(path).removeprefix("faulty://")))

    def put_file(self, lpath: str, rpath: str, callback: Any = None, **_: Any) -> None:
        if self._strikes(0.15):
            self._tear(Path(lpath).read_bytes(), rpath)  # says nothing
        elif self._strikes(0.15):
            self._tear(Path(lpath).read_bytes(), rpath)
            raise TimeoutError("the store went away")
        else:
            super().put_file(lpath, rpath)

    def pipe_file(self, path: str, value: bytes, **_: Any) -> None:
        if self._strikes(0.15):
            self._tear(value, path)
            raise ConnectionResetError("reset by peer")
        super().pipe_file(path, value)

    def cat_file(self, path: str, **named: Any) -> bytes:
        self._fail(0.05)
        return bytes(super().cat_file(path, **named))

    def find(self, path: str, **named: Any) -> Any:
        self._fail(0.05)
        return super().find(path, **named)

    def rm_file(self, path: str) -> None:
        self._fail(0.1)
        super().rm_file(path)

    def _tear(self, content: bytes, path: str) -> None:
        assert self.chance is not None
        Path(self._strip_protocol(path)).write_bytes(content[: self.chance.randrange(len(content))])

    def _fail(self, share: float) -> None:
        if self._strikes(share):
            raise ConnectionError("503 Slow Down")

    def _strikes(self, share: float) -> bool:
        return self.chance is not None and self.chance.random() < share


fsspec.register_implementation("faulty", FaultyStore, clobber=True)
