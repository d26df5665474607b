"""Spares and lemons: who is used, who is replaced by whom, and what the job does when too few hosts are left."""

from hypothesis import given
from hypothesis import strategies as st
from tests.policy.making import Story

from everstep.domain.commands import FinishJob, RecordVerdict, ReplaceHost, Rung, StartWorkers
from everstep.domain.errors import ExitCode
from everstep.domain.events import HostJoined, HostLost, Ticked
from everstep.domain.ids import HostId
from everstep.domain.verdicts import Trouble
from everstep.policy.recovery import RecoveryConfig
from everstep.policy.restarts import RestartConfig
from everstep.policy.spares import HostPool, SpareConfig, spares_for


def ids(*names: str) -> tuple[HostId, ...]:
    return tuple(HostId(name) for name in names)


def a_job(*, waits: bool = False, lemon_failures: int = 3, hosts: int = 2) -> Story:
    config = RecoveryConfig(
        restarts=RestartConfig(backoff_s=(0.0,)),
        spares=SpareConfig(waits_for_hosts=waits, lemon_failures=lemon_failures),
    )
    story = Story(config, hosts=hosts, per_host=1)
    story.begin()
    return story


def join(story: Story, name: str) -> list[object]:
    return list(story.tell(HostJoined, host=HostId(name), worker_count=1, address=name))


def hosts_of(start: StartWorkers) -> list[str]:
    return [share.host for share in start.shares]


def test_a_host_beyond_those_that_are_needed_is_a_spare() -> None:
    story = a_job()
    assert join(story, "spare") == []
    assert hosts_of(story.last(StartWorkers)) == ["h0", "h1"]


def test_a_spare_takes_the_place_of_a_lost_host_by_rung_3() -> None:
    story = a_job()
    join(story, "spare")
    record, *_stops = story.tell(HostLost, host=HostId("h0"), reason="its power failed")
    assert isinstance(record, RecordVerdict)
    assert (record.verdict.trouble, record.verdict.hosts) == (Trouble.HOST_LOST, ("h0",))
    replace, start = story.stopped(1)
    assert (replace.host, replace.spare) == ("h0", "spare")
    assert (hosts_of(start), start.rung) == (["h1", "spare"], Rung.EXCLUDE_HOST)
    assert start.why.endswith("; spare is used for h0")


def test_a_lost_spare_interrupts_nobody() -> None:
    story = a_job()
    join(story, "spare")
    assert story.tell(HostLost, host=HostId("spare"), reason="gone") == []


def test_without_a_spare_the_job_is_given_back_as_before() -> None:
    story = a_job()
    story.tell(HostLost, host=HostId("h0"), reason="gone")
    story.stopped(1)
    assert story.last(FinishJob).exit_code is ExitCode.RETRY_ELSEWHERE


def test_a_job_that_waits_for_hosts_goes_on_when_one_comes() -> None:
    story = a_job(waits=True)
    story.tell(HostLost, host=HostId("h0"), reason="gone")
    assert story.stopped(1) == []
    replace, start = join(story, "h9")
    assert (replace.spare, hosts_of(start)) == ("h9", ["h1", "h9"])


def test_a_host_that_comes_back_to_its_own_place_replaces_nobody() -> None:
    story = a_job(waits=True)
    story.tell(HostLost, host=HostId("h0"), reason="gone")
    story.stopped(1)
    (start,) = join(story, "h0")
    assert hosts_of(start) == ["h0", "h1"]


def test_hosts_are_waited_for_so_long_and_the_sentence_names_who_is_there() -> None:
    spares = SpareConfig(waits_for_hosts=True, wait_s=30.0)
    story = Story(RecoveryConfig(spares=spares), hosts=2, per_host=1)
    story.join(0)
    assert story.tell(Ticked, after_s=29.0) == []
    (end,) = story.tell(Ticked, after_s=2.0)
    assert (end.exit_code, end.summary) == (ExitCode.RETRY_ELSEWHERE, "only 1 of 2 hosts are here (h0) after 30 s")


def test_the_wait_for_a_replacement_counts_from_when_all_have_stopped() -> None:
    spares = SpareConfig(waits_for_hosts=True, wait_s=30.0)
    story = Story(RecoveryConfig(spares=spares), hosts=2, per_host=1).begin()
    story.tell(HostLost, host=HostId("h0"), reason="gone", after_s=100.0)
    story.stopped(1)
    assert story.tell(Ticked, after_s=29.0) == []
    (end,) = story.tell(Ticked, after_s=2.0)
    assert end.summary.startswith("only 1 of 2 hosts are here (h1)")


def test_hosts_stand_by_their_place_and_those_without_one_come_last() -> None:
    story = Story(hosts=3, per_host=1)
    for name, place in (("a", None), ("b", 1), ("c", 0)):
        said = story.tell(HostJoined, host=HostId(name), worker_count=1, address=name, place=place)
    assert hosts_of(said[0]) == ["c", "b", "a"]


def test_a_host_that_is_lost_while_all_are_being_stopped_is_not_waited_for() -> None:
    story = a_job()
    join(story, "spare")
    story.exit(0, -9)
    story.all_evidence()
    assert story.stopped(1) == []
    replace, start = story.tell(HostLost, host=HostId("h0"), reason="gone")
    assert (replace.host, hosts_of(start)) == ("h0", ["h1", "spare"])


