"""Records every c10d operation of this process in its ring, at the dispatcher: PyTorch is extended, not patched.

Kernels of PyTorch's own `Library` at the `BackendSelect` key see what any caller asks of any process group (DDP's
reducer, compiled code, point-to-point), write it down and pass it on. They never raise into the script: in doubt
recording stops.
"""

import atexit
import ctypes
import logging
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import library
from torch._C import _distributed_c10d as c10d
from torch.distributed import distributed_c10d

from everstep.adapters.evidence.operation_names import DTYPES, OPERATIONS, RECEIVE, RECEIVE_ANY, SEND
from everstep.adapters.evidence.operation_ring import RingGroup, RingWriter, TextKind
from everstep.domain.ids import Rank

_log = logging.getLogger(__name__)
REFRESH = "everstep_refresh"
"""The worker server's handler that brings the ring up to date; it needs the GIL, and so tells whether that is free."""

_OUTSTANDING_MAX = 64
_SITES_MAX = 600
_SITE_LINES = 3
_DEPTH_MAX = 24
_KEY = "BackendSelect"
_WRAPPERS = ("/typing_extensions.py", "/contextlib.py", "/functools.py")
_DTYPE_CODES = {getattr(torch, name): code for code, name in enumerate(DTYPES) if hasattr(torch, name)}


@dataclass(frozen=True, slots=True)
class _Shape:
    """Where an operator of the c10d library has what: positions among its arguments, -1 for none."""

    name: str
    tensors: int
    group: int
    root: int = -1
    reduce: int = -1
    unseen: bool = False


_OPERATORS = {
    "allreduce_": _Shape("all_reduce", 0, 1, reduce=2),
    "allreduce_coalesced_": _Shape("all_reduce_coalesced", 0, 1, reduce=2),
    "broadcast_": _Shape("broadcast", 0, 1, root=2),
    "reduce_": _Shape("reduce", 0, 1, root=3, reduce=2),
    "allgather_": _Shape("all_gather", 1, 2),
    "_allgather_base_": _Shape("_all_gather_base", 1, 2),
    "allgather_coalesced_": _Shape("all_gather_coalesced", 1, 2),
    "allgather_into_tensor_coalesced_": _Shape("all_gather_coalesced", 1, 2),
    "reduce_scatter_": _Shape("reduce_scatter", 0, 2, reduce=3, unseen=True),
    "_reduce_scatter_base_": _Shape("_reduce_scatter_base", 0, 2, reduce=3, unseen=True),
    "reduce_scatter_tensor_coalesced_": _Shape("_reduce_scatter_base", 0, 2, reduce=3, unseen=True),
    "gather_": _Shape("gather", 1, 2, root=3),
    "scatter_": _Shape("scatter", 0, 2, root=3),
    "alltoall_": _Shape("all_to_all", 1, 2),
    "alltoall_base_": _Shape("all_to_all", 1, 2),
    "barrier": _Shape("barrier", 0, 1),
    "monitored_barrier_": _Shape("monitored_barrier", 0, 1),
    "send": _Shape("send", 0, 1, root=2),
    "recv_": _Shape("recv", 0, 1, root=2),
    "recv_any_source_": _Shape("recv_any_source", 0, 1),
}


