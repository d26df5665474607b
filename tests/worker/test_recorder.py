"""The recorder sees every way of communicating, knows ends from beginnings, and changes neither results nor exits."""

import subprocess
import sys
from pathlib import Path

import pytest

from everstep.adapters.evidence.operation_names import operation_name, reduce_name
from everstep.adapters.evidence.operation_ring import RingView, parse_ring

SCRIPT = Path(__file__).with_name("scripts") / "recorded.py"


@pytest.fixture(scope="module")
def rings(tmp_path_factory: pytest.TempPathFactory) -> list[RingView]:
    folder = tmp_path_factory.mktemp("rings")
    ranks = [subprocess.Popen([sys.executable, str(SCRIPT), str(rank), str(folder)]) for rank in range(2)]
    assert [rank.wait(180) for rank in ranks] == [0, 0]
    return [parse_ring((folder / f"{rank}.ring").read_bytes()) for rank in range(2)]


def names(view: RingView) -> list[str]:
    return [operation_name(record.kind) for record in view.records]


def test_all_kinds_are_recorded_in_program_order(rings: list[RingView]) -> None:
    first, second = names(rings[0]), names(rings[1])
    assert first[:5] == ["all_reduce", "broadcast", "send", "send", "recv"]
    assert second[:5] == ["all_reduce", "broadcast", "recv", "send", "recv"]
    assert first[5:] == second[5:]
    assert first[-5:] == ["_reduce_scatter_base", "all_gather", "all_gather", "all_reduce", "monitored_barrier"]
    assert first.count("all_reduce") >= 3  # ours, inference's and that of DDP's reducer


def test_whatever_has_ended_is_known_to_have_ended(rings: list[RingView]) -> None:
    for view in rings:
        assert all(record.done_ns >= record.at_ns for record in view.records if not record.unseen)
        assert [operation_name(record.kind) for record in view.records if record.unseen] == ["_reduce_scatter_base"]


def test_messages_are_counted_by_peer_and_direction(rings: list[RingView]) -> None:
    for view, sends, receives in ((rings[0], [1, 2], [1]), (rings[1], [1], [1, 2])):
        messages = [
            (operation_name(record.kind), record.seq) for record in view.records if record.peer == 1 - view.rank
        ]
        assert [seq for name, seq in messages if name == "send"] == sends
        assert [seq for name, seq in messages if name == "recv"] == receives


def test_root_shape_and_place_are_recorded(rings: list[RingView]) -> None:
    broadcast = rings[0].records[1]
    assert (broadcast.peer, broadcast.dims, broadcast.numel) == (1, (16,), 16)
    assert f"{SCRIPT}:17 in communicate" in rings[0].sites[broadcast.site]


def test_how_it_reduces_is_recorded(rings: list[RingView]) -> None:
    ways = [(operation_name(record.kind), reduce_name(record.reduce_op)) for record in rings[0].records]
    assert ways[:3] == [("all_reduce", "sum"), ("broadcast", ""), ("send", "")]
    assert ("_reduce_scatter_base", "sum") in ways
    assert [way for way in ways if way[0] == "all_reduce"][-1] == ("all_reduce", "max")


def test_groups_carry_their_ordered_members(rings: list[RingView]) -> None:
    for view in rings:
        default, side = view.groups.values()
        assert (default.name, default.ranks, default.created) == ("0", (0, 1), 1)
        assert (side.ranks, side.description, side.created) == ((0, 1), "side", 2)  # PyTorch sorts them
        assert view.groups[view.records[-1].group] == side