def test_a_host_that_fails_again_and_again_is_replaced_though_there_was_progress() -> None:
    story = a_job(lemon_failures=3)
    join(story, "spare")
    for last in (10, 20):
        story.exit(0, -9)
        story.all_evidence()
        story.all_stopped()
        story.steps(last, last + 5)
    assert story.of(ReplaceHost) == []
    story.exit(0, -9)
    story.all_evidence()
    story.all_stopped()
    assert [(one.host, one.spare) for one in story.of(ReplaceHost)] == [("h0", "spare")]
    assert "h0 has failed 3 times within 28 days" in story.last(StartWorkers).why


def test_a_rank_that_keeps_dying_gets_another_host_before_the_job_is_given_back() -> None:
    story = a_job(lemon_failures=0)
    join(story, "spare")
    for _ in range(4):
        story.exit(0, -9)
        story.all_evidence()
        story.all_stopped()
    assert [(one.host, one.spare) for one in story.of(ReplaceHost)] == [("h0", "spare")]
    assert not story.of(FinishJob)


def test_a_script_error_blames_no_host() -> None:
    story = a_job(lemon_failures=1)
    join(story, "spare")
    story.exit(0, 1, error_type="ValueError", error_message="boom")
    story.all_evidence()
    story.all_stopped()
    assert story.of(ReplaceHost) == []


def test_an_agent_speaks_for_its_members_and_gives_up_the_share_of_one_that_is_lost() -> None:
    pool = HostPool(SpareConfig(), need=3)
    pool.join(HostId("pod0"), ids("a", "b"), 16)
    pool.join(HostId("pod1"), ids("c", "d"), 16)
    assert pool.fill(0.0)
    assert [(share.host, share.count) for share in pool.shares()] == [("pod0", 16), ("pod1", 8)]
    assert pool.lose(HostId("a"))
    assert pool.fill(1.0)
    assert [(share.host, share.first_rank, share.count) for share in pool.shares()] == [("pod0", 0, 8), ("pod1", 8, 16)]
    assert [(one.host, one.spare) for one in pool.replacements] == [("a", "d")]


def test_a_lemon_is_the_spare_of_last_resort_and_is_forgiven_after_28_days() -> None:
    day_s = 86_400.0
    pool = HostPool(SpareConfig(lemon_failures=2), need=1)
    for name in ("a", "b", "c"):
        pool.join(HostId(name), ids(name), 8)
    assert pool.fill(0.0)
    assert [pool.failed(HostId("a"), day_s), pool.failed(HostId("a"), 2 * day_s)] == [1, 2]
    assert pool.exclude(HostId("a"), 2 * day_s)
    assert pool.fill(2 * day_s)
    assert pool.shares()[0].host == "b"
    pool.lose(HostId("b"))
    assert pool.fill(3 * day_s)
    assert pool.shares()[0].host == "c"
    pool.lose(HostId("c"))
    assert pool.fill(4 * day_s)
    assert pool.shares()[0].host == "a"
    assert not pool.is_lemon(HostId("a"), 31 * day_s)


def test_spares_are_sized_by_what_was_observed() -> None:
    down = [0] * 90 + [5] * 9 + [30]
    assert [spares_for(down, availability=a) for a in (0.5, 0.9, 0.95, 0.99, 1.0)] == [0, 0, 5, 5, 30]
    assert spares_for([], availability=0.99) == 0


@given(
    need=st.integers(1, 5),
    lemon_failures=st.integers(0, 3),
    does=st.lists(
        st.tuples(st.sampled_from(["join", "lose", "fail", "exclude", "fill"]), st.integers(0, 7), st.integers(0, 40)),
        max_size=60,
    ),
)
def test_whatever_happens_an_attempt_gets_exactly_the_hosts_that_it_needs(
    need: int, lemon_failures: int, does: list[tuple[str, int, int]]
) -> None:
    pool = HostPool(SpareConfig(lemon_failures=lemon_failures), need=need)
    present: set[int] = set()
    used: set[HostId] | None = None
    at_s = 0.0
    for act, number, days in does:
        host, agent = HostId(f"h{number}"), HostId(f"pod{number % 2}")
        at_s += days * 86_400
        match act:
            case "join":
                pool.join(agent, (host,), 8)
                present.add(number)
            case "lose":
                was_in_use = pool.lose(host)
                assert not (used is not None and was_in_use and host not in used)
                present.discard(number)
            case "fail":
                assert pool.failed(host, at_s) >= 1
            case "exclude":
                pool.exclude(host, at_s)
            case _:
                filled = pool.fill(at_s)
                assert filled == (len(present) >= need)
                if filled:
                    assert sum(share.count for share in pool.shares()) == 8 * need
                    before = used
                    used = set(pool.in_use)
                    assert used <= {HostId(f"h{n}") for n in present}
                    changes = {(one.host, one.spare) for one in pool.replacements}
                    if before is not None:
                        assert (before - {h for h, _ in changes}) | {s for _, s in changes} == used
