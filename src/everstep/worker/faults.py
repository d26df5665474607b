"""The faults that a worker causes in itself for the injector; the function names are what a stack dump shows."""

import ctypes
import os
import time

from everstep.domain.causes import FaultKind

_FOR_EVER_S = 10_000_000


class InjectedError(RuntimeError):
    """Raised in the script by `everstep run --inject exception`."""


def cause(kind: FaultKind) -> None:
    """Cause the fault here and now. Faults that come from outside as a signal are not for this function."""
    match kind:
        case FaultKind.EXCEPTION:
            raise InjectedError("injected by everstep run --inject: this rank raises")
        case FaultKind.EXIT:
            os._exit(0)
        case FaultKind.SEGFAULT:
            ctypes.string_at(0)
        case FaultKind.GIL:
            hold_the_gil()
        case FaultKind.SLEEP:
            sleep_before_collective()
        case FaultKind.LOADER:
            wait_for_the_next_batch()
        case FaultKind.KILL | FaultKind.FREEZE | FaultKind.MAINTENANCE:
            raise AssertionError(f"{kind} comes from outside")


def hold_the_gil() -> None:
    """Call C that keeps Python's lock and never returns in practice."""
    libc = ctypes.PyDLL(None)
    while True:
        libc.usleep(900_000_000)


def sleep_before_collective() -> None:
    time.sleep(_FOR_EVER_S)


def wait_for_the_next_batch() -> None:
    """Stand in the data loader, as on a storage that does not answer."""
    read_end, _write_end = os.pipe()
    os.read(read_end, 1)
