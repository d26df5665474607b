"""PyTorch's flight recorder dump as it is written, versions 2.1 to 2.10: what is read of it, and nothing else.

Fields that a version lacks have defaults, fields that a later one adds are ignored; flight_recorder.md section 2.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

# Names as PyTorch writes them; anything may be null in JSON.


class Entry(msgspec.Struct, gc=False):
    """One record of the ring: a collective, a point-to-point operation, or the marker that closes a batch."""

    record_id: int = -1
    pg_id: int = 0
    process_group: tuple[str, str] = ("", "")
    collective_seq_id: int = 0
    p2p_seq_id: int = 0
    op_id: int = 0
    profiling_name: str = ""
    time_created_ns: int | None = None
    input_sizes: Any = ()
    input_dtypes: Any = ()
    output_sizes: Any = ()
    output_dtypes: Any = ()
    state: str | None = None
    time_discovered_started_ns: int | None = None
    retired: bool = False
    is_p2p: bool = False
    frames: Any = ()


class GroupConfig(msgspec.Struct):
    """A row of `pg_config`; `ranks` is a list written as text."""

    name: str = ""
    desc: str = ""
    ranks: str | list[int] = "[]"


class GroupStatus(msgspec.Struct):
    """A row of `pg_status`; JSON writes the numbers as text."""

    last_enqueued_collective: int | str = -1
    last_started_collective: int | str = -1
    last_completed_collective: int | str = -1


class Dump(msgspec.Struct):
    """One rank's dump. `entries` may decode lazily: it is read from its end, and seldom to its beginning.

    `rank` is no field of PyTorch's; everstep and others write it beside the rest.
    """

    version: str = ""
    pg_config: dict[str, GroupConfig] = {}
    pg_status: dict[str, GroupStatus] = {}
    entries: Sequence[Any] = ()
    rank: int | None = None
