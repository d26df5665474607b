"""Copies of live tensors that a thread makes while training goes on, finished before an optimizer may change them.

It knows one save at a time: what to copy, and what to do when the copy is whole. Which step and slot it is, and what
comes with the tensors, is its caller's; so is telling people.
"""

import atexit
import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from everstep.worker.saving.memory_image import Image
from everstep.worker.saving.samples import Sample, Sampler
from everstep.worker.saving.watched import versions_of

_LOOK_AGAIN_S = 1.0
_FIXED = {type(None), bool, int, float, str, bytes}
CHANGED = "parameters or optimizer state were changed between two steps by something else than the optimizer"


@dataclass(slots=True, kw_only=True, eq=False)
class Staged:
    """One save under way.

    Attributes:
        tensors: the live ones, for the first of the image's.
        complete: says that the save is whole; called by the thread when the copy is.
        has_moved: says that these are not the live tensors any more; asked by the thread when the copy is whole.
        discard: the opposite of `complete`; called when the tensors changed while they were copied.
        is_test: copy at once, and look right before the optimizer steps whether copying later would have been right.
    """

    image: Image
    tensors: Sequence[Tensor]
    complete: Callable[[], None]
    discard: Callable[[], None]
    has_moved: Callable[[], bool] = lambda: False
    is_test: bool = False
    problem: str = ""
    error: BaseException | None = None
    began_s: float = 0.0
    busy_s: float = 0.0
    versions: list[int] = field(default_factory=list)
    sample: Sample | None = None
    copied: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)


class Stager:
    """The thread. Every method is called by the training, one at a time."""

    def __init__(self) -> None:
        self._orders: queue.SimpleQueue[Staged | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._staged: Staged | None = None
        self._pid = os.getpid()
        self._sampler = Sampler()
        self._devices: AbstractContextManager[Any] = contextlib.nullcontext()

    def begin(self, staged: Staged) -> None:
        """Start to copy. What was under way before has been finished."""
        assert self._staged is None
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="everstep-staging", daemon=True)
            self._thread.start()
            atexit.register(self.close)
        if staged.is_test:
            staged.image.copy_in(staged.tensors)
        staged.versions = versions_of(staged.tensors)
        staged.sample = self._sampler.take(staged.image, staged.tensors)
        staged.began_s = time.monotonic()
        self._devices = _side_stream(staged.tensors)
        self._staged = staged
        self._orders.put(staged)

    def hold_writers(self) -> float:
        """Wait until the tensors may change, and give the seconds that it took. Costs nothing when nothing is copied.

        Call it before every optimizer's step.
        """
        staged = self._staged
        if staged is None or os.getpid() != self._pid or (staged.copied.is_set() and not staged.is_test):
            return 0.0
        began_s = time.monotonic()
        self._await(staged.copied)
        if staged.is_test:
            staged.is_test = False
            if not staged.image.equals(staged.tensors):
                staged.problem = CHANGED
        return time.monotonic() - began_s

    def busy_s(self) -> float:
        """For how long the thread has worked on the present save, or did."""
        staged = self._staged
        if staged is None:
            return 0.0
        return staged.busy_s if staged.done.is_set() else time.monotonic() - staged.began_s

    def finish(self) -> str:
        """Wait until the save is whole or discarded, and say why copies must not overlap; empty when they may.

        Raises:
            OSError: shared memory is full.
        """
        if self._staged is None or os.getpid() != self._pid:
            return ""
        self.hold_writers()
        staged, self._staged = self._staged, None
        self._await(staged.done)
        if staged.error is not None:
            raise staged.error
        return staged.problem

    def close(self) -> None:
        """Finish, and end the thread."""
        if self._thread is None or os.getpid() != self._pid:
            return
        with contextlib.suppress(OSError):  # no room: the slot says so itself
            self.finish()
        self._orders.put(None)
        self._thread.join()
        self._thread = None

    def _await(self, event: threading.Event) -> None:
        assert self._thread is not None
        while not event.wait(_LOOK_AGAIN_S):
            assert self._thread.is_alive(), "the staging thread has died"

    # In the thread.

    def _serve(self) -> None:
        while (staged := self._orders.get()) is not None:
            try:
                self._work(staged)
            except BaseException as error:  # outermost frame
                staged.error = error
            finally:
                staged.copied.set()
                staged.busy_s = time.monotonic() - staged.began_s
                staged.done.set()

    def _work(self, staged: Staged) -> None:
        if not staged.is_test:
            with torch.no_grad(), self._devices:
                staged.image.copy_in(staged.tensors)
            assert staged.sample is not None
            if versions_of(staged.tensors) != staged.versions or not staged.sample.is_copied():
                staged.problem = CHANGED
                staged.discard()
                return
        if staged.has_moved():
            staged.problem = CHANGED
            staged.discard()
            return
        staged.copied.set()
        staged.complete()


def _side_stream(tensors: Sequence[Tensor]) -> AbstractContextManager[Any]:
    """Where tensors are on a GPU, a stream that copies beside training, from what training has done so far."""
    if not torch.cuda.is_initialized():
        return contextlib.nullcontext()
    device = next((tensor.device for tensor in tensors if tensor.device.type == "cuda"), None)
    if device is None:
        return contextlib.nullcontext()
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    return torch.cuda.stream(stream)


def pin(image: Image) -> None:
    """Let GPUs write to an image directly, where there are any. A copy without it is right as well, and slower."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        address, size_bytes = image.span()
        torch.cuda.cudart().cudaHostRegister(address, size_bytes, 0)


def frozen(value: Any) -> Any:
    """The value with its own lists, dicts and tensors, so that it stays as it is."""
    match value:
        case Tensor():
            return value.detach().clone()
        case dict():
            if set(map(type, value.values())) <= _FIXED:  # gradients by hundreds, none of which has to be kept
                return value.copy()
            items = {key: frozen(item) for key, item in value.items()}
            return type(value)(items) if type(value) is not dict else items
        case list() | tuple() if not isinstance(value, torch.Size):
            return type(value)(frozen(item) for item in value)
    return value
