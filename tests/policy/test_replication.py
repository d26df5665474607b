"""The leader never gives up what all have for what some have, and a plan brings back the newest that exists whole."""

from hypothesis import given
from hypothesis import strategies as st

from everstep.policy.replication import (
    Fetch,
    HeldShard,
    HostReport,
    Members,
    Version,
    Word,
    committed,
    held_everywhere,
    next_word,
    plan_restore,
    slot_for_copy,
)

MEMBERS = Members(ranks={"a": (0,), "b": (1,), "c": (2,)}, keepers={"a": "b", "b": "c", "c": "a"})


def version(step: int, attempt: int = 1) -> Version:
    return Version(attempt=attempt, step=step, layout="l")


def held(shard: int, *steps: int, attempt: int = 1, is_replicated: bool = False) -> tuple[HeldShard, ...]:
    return tuple(
        HeldShard(shard=shard, slot=n, version=version(step, attempt), shard_count=3, is_replicated=is_replicated)
        for n, step in enumerate(steps)
    )


def reports(slots: dict[str, tuple[int, ...]], copies: dict[str, dict[int, tuple[int, ...]]]) -> dict[str, HostReport]:
    return {
        host: HostReport(
            host=host,
            generation=1,
            slots=held(MEMBERS.ranks[host][0], *slots.get(host, ())),
            copies=tuple(item for shard, steps in copies.get(host, {}).items() for item in held(shard, *steps)),
        )
        for host in "abc"
    }


def test_a_host_copies_its_own_ranks_and_those_of_its_wards() -> None:
    assert [MEMBERS.kept_by(host) for host in "abc"] == [(0, 2), (0, 1), (1, 2)]
    assert MEMBERS.leader == "a"


def test_the_newest_step_in_every_memory_is_wanted_and_protected_once_all_have_copied_it() -> None:
    found = reports({"a": (5, 6), "b": (5, 6, 7), "c": (6, 5)}, {})
    word = next_word(None, MEMBERS, found, generation=1, restoring=False)
    assert word == Word(generation=1)
    word = next_word(word, MEMBERS, found, generation=1, restoring=False)
    assert word == Word(generation=1, wanted=version(6))
    partly = reports(dict.fromkeys("abc", (8,)), {"a": {0: (6,), 2: (6,)}, "b": {0: (6,), 1: (6,)}, "c": {1: (6,)}})
    assert next_word(word, MEMBERS, partly, generation=1, restoring=False) == word
    wholly = reports(
        dict.fromkeys("abc", (8,)), {"a": {0: (6,), 2: (6,)}, "b": {0: (6,), 1: (6,)}, "c": {1: (6,), 2: (6,)}}
    )
    expected = Word(generation=1, protected=version(6), wanted=version(8))
    assert next_word(word, MEMBERS, wholly, generation=1, restoring=False) == expected


def test_nothing_is_decided_while_a_host_does_not_answer_or_follows_another_roster() -> None:
    word = Word(generation=1, protected=version(3), wanted=version(6))
    found = reports({}, {})
    del found["b"]
    assert next_word(word, MEMBERS, found, generation=1, restoring=False) is word
    assert next_word(word, MEMBERS, reports({}, {}), generation=2, restoring=False) is word


def test_a_version_that_a_host_could_not_copy_is_dropped_for_a_newer_one() -> None:
    word = Word(generation=1, protected=version(3), wanted=version(6))
    found = reports(dict.fromkeys("abc", (6, 7)), {})
    found["c"] = HostReport(host="c", generation=1, slots=held(2, 6, 7), failed=version(6))
    after = next_word(word, MEMBERS, found, generation=1, restoring=False)
    assert after == Word(generation=1, protected=version(3), wanted=version(7))


steps_held = st.lists(st.integers(1, 4), max_size=2, unique=True).map(tuple)


