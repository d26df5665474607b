"""The laws of placing copies: what is lost at once takes one of two, loads are even, and a replacement moves few."""

import itertools
import time
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.policy.peers import Host, Placement, members_as_hosts, place

labels = st.tuples(st.sampled_from("ABC"), st.lists(st.sampled_from("uvwx"), max_size=2, unique=True))


def hosts_of(chosen: Sequence[tuple[str, Sequence[str]]]) -> list[Host]:
    return [Host(name=f"h{n:02d}", rack=r, groups=tuple(sorted(g))) for n, (r, g) in enumerate(chosen)]


many = st.lists(labels, min_size=2, max_size=24).map(hosts_of)
few = st.lists(labels, min_size=2, max_size=6).map(hosts_of)


def risk(one: Host, other: Host) -> tuple[bool, bool]:
    return one.rack == other.rack, bool(set(one.groups) & set(other.groups))


def useful(hosts: Sequence[Host]) -> list[Host]:
    """Without labels that all hosts have: nobody can be out of reach of those."""
    common = set.intersection(*(set(host.groups) for host in hosts))
    one_rack = len({host.rack for host in hosts}) == 1
    return [
        Host(name=h.name, rack=h.name if one_rack else h.rack, groups=tuple(g for g in h.groups if g not in common))
        for h in hosts
    ]


def allowed(hosts: Sequence[Host]) -> dict[str, set[str]]:
    """For each host those that are lost together with it the least."""
    found = {}
    for one in useful(hosts):
        risks = {other.name: risk(one, other) for other in useful(hosts) if other.name != one.name}
        found[one.name] = {name for name in risks if risks[name] == min(risks.values())}
    return found


@given(many)
def test_each_host_has_a_keeper_in_another_rack_without_a_common_group_where_there_is_any(hosts: list[Host]) -> None:
    choices = allowed(hosts)
    keepers = place(hosts).keepers
    assert keepers.keys() == choices.keys()
    assert all(keepers[name] in choices[name] for name in choices)


@given(few)
def test_no_other_choice_of_few_hosts_loads_the_busiest_less(hosts: list[Host]) -> None:
    choices = allowed(hosts)
    best = min(max(Counter(pick).values()) for pick in itertools.product(*choices.values()))
    assert place(hosts).load_max == best


@given(many, st.randoms(use_true_random=False))
def test_the_order_in_which_hosts_are_told_does_not_matter(hosts: list[Host], random: object) -> None:
    shuffled = sorted(hosts, key=lambda _: random.random())  # type: ignore[attr-defined]
    assert place(shuffled) == place(hosts)


@given(many, st.data())
def test_a_host_replaced_by_one_in_its_place_moves_only_what_it_kept_and_had_kept(
    hosts: list[Host], data: st.DataObject
) -> None:
    before = place(hosts)
    lost = data.draw(st.sampled_from(hosts))
    fresh = Host(name="zz", rack=lost.rack, groups=lost.groups)
    after = place([fresh if host is lost else host for host in hosts], before.keepers)
    stayed = {name: k for name, k in before.keepers.items() if lost.name not in (name, k)}
    assert {name: after.keepers[name] for name in stayed} == stayed
    assert after.load_max == before.load_max


@given(many, labels, st.data())
def test_a_host_replaced_by_one_elsewhere_leaves_nobody_with_a_worse_keeper_than_need_be(
    hosts: list[Host], label: tuple[str, list[str]], data: st.DataObject
) -> None:
    before = place(hosts)
    lost = data.draw(st.sampled_from(hosts))
    new = [*(host for host in hosts if host is not lost), Host(name="zz", rack=label[0], groups=tuple(label[1]))]
    after, choices = place(new, before.keepers).keepers, allowed(new)
    assert all(after[name] in choices[name] for name in choices)
    assert place(new, after).keepers == after


def test_a_host_alone_has_no_peer_and_that_is_said() -> None:
    assert place([Host(name="a")]) == Placement(
        keepers={}, doubts=("a host alone has no peer: its loss loses what is in memory",)
    )


def test_what_all_share_is_said_and_two_hosts_in_one_rack_still_keep_each_others_copies() -> None:
    placed = place([Host(name="a", rack="r1", groups=("dp",)), Host(name="b", rack="r1", groups=("dp",))])
    assert placed.keepers == {"a": "b", "b": "a"}
    assert [doubt.split(",")[0] for doubt in placed.doubts] == ["all hosts belong to dp", "all hosts are in r1"]


def test_the_small_rack_shares_the_copies_of_a_large_one_evenly() -> None:
    hosts = [Host(name=f"h{n:03d}", rack="large" if n < 90 else "small") for n in range(100)]
    assert place(hosts).load_max == 9


@pytest.mark.parametrize("count", [1000, 10_000])
def test_ten_thousand_hosts_with_racks_and_groups_are_placed_and_mended_in_a_moment(count: int) -> None:
    hosts = [
        Host(name=f"h{n:05d}", rack=f"r{n // 16}", groups=(f"pipeline-{n // 8}", f"replica-{n % 25}"))
        for n in range(count)
    ]
    began_s = time.process_time()
    before = place(hosts)
    took_s = time.process_time() - began_s
    assert (before.load_max, before.doubts) == (1, ())
    hosts[7] = Host(name="spare", rack="elsewhere")
    after = place(hosts, before.keepers)
    moved = [name for name, keeper in before.keepers.items() if after.keepers.get(name) != keeper]
    assert len(moved) <= 4
    assert took_s < 1.0


def test_no_host_keeps_the_copies_of_many_because_it_is_alone_in_another_rack() -> None:
    hosts = [Host(name=f"h{n:02d}", rack="leaf1" if n < 16 else "leaf2") for n in range(17)]
    assert place(hosts).load_max == 16
    placed = place(hosts, load_max=2)
    assert placed.load_max == 1
    assert placed.doubts == ("racks are not heeded: one host would have to keep the copies of too many others",)
    assert place(hosts, placed.keepers, load_max=2).keepers == placed.keepers
    balanced = place([Host(name=f"h{n:02d}", rack="leaf1" if n < 16 else "leaf2") for n in range(24)], load_max=2)
    assert (balanced.load_max, balanced.doubts) == (2, ())
    grouped = [Host(name=f"h{n}", groups=("g",) if n < 5 else ()) for n in range(6)]
    assert place(grouped, load_max=2).doubts[-1].startswith("parallel groups are not heeded")


def test_the_hosts_of_a_job_are_labelled_by_rack_and_by_the_groups_of_their_ranks() -> None:
    ranks = {"a": (0, 1), "b": (2, 3), "c": (4, 5), "d": (6, 7)}
    everywhere, one_host, replicas = tuple(range(8)), (0, 1), [(0, 1, 2, 3), (4, 5, 6, 7)]
    hosts = members_as_hosts(ranks, {"c": "r1"}, [everywhere, one_host, *replicas])
    assert hosts == [
        Host(name="a", groups=("ranks 0,1,2,3",)),
        Host(name="b", groups=("ranks 0,1,2,3",)),
        Host(name="c", rack="r1", groups=("ranks 4,5,6,7",)),
        Host(name="d", groups=("ranks 4,5,6,7",)),
    ]
    placed = place(hosts)
    assert {(one in "ab", keeper in "cd") for one, keeper in placed.keepers.items()} == {(True, True), (False, False)}
    assert placed.doubts == ()
