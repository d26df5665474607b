"""Asks a running `everstep run` for evidence through a file in its run directory, and answers such requests there.

Nothing is stopped or judged for it, and no signal or socket is needed: who may write into the run directory may ask.
"""

import contextlib
import fcntl
import logging
import os
import secrets
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from everstep.domain.errors import EvidenceError, WorldError
from everstep.domain.ids import Attempt, IncidentId

_log = logging.getLogger(__name__)
_LEDGER = "ledger.jsonl"
_REQUESTS = "requests"
_LOOK_S = 0.5
_WAIT_S = 0.02
_APART_S = 0.2
_ENDS_WITHIN_S = 5.0


class Collect(Protocol):
    """Takes a snapshot of all ranks into the evidence folder named `incident`."""

    def __call__(self, *, attempt: Attempt, incident: IncidentId, snapshot: int) -> object: ...


def is_live(run_dir: Path) -> bool:
    """Whether an `everstep run` works in this run directory at the moment, by the lock on its ledger."""
    try:
        fd = os.open(run_dir / _LEDGER, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(fd)
    return False


def request_snapshot(run_dir: Path, *, timeout_s: float = 10.0) -> Path:
    """Have a running job looked at now, twice; the folder with the evidence, `evidence/asked-…` in the run directory.

    Raises:
        WorldError: nobody answered, or the request can't be written.
    """
    name = f"asked-{time.strftime('%H%M%S')}-{secrets.token_hex(2)}"
    wanted = run_dir / _REQUESTS / f"{name}.wanted"
    done = wanted.with_suffix(".done")
    try:
        wanted.parent.mkdir(exist_ok=True)
        wanted.write_bytes(b"")
    except OSError as error:
        raise WorldError(f"cannot ask in {wanted.parent}: {error.strerror}") from error
    deadline_s = time.monotonic() + timeout_s
    try:
        while not done.exists():
            if time.monotonic() > deadline_s:
                raise WorldError(f"no `everstep run` in {run_dir} has answered within {timeout_s:g} s")
            time.sleep(_WAIT_S)
        problem = done.read_text()
        if problem:
            raise WorldError(problem)
    finally:
        wanted.unlink(missing_ok=True)
        done.unlink(missing_ok=True)
    return run_dir / "evidence" / name


@contextlib.contextmanager
def answering(run_dir: Path, collect: Collect) -> Iterator[None]:
    """Answer requests, in a thread of its own, for the length of a `with` block."""
    over = threading.Event()
    thread = threading.Thread(
        target=_serve, args=(run_dir / _REQUESTS, collect, over), name="everstep-requests", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(_ENDS_WITHIN_S)


def _serve(folder: Path, collect: Collect, over: threading.Event) -> None:
    while not over.wait(_LOOK_S):
        try:
            wanted = sorted(folder.glob("*.wanted"))
        except OSError:
            continue
        for path in wanted:
            problem = _answer(IncidentId(path.stem), collect, over)
            try:
                path.with_suffix(".tmp").write_text(problem)
                path.unlink(missing_ok=True)
                path.with_suffix(".tmp").rename(path.with_suffix(".done"))
            except OSError as error:
                _log.warning("the request %s cannot be answered: %s", path.name, error.strerror)


def _answer(name: IncidentId, collect: Collect, over: threading.Event) -> str:
    """Take both snapshots; why that failed, or nothing."""
    try:
        collect(attempt=Attempt(0), incident=name, snapshot=1)
        over.wait(_APART_S)
        collect(attempt=Attempt(0), incident=name, snapshot=2)
    except (OSError, ValueError, EvidenceError) as error:  # workers that ended meanwhile take their pages with them
        return f"the workers could not be looked at: {error}"
    return ""