@given(
    st.lists(st.tuples(*[st.dictionaries(st.integers(0, 2), steps_held)] * 3), min_size=1, max_size=6),
    st.lists(st.tuples(*[steps_held] * 3), min_size=6, max_size=6),
)
def test_what_is_protected_never_gets_older(copies: list[tuple[dict[int, tuple[int, ...]], ...]], slots: list) -> None:
    word: Word | None = None
    before = None
    for found, memory in zip(copies, slots, strict=False):
        told = reports(dict(zip("abc", memory, strict=True)), dict(zip("abc", found, strict=True)))
        word = next_word(word, MEMBERS, told, generation=1, restoring=False)
        assert word is not None
        assert before is None or (word.protected is not None and word.protected >= before)
        assert word.wanted is None or word.protected is None or word.wanted > word.protected
        before = word.protected


@given(
    st.lists(st.one_of(st.none(), st.integers(1, 5).map(version)), min_size=2, max_size=2),
    st.integers(1, 5),
    st.integers(1, 5),
)
def test_a_copy_that_all_have_is_never_overwritten(slots: list[Version | None], protected: int, wanted: int) -> None:
    word = Word(generation=1, protected=version(protected), wanted=version(wanted))
    slot = slot_for_copy(slots, word)
    if slot is None:
        assert word.wanted in slots or all(found == word.protected for found in slots)
    else:
        assert slots[slot] != word.protected
        assert None not in slots or slots[slot] is None


def test_a_replaced_host_gets_its_shard_from_its_keeper_and_the_others_go_back_to_the_same_step() -> None:
    found = reports({"a": (6, 7, 8), "c": (8, 9)}, {"a": {0: (6,), 2: (6,)}, "c": {1: (6,), 2: (6,)}})
    plan = plan_restore(MEMBERS, found)
    assert plan.version == version(6)
    assert plan.fetches == (
        Fetch(shard=1, slot=0, source="c", target="b"),
        Fetch(shard=2, slot=2, source="c", target="c"),  # from its own copy, into its empty slot
    )
    assert any("step 9 lacks shard 0, 1" in reason for reason in plan.reasons)


def test_what_every_memory_still_holds_needs_no_copy() -> None:
    found = reports(dict.fromkeys("abc", (8, 9)), {"a": {0: (6,)}})
    plan = plan_restore(MEMBERS, found)
    assert (plan.version, plan.fetches) == (version(9), ())


def test_ranks_that_all_need_the_whole_state_get_it_on_every_host_from_different_ones() -> None:
    found = {
        host: HostReport(host=host, generation=1, slots=held(n, 9, is_replicated=True)) for n, host in enumerate("abc")
    }
    plan = plan_restore(MEMBERS, found)
    assert {(f.shard, f.target) for f in plan.fetches} == {
        (shard, host) for shard in range(3) for host in "abc" if MEMBERS.owners[shard] != host
    }
    assert all(f.source == MEMBERS.owners[f.shard] for f in plan.fetches)


def test_what_an_attempt_left_behind_when_the_next_one_resumed_is_not_brought_back() -> None:
    found = {
        "a": HostReport(host="a", generation=1, slots=(*held(0, 20), *held(0, 12, attempt=2))),
        "b": HostReport(host="b", generation=1, slots=(*held(1, 20), *held(1, 12, attempt=2))),
        "c": HostReport(host="c", generation=1, slots=(*held(2, 20), *held(2, 12, attempt=2))),
    }
    assert plan_restore(MEMBERS, found).version == version(12, attempt=2)


def test_without_a_whole_version_there_is_no_plan_and_the_reasons_say_what_lacks() -> None:
    plan = plan_restore(MEMBERS, reports({"a": (5,), "b": (5,)}, {}))
    assert (plan.version, plan.fetches) == (None, ())
    assert plan.reasons == ("attempt 1: step 5 lacks shard 2 of 3",)
    assert plan_restore(MEMBERS, reports({}, {})).version is None


def test_committed_and_held_everywhere_ask_the_owners_and_the_keepers() -> None:
    found = reports({"a": (5, 6), "b": (6,), "c": (6, 7)}, {h: dict.fromkeys(range(3), (4, 5)) for h in "abc"})
    assert committed(MEMBERS, found) == version(6)
    assert held_everywhere(MEMBERS, found) == version(5)