class OperationRecorder:
    """One per process. `install` hooks it in; `refresh` brings it up to date.

    Args:
        ring: where it writes.
    """

    def __init__(self, ring: RingWriter) -> None:
        self._ring: RingWriter | None = ring
        self._groups: dict[str, int] = {}
        self._sequences: list[int] = [0]
        self._messages: dict[tuple[int, int, int], int] = {}
        self._sites: dict[tuple[Any, ...], int] = {}
        self._own_code: dict[CodeType, bool] = {}
        self._outstanding: dict[int, Any] = {}
        self._creating: RingGroup | None = None
        self._tells_reduce_op = True
        self._hold: library.Library | None = None

    def install(self) -> None:
        """Hook into the dispatcher and the worker server, for as long as the process lives."""
        key = getattr(torch._C.DispatchKey, _KEY)
        after = torch._C._dispatch_keyset_full_after(key)
        self._hold = hold = library.Library("c10d", "IMPL")
        for name, shape in _OPERATORS.items():
            if (packet := getattr(torch.ops.c10d, name, None)) is not None:
                kernel = self._kernel(packet.default.redispatch, shape, after)
                hold.impl(name, kernel, _KEY, with_keyset=True)
        answer = self._answer
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(answer))  # PyTorch drops it when the interpreter is gone already
        c10d._register_handler(REFRESH, answer)
        atexit.register(self._outstanding.clear)

    def refresh(self) -> None:
        """See which operations have ended, and which groups there are; cheap when nothing has changed."""
        if self._ring is None:
            return
        try:
            self._look_at_outstanding(self._ring)
            if len(distributed_c10d._world.pg_names) != len(self._groups):
                self._write_groups(self._ring)
        except Exception as error:  # outermost frame
            self._stop(error)

    def _kernel(self, redispatch: Callable[..., Any], shape: _Shape, after: Any) -> Callable[..., Any]:
        code = OPERATIONS.index(shape.name)

        def record_and_pass_on(keyset: Any, *args: Any, **kwargs: Any) -> Any:
            number = self._note(shape, code, args)
            result = redispatch(keyset & after, *args, **kwargs)
            if number >= 0:
                self._keep(number, result, shape)
            return result

        return record_and_pass_on

    # --- one operation

    def _note(self, shape: _Shape, code: int, args: tuple[Any, ...]) -> int:
        """Write down that it begins; its number, or -1 when nothing is recorded."""
        ring = self._ring
        if ring is None:
            return -1
        try:
            if self._outstanding:
                self._look_at_outstanding(ring)
            name = c10d.ProcessGroup.unbox(args[shape.group]).group_name
            group = self._groups.get(name)
            if group is None:
                group = self._new_group(ring, name)
            peer = args[shape.root] if shape.root >= 0 else -1
            tensors = args[shape.tensors]
            if isinstance(tensors, list):
                count, first = len(tensors), tensors[0] if tensors else None
                numel = first.numel() if count == 1 and first is not None else sum(t.numel() for t in tensors)
            else:
                count, first, numel = 1, tensors, tensors.numel()
            dims: tuple[int, ...] = first.shape if first is not None else ()
            dtype = _DTYPE_CODES.get(first.dtype, 0) if first is not None else 0
            place = (group, self._next(group, code, peer), peer, self._site(ring))
            reduce_op = self._reduce_op(args[shape.reduce]) if shape.reduce >= 0 else 0
            return ring.record(place, (code, dtype, reduce_op, shape.unseen), (count, numel), dims)
        except Exception as error:  # outermost frame
            self._stop(error)
            return -1

    def _reduce_op(self, boxed: Any) -> int:
        """PyTorch's number of sum, average and so on, from 1; 0 where this build of PyTorch does not tell."""
        if not self._tells_reduce_op:
            return 0
        try:
            return int(boxed.op()) + 1
        except (AttributeError, RuntimeError):
            self._tells_reduce_op = False
            return 0

    def _keep(self, number: int, result: Any, shape: _Shape) -> None:
        """Hold the work, to see later whether it has ended."""
        ring = self._ring
        if ring is None or shape.unseen:
            return
        work = result[-1] if isinstance(result, tuple) else result
        if isinstance(work, torch.ScriptObject):
            if len(self._outstanding) < _OUTSTANDING_MAX:
                self._outstanding[number] = work
        else:
            ring.done(number)  # a synchronous one: monitored_barrier

    def _look_at_outstanding(self, ring: RingWriter) -> None:
        """May run in two threads at once, the script's and the worker server's."""
        for number, held in list(self._outstanding.items()):
            if c10d.Work.unbox(held).is_completed():
                ring.done(number)
                self._outstanding.pop(number, None)

    def _next(self, group: int, code: int, peer: int) -> int:
        if code < SEND:
            self._sequences[group] += 1
            return self._sequences[group]
        direction = RECEIVE if code == RECEIVE_ANY else code
        number = self._messages[group, direction, peer] = self._messages.get((group, direction, peer), 0) + 1
        return number

    # --- where it was called

    def _site(self, ring: RingWriter) -> int:
        """The nearest lines that are not PyTorch's or ours, as the number of a text; 0 when there is none."""
        frame: FrameType | None = sys._getframe(3)
        own = self._own_code
        lines: list[CodeType | int] = []
        for _ in range(_DEPTH_MAX):
            if frame is None:
                break
            code = frame.f_code
            known = own.get(code)
            if known is None:
                known = own[code] = not _is_library(code.co_filename)
            if known:
                lines += (code, frame.f_lineno)
                if len(lines) == 2 * _SITE_LINES:
                    break
            frame = frame.f_back
        key = tuple(lines)
        found = self._sites.get(key)
        return self._new_site(ring, key) if found is None else found

    def _new_site(self, ring: RingWriter, key: tuple[Any, ...]) -> int:
        text = " < ".join(
            f"{code.co_filename}:{line} in {code.co_name}" for code, line in zip(key[::2], key[1::2], strict=True)
        )
        number = len(self._sites) + 1
        if not text or number > _SITES_MAX or not ring.add_text(TextKind.SITE, number, text):
            number = 0
        self._sites[key] = number
        return number

    # --- groups

    def _new_group(self, ring: RingWriter, name: str) -> int:
        self._write_groups(ring)
        if name not in self._groups:  # not in torch's tables: made by hand, or already destroyed there
            self._add_group(ring, RingGroup(name=name, ranks=(), created=0))
        return self._groups[name]

    def _write_groups(self, ring: RingWriter) -> None:
        for group, name in list(distributed_c10d._world.pg_names.items()):
            if name not in self._groups:
                ranks = tuple(Rank(rank) for rank in dist.get_process_group_ranks(group))
                created = int(name) + 1 if name.isdigit() else 0
                self._add_group(
                    ring, RingGroup(name=name, description=group.group_desc or "", ranks=ranks, created=created)
                )

    def _add_group(self, ring: RingWriter, group: RingGroup) -> None:
        number = self._groups[group.name] = len(self._sequences)
        self._sequences.append(0)
        ring.add_group(TextKind.GROUP, number, group)

    # --- answering

    def _answer(self, _request: Any, response: Any) -> None:
        """The worker server's handler: runs in its thread while the main thread may be stuck."""
        self.refresh()
        try:
            creating = group_being_created()
            if self._ring is not None:
                self._ring.count_creations(distributed_c10d._world.group_count)
            if self._ring is not None and creating != self._creating:
                self._creating = creating
                self._ring.add_group(TextKind.CREATING, 0, creating)
        except Exception as error:  # outermost frame
            self._stop(error)
        response.set_content("", "text/plain")
        response.set_status(200)

    def _stop(self, error: Exception) -> None:
        self._ring = None
        self._outstanding.clear()
        _log.warning("everstep stops recording operations (%s: %s); training goes on", type(error).__name__, error)


def group_being_created() -> RingGroup | None:
    """The process group that the main thread is creating at this moment, read off its frames; None for none."""
    main = threading.main_thread().ident
    frame = sys._current_frames().get(main) if main is not None else None
    while frame is not None:
        if frame.f_code.co_name == "_new_group_with_tag" and frame.f_code.co_filename == distributed_c10d.__file__:
            seen = frame.f_locals
            name, ranks = str(seen.get("group_name") or ""), seen.get("ranks")
            everyone = range(dist.get_world_size())
            members = tuple(Rank(rank) for rank in (everyone if ranks is None else ranks))
            return RingGroup(name=name, ranks=members, created=int(name) + 1 if name.isdigit() else 0)
        frame = frame.f_back
    return None


def _is_library(file: str) -> bool:
    return file.startswith("<") or file.endswith(_WRAPPERS) or "/torch/" in file or "/everstep/worker/" in file
