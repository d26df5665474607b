"""Unpickles data and admits no code: nothing is imported, called or built, whatever the file says."""

import gc
import io
import pickle
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

MEMORY_BYTES_MAX = 4 << 30
_PAGE_BYTES = resource.getpagesize()


class _DataOnly(pickle.Unpickler):
    """Dumps hold dicts, lists, tuples, text, numbers, booleans and None: none of their opcodes gets here."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it names the callable {module}.{name}, and was refused")

    def persistent_load(self, pid: Any) -> NoReturn:
        raise pickle.UnpicklingError("it refers to an object outside of the file, and was refused")


def load_data(content: bytes) -> Any:
    """Unpickle.

    Raises:
        ValueError: with one clause that says why: it names a callable, is torn, or is no pickle.
    """
    try:  # without a buffer that it can peek into, the unpickler reads piece by piece and takes three times as long
        return _DataOnly(io.BufferedReader(io.BytesIO(content), len(content) + 1)).load()
    except pickle.UnpicklingError as error:
        raise ValueError(str(error)) from error
    except MemoryError as error:
        raise ValueError("it asks for more memory than any dump needs, and was refused") from error
    except (EOFError, AttributeError, ImportError, IndexError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"it is torn or no pickle ({type(error).__name__}: {error})") from error


@contextmanager
def without_collections() -> Iterator[None]:
    """No cyclic garbage collection: thousands of traces hold no cycles, and looking for some doubles the time."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@contextmanager
def bounded_loading() -> Iterator[None]:
    """While many pickles are loaded: no garbage collection, and no more than 4 GiB of new address space.

    A pickle of a few bytes can ask for 64 GiB by numbering an object 2**32 - 1 (CPython's memo is an array).
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = _address_space_bytes() + MEMORY_BYTES_MAX
    with without_collections():
        if soft == resource.RLIM_INFINITY or limit < soft:
            resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _address_space_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * _PAGE_BYTES
