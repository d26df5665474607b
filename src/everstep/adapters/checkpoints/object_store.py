"""Files below one URL of an object store, through fsspec: S3, GCS, Azure and whatever else has a plugin.

An object appears whole or not at all in such stores; nothing here relies on that. It knows nothing of checkpoints.
"""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from everstep.domain.errors import ConfigError, WorldError

_T = TypeVar("_T")
Moved = Callable[[], None]


def is_url(text: str) -> bool:
    return "://" in text


class ObjectStore:
    """One prefix of a store.

    Args:
        url: such as s3://bucket/run. Credentials come from the environment, as the plugin documents it.

    Raises:
        ConfigError: fsspec or its plugin is not installed, or the URL makes no sense to it.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        try:
            core = import_module("fsspec.core")
        except ImportError as error:
            raise ConfigError(f"{url} needs fsspec: pip install 'everstep[objects]'") from error
        try:
            self._files, root = core.url_to_fs(self.url, use_listings_cache=False)
        except (ImportError, ValueError, TypeError) as error:
            raise ConfigError(f"{url} cannot be used: {error}") from error
        self._root: str = root.rstrip("/")

    def sizes(self, folder: str = "") -> dict[str, int]:
        """The files below a folder: names relative to the prefix, and sizes in bytes. Empty where there is no folder.

        Raises:
            WorldError: the store fails, as in every method.
        """

        def find() -> dict[str, Any]:
            self._files.invalidate_cache()
            found: dict[str, Any] = self._files.find(self._path(folder), detail=True)
            return found

        try:
            found = self._ask(find, f"list {folder or 'it'}")
        except FileNotFoundError:
            self._check_bucket()
            return {}
        start = len(self._files._strip_protocol(self._root)) + 1
        return {name[start:]: int(info["size"] or 0) for name, info in found.items() if info["type"] == "file"}

    def read(self, name: str) -> bytes:
        """A small file's content.

        Raises:
            FileNotFoundError: there is no such file.
        """
        content: bytes = self._ask(lambda: self._files.cat_file(self._path(name)), f"read {name}")
        return content

    def write(self, name: str, content: bytes) -> None:
        """A small file, anew."""

        def pipe() -> None:
            self._make_parent(name)
            self._files.pipe_file(self._path(name), content)

        self._ask(pipe, f"write {name}")

    def put(self, local: Path, name: str, moved: Moved) -> None:
        """Copy a file there. `moved` is called as bytes go, where the plugin says so, and at the end."""

        def put() -> None:
            self._make_parent(name)
            self._files.put_file(str(local), self._path(name), callback=_callback(moved))

        self._ask(put, f"write {name}")
        moved()

    def get(self, name: str, local: Path, moved: Moved) -> None:
        """Copy a file here.

        Raises:
            FileNotFoundError: there is no such file.
        """
        self._ask(lambda: self._files.get_file(self._path(name), str(local), callback=_callback(moved)), f"read {name}")
        moved()

    def remove(self, name: str) -> None:
        """Remove a file; nothing where there is none."""
        try:
            self._ask(lambda: self._files.rm_file(self._path(name)), f"remove {name}")
        except FileNotFoundError:
            return

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def _check_bucket(self) -> None:
        """A bucket that does not exist is a slip of the pen, not a mirror without checkpoints."""
        if getattr(self._files, "async_impl", False):
            bucket = self._root.partition("/")[0]
            if not self._ask(lambda: self._files.exists(bucket), f"find {bucket}"):
                raise WorldError(f"{self.url}: there is no bucket {bucket}")

    def _make_parent(self, name: str) -> None:
        """Only true file systems have folders; fsspec's object stores are the asynchronous ones."""
        if not getattr(self._files, "async_impl", False):
            self._files.makedirs(self._path(name).rpartition("/")[0], exist_ok=True)

    def _ask(self, question: Callable[[], _T], what: str) -> _T:
        """Plugins raise what their libraries raise, which has no common class."""
        try:
            return question()
        except Exception as error:  # outermost frame
            if isinstance(error, FileNotFoundError) and not what.startswith("write"):
                raise
            said = str(error).strip().splitlines()
            reason = f"{type(error).__name__}: {said[0]}" if said else type(error).__name__
            raise WorldError(f"{self.url} does not {what} ({reason})", retryable=True) from error


def _callback(moved: Moved) -> Any:
    return import_module("fsspec.callbacks").Callback(hooks={"moved": lambda *_, **__: moved()})
