"""The newest step that is whole somewhere is chosen, and no order of saves and deaths loses the last common one."""

from hypothesis import given
from hypothesis import strategies as st

from everstep.policy.checkpoints import Holding, Slot, SlotState, Tier, committed_steps, elect, slot_to_write

COMPLETE, WRITING, EMPTY = SlotState.COMPLETE, SlotState.WRITING, SlotState.EMPTY


def holding(step: int, shard: int, tier: Tier = Tier.MEMORY, *, count: int = 2, layout: str = "a") -> Holding:
    return Holding(step=step, layout=layout, shard=shard, shard_count=count, tier=tier)


def whole(step: int, tier: Tier = Tier.MEMORY, **others: object) -> list[Holding]:
    return [holding(step, shard, tier, **others) for shard in range(2)]  # type: ignore[arg-type]


def test_nothing_is_elected_where_there_is_nothing() -> None:
    assert elect([], {}).step is None
    assert elect([], {}).tier is None


def test_the_newest_whole_step_is_elected_whatever_its_tier() -> None:
    assert elect([*whole(5), *whole(9, Tier.DISK)], {}).step == 9
    assert elect([*whole(9), *whole(5, Tier.DISK)], {}).step == 9


def test_a_step_that_one_shard_lacks_is_passed_over_with_a_reason() -> None:
    election = elect([*whole(5), holding(6, 1)], {})
    assert election.step == 5
    assert election.reasons == ("step 6 lacks shard 0 of 2",)


def test_memory_is_taken_before_disk_and_disk_for_the_shard_whose_memory_is_damaged() -> None:
    everything = [*whole(5), *whole(5, Tier.DISK)]
    assert elect(everything, {}).tier is Tier.MEMORY
    election = elect(everything, {holding(5, 1): "its checksum is another"})
    assert [source.tier for source in election.sources] == [Tier.MEMORY, Tier.DISK]
    assert election.reasons == ("step 5, memory, shard 1: its checksum is another",)


def test_an_older_step_is_taken_when_no_tier_has_a_shard_undamaged() -> None:
    damaged = {holding(5, 1): "a flipped bit", holding(5, 1, Tier.DISK): "truncated"}
    election = elect([*whole(5), *whole(5, Tier.DISK), *whole(3, Tier.DISK)], damaged)
    assert (election.step, election.tier) == (3, Tier.DISK)
    assert len(election.reasons) == 3


def test_shards_of_different_layouts_are_never_mixed() -> None:
    assert elect([holding(5, 0), holding(5, 1, layout="b")], {}).step is None


@given(
    st.sets(st.tuples(st.integers(1, 4), st.integers(0, 2), st.sampled_from(Tier))),
    st.sets(st.tuples(st.integers(1, 4), st.integers(0, 2), st.sampled_from(Tier))),
)
def test_no_damaged_holding_is_ever_used_and_no_newer_whole_step_is_left_out(
    there: set[tuple[int, int, Tier]], bad: set[tuple[int, int, Tier]]
) -> None:
    holdings = {holding(step, shard, tier, count=3) for step, shard, tier in there}
    damaged = {holding(step, shard, tier, count=3): "damaged" for step, shard, tier in bad}
    election = elect(holdings, damaged)
    assert not set(election.sources) & damaged.keys()
    assert set(election.sources) <= holdings
    sound = holdings - damaged.keys()
    steps = [step for step in range(1, 5) if {h.shard for h in sound if h.step == step} == {0, 1, 2}]
    assert election.step == max(steps, default=None)


def slots(*what: tuple[SlotState, int]) -> list[Slot]:
    return [Slot(state=state, step=step) for state, step in what]


def test_the_oldest_slot_is_overwritten_and_never_the_newest_common_step() -> None:
    mine = slots((COMPLETE, 7), (COMPLETE, 9), (COMPLETE, 8))
    assert slot_to_write(0, [mine, mine], pinned=()) == 0
    assert slot_to_write(0, [mine, mine], pinned={7}) == 2
    assert slot_to_write(0, [mine, mine], pinned={7, 8}) is None


def test_a_torn_slot_is_taken_first() -> None:
    mine = slots((COMPLETE, 7), (WRITING, 9), (COMPLETE, 8))
    assert slot_to_write(0, [mine, mine], pinned=()) == 1


def test_a_rank_that_is_ahead_waits_for_the_others_rather_than_overwrite_its_own_newest() -> None:
    ahead, behind = slots((COMPLETE, 7), (COMPLETE, 9), (COMPLETE, 8)), slots((COMPLETE, 7), (EMPTY, 0), (EMPTY, 0))
    assert slot_to_write(0, [ahead, behind], pinned=()) is None


def test_a_step_that_another_rank_has_skipped_is_dead_and_its_slot_free() -> None:
    mine, other = slots((COMPLETE, 7), (COMPLETE, 8), (COMPLETE, 9)), slots((COMPLETE, 7), (EMPTY, 0), (WRITING, 9))
    assert slot_to_write(0, [mine, other], pinned=()) == 1


@given(st.data())
def test_the_newest_common_step_never_goes_back_whatever_the_order_of_saves_and_deaths(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 3))
    ranks = [[Slot()] * 3 for _ in range(count)]
    writing: list[tuple[int, int] | None] = [None] * count  # slot and step
    at = [0] * count
    best, pinned = 0, 0
    for _ in range(data.draw(st.integers(1, 60))):
        rank = data.draw(st.integers(0, count - 1))
        match data.draw(st.sampled_from(("save", "save", "save", "die", "pin"))):
            case "save" if writing[rank] is None:
                at[rank] += 1
                slot = slot_to_write(rank, ranks, {pinned})
                if slot is not None:
                    assert ranks[rank][slot].step != pinned or ranks[rank][slot].state is not COMPLETE
                    ranks[rank][slot] = Slot(state=WRITING, step=at[rank])
                    writing[rank] = slot, at[rank]
            case "save":
                slot, step = writing[rank]  # type: ignore[misc]
                ranks[rank][slot] = Slot(state=COMPLETE, step=step)
                writing[rank] = None
            case "die":  # all start again from the newest common step; what is newer is forgotten
                common = next(iter(committed_steps(ranks)), 0)
                ranks = [[s if s.state is COMPLETE and s.step <= common else Slot() for s in mine] for mine in ranks]
                writing, at = [None] * count, [common] * count
            case "pin":
                pinned = next(iter(committed_steps(ranks)), 0) if not pinned else 0
        common = next(iter(committed_steps(ranks)), 0)
        assert common >= best
        best = common


def test_ranks_that_save_together_with_a_slow_reader_always_come_to_a_newer_common_step() -> None:
    ranks = [[Slot()] * 3 for _ in range(3)]
    for step in range(1, 40):
        pinned = {3} if 3 <= step < 30 else set()
        for rank, mine in enumerate(ranks):
            slot = slot_to_write(rank, ranks, pinned)
            assert slot is not None
            mine[slot] = Slot(state=COMPLETE, step=step)
        assert committed_steps(ranks)[0] == step
