"""The job's state machine, story by story: starts, deaths, silences, restarts, ends, and news that comes too late."""

import pytest
from tests.policy.making import LOST_PEER, Story, absent, fault, seen, waiting

from everstep.domain.commands import (
    CollectEvidence,
    DismissSuspicion,
    FinishJob,
    InjectFault,
    RecordVerdict,
    Rung,
    StartWorkers,
    StopWorkers,
)
from everstep.domain.errors import ExitCode
from everstep.domain.events import FaultInjected, HostJoined, HostLost, PhaseChanged, StepsFinished, WorkerReady
from everstep.domain.evidence import Frame
from everstep.domain.ids import Attempt, Rank
from everstep.domain.phases import Phase
from everstep.domain.verdicts import Trouble
from everstep.policy.inquiry import InquiryConfig
from everstep.policy.recovery import RecoveryConfig
from everstep.policy.restarts import RestartConfig

SCRIPT_ERROR = {"error_type": "ValueError", "error_message": "boom", "error_where": "train.py:3 in main"}
HUNG = ([absent(0), waiting(1)], [absent(0, silence_s=5.5), waiting(1, silence_s=5.5)])
BLIND = ([seen(0), seen(1)], [seen(0, silence_s=5.5), seen(1, silence_s=5.5)])


def at_once(**limits: object) -> RecoveryConfig:
    """Restarts without a backoff."""
    return RecoveryConfig(restarts=RestartConfig(backoff_s=(0.0,), **limits))  # type: ignore[arg-type]


# --- starts


def test_the_only_host_is_started_as_soon_as_it_has_joined() -> None:
    (start,) = Story(per_host=4).join()
    assert isinstance(start, StartWorkers)
    assert (start.attempt, start.world_size, start.restart_count, start.rung) == (1, 4, 0, None)


def test_nothing_starts_before_all_hosts_have_joined_and_ranks_follow_their_names() -> None:
    story = Story(hosts=3, per_host=2)
    assert story.join(2) == []
    assert story.join(0) == []
    (start,) = story.join(1)
    assert [(share.host, share.first_rank, share.count) for share in start.shares] == [
        ("h0", 0, 2),
        ("h1", 2, 2),
        ("h2", 4, 2),
    ]
    assert start.world_size == 6


def test_a_host_that_joins_twice_counts_once() -> None:
    story = Story(hosts=2)
    story.join(0)
    assert story.join(0) == []
    assert len(story.join(1)) == 1


def test_progress_and_news_from_workers_ask_for_nothing() -> None:
    story = Story().begin()
    assert story.tell(PhaseChanged, host="h0", phase=Phase.SAVING, step=4) == []
    assert story.job.handle(WorkerReady(at_s=story.at_s, attempt=Attempt(1), rank=Rank(0), part="x", after_s=1.0)) == ()
    assert story.tick() == []
    assert len(story.said) == 1


# --- ends that are well


def test_when_every_rank_has_ended_well_the_job_is_done() -> None:
    story = Story().begin()
    (stop,) = story.finish_well()
    assert isinstance(stop, StopWorkers)
    (end,) = story.stopped()
    assert (end.exit_code, end.rung) == (ExitCode.DONE, None)
    assert end.summary == "all 2 ranks have ended well after 4 steps"
    assert story.job.over


def test_the_end_of_some_ranks_is_no_end_of_the_job() -> None:
    story = Story(per_host=3).begin()
    assert story.exit(0, 0, phase=Phase.ENDING) == []
    assert story.exit(2, 0, phase=Phase.ENDING) == []
    assert not story.job.over


def test_a_job_that_needed_a_second_attempt_says_so_when_it_is_done() -> None:
    story = Story().begin()
    story.die()
    story.run(4, 9)
    story.finish_well()
    story.stopped()
    assert story.last(FinishJob).summary == "all 2 ranks have ended well after 9 steps in attempt 2"


# --- deaths


def test_evidence_is_asked_for_on_every_host_before_anybody_is_stopped() -> None:
    story = Story(hosts=2).begin()
    asked = story.exit(3, -9)
    assert [(type(command), command.host) for command in asked] == [(CollectEvidence, "h0"), (CollectEvidence, "h1")]
    assert story.evidence(0) == []
    verdict, *stops = story.evidence(1)
    assert isinstance(verdict, RecordVerdict)
    assert verdict.verdict.ranks == (3,)
    assert [(type(command), command.host) for command in stops] == [(StopWorkers, "h0"), (StopWorkers, "h1")]


def test_a_host_that_gives_no_evidence_is_not_waited_for_longer_than_agreed() -> None:
    story = Story(RecoveryConfig(inquiry=InquiryConfig(answer_within_s=10.0)), hosts=2).begin()
    story.exit(0, -9)
    story.evidence(0)
    assert story.tick(9.0) == []
    assert isinstance(story.tick(1.1)[0], RecordVerdict)


def test_the_next_attempt_waits_until_all_workers_have_stopped_on_all_hosts() -> None:
    story = Story(hosts=3).begin()
    story.exit(1, -9)
    story.all_evidence()
    assert story.stopped(0) == []
    assert story.stopped(2) == []
    assert story.stopped(2) == []
    (start,) = story.stopped(1)
    assert (start.attempt, start.restart_count, start.rung) == (2, 1, Rung.RESTART_ALL)
    assert start.why.startswith("restart 1: ")


def test_the_verdict_says_since_when_nothing_moved_and_when_the_first_sign_came() -> None:
    story = Story().begin()
    progress_s = story.at_s
    story.tell(PhaseChanged, host="h0", phase=Phase.SAVING, step=4)
    story.exit(1, -9, after_s=2.0)
    first_sign_s = story.at_s
    story.all_evidence()
    record = story.last(RecordVerdict)
    assert record.since_s == pytest.approx(progress_s + 0.1)
    assert record.detected_at_s == first_sign_s
    assert record.at_s == story.at_s
    assert (record.step, record.planned, record.incident) == (4, False, "a0001-1")


def test_news_of_progress_from_after_the_first_sign_does_not_make_detection_negative() -> None:
    story = Story().begin()
    story.exit(1, -9)
    story.tell(StepsFinished, host="h0", first_step=5, ended_at_s=(story.at_s + 0.05,))
    story.all_evidence()
    record = story.last(RecordVerdict)
    assert record.since_s <= record.detected_at_s <= record.at_s


def test_a_late_exit_of_an_old_attempt_is_ignored() -> None:
    story = Story().begin()
    story.die()
    assert story.job.attempt == 2
    assert story.exit(0, 1, attempt=1, **SCRIPT_ERROR) == []
    assert story.tick() == []
    assert story.exit(0, 0, attempt=1, phase=Phase.ENDING) == []
    assert story.exit(1, 0, phase=Phase.ENDING) == []  # and does not count towards the end of the new one


def test_late_news_of_every_kind_from_an_old_attempt_is_ignored() -> None:
    story = Story().begin()
    story.die()
    said = len(story.said)
    story.stopped(attempt=1)
    story.suspect(attempt=1)
    story.moves_again(attempt=1)
    story.lose_store(attempt=1)
    story.tell(StepsFinished, host="h0", first_step=900, ended_at_s=(1.0,), attempt=1)
    assert len(story.said) == said
    story.die()
    assert story.last(RecordVerdict).step == 0


def test_victims_are_given_time_to_be_outdone_by_the_culprit() -> None:
    story = Story(RecoveryConfig(settle_s=1.0), per_host=3).begin()
    story.exit(0, 1, **LOST_PEER)
    assert story.evidence() == []
    assert story.tick(0.5) == []
    (verdict, _stop) = story.exit(2, -9)
    assert verdict.verdict.ranks == (2,)


def test_when_no_culprit_turns_up_the_verdict_is_that_nobody_knows() -> None:
    story = Story(RecoveryConfig(settle_s=1.0), per_host=3).begin()
    story.exit(0, 1, **LOST_PEER)
    story.evidence()
    (verdict, _stop) = story.tick(1.1)
    assert verdict.verdict.trouble is Trouble.LOST_CONNECTION
    assert verdict.verdict.ranks == ()


def test_ranks_that_leave_one_after_the_other_without_a_word_are_done_and_not_dead() -> None:
    """`--no-python`, or a script that ends by `os._exit(0)`: the first exit looks like a silent leave."""
    story = Story().begin()
    story.exit(0, 0, phase=Phase.UNOBSERVED)
    story.evidence()
    (stop,) = story.exit(1, 0, phase=Phase.UNOBSERVED)
    assert isinstance(stop, StopWorkers)
    assert story.stopped()[0].exit_code is ExitCode.DONE


def test_a_rank_that_leaves_silently_is_dead_once_the_others_do_not_follow() -> None:
    story = Story(RecoveryConfig(settle_s=1.0)).begin()
    story.exit(0, 0)
    assert story.evidence() == []
    (verdict, _stop) = story.tick(1.0)
    assert verdict.verdict.trouble is Trouble.DEAD
    assert verdict.verdict.ranks == (0,)


def test_more_ends_while_everything_is_being_stopped_change_nothing() -> None:
    story = Story(per_host=3).begin()
    story.exit(1, -9)
    story.evidence()
    assert story.exit(0, 1, **SCRIPT_ERROR) == []
    assert story.exit(2, -15) == []
    assert len(story.of(RecordVerdict)) == 1


def test_a_death_during_an_inquiry_into_a_silence_is_judged_as_a_death() -> None:
    story = Story().begin()
    story.suspect()
    silence = story.last(CollectEvidence).incident
    story.exit(1, -9)
    assert story.last(CollectEvidence).incident != silence
    (verdict, _stop) = story.evidence()
    assert verdict.verdict.trouble is Trouble.DEAD


def test_the_failing_ranks_own_traceback_is_shown_at_the_end() -> None:
    story = Story(at_once(restart_count_max=0)).begin()
    story.die(0, 1, **SCRIPT_ERROR, traceback="Traceback: mine", last_lines="noise")
    end = story.last(FinishJob)
    assert end.detail == "Traceback: mine"
    assert end.summary.startswith("rank 0 on h0 raised ValueError: boom after step 4, at train.py:3 in main.")


# --- restarts


def test_two_identical_script_errors_without_a_step_between_stop_the_job() -> None:
    story = Story(at_once()).begin()
    assert isinstance(story.die(0, 1, **SCRIPT_ERROR)[0], StartWorkers)
    (end,) = story.die(1, 1, **SCRIPT_ERROR)  # on another rank: the same bug all the same
    assert (end.exit_code, end.rung) == (ExitCode.SCRIPT_BUG, Rung.ASK_A_PERSON)
    assert "the same failure came 2 times without a new step in between" in end.summary


def test_two_different_script_errors_are_two_first_ones() -> None:
    story = Story(at_once()).begin()
    story.die(0, 1, **SCRIPT_ERROR)
    assert isinstance(story.die(0, 1, **(SCRIPT_ERROR | {"error_message": "other"}))[0], StartWorkers)


def test_a_step_that_no_attempt_had_reached_forgives_what_was_before() -> None:
    story = Story(at_once()).begin()
    for last_step in (8, 12, 16):
        assert isinstance(story.die(0, 1, **SCRIPT_ERROR)[0], StartWorkers)
        story.steps(last_step, last_step)


def test_repeating_steps_that_were_done_before_forgives_nothing() -> None:
    story = Story(at_once()).begin()
    story.die(0, 1, **SCRIPT_ERROR)
    story.run(1, 4)
    assert story.die(0, 1, **SCRIPT_ERROR)[0].exit_code is ExitCode.SCRIPT_BUG


def test_without_restarts_the_first_script_error_is_the_scripts_and_a_death_is_the_budgets() -> None:
    error, death = Story(at_once(restart_count_max=0)).begin(), Story(at_once(restart_count_max=0)).begin()
    (end,) = error.die(0, 1, **SCRIPT_ERROR)
    assert end.exit_code is ExitCode.SCRIPT_BUG
    (end,) = death.die(0, -9)
    assert end.exit_code is ExitCode.BUDGET_SPENT
    assert "--max-restarts 0 is used up" in end.summary


def test_one_restart_allows_one_more_attempt_and_no_third() -> None:
    story = Story(at_once(restart_count_max=1)).begin()
    assert isinstance(story.die(0, -9)[0], StartWorkers)
    story.run(1, 9)
    (end,) = story.die(1, -11)
    assert end.exit_code is ExitCode.BUDGET_SPENT


def test_the_storm_breaker_counts_restarts_that_come_close_together() -> None:
    config = at_once(storm_count_max=3, storm_window_s=300.0)
    story = Story(config).begin()
    for step in (10, 20, 30):
        assert isinstance(story.die(0, -9)[0], StartWorkers)
        story.run(step, step)
    (end,) = story.die(0, -9)
    assert end.exit_code is ExitCode.BUDGET_SPENT
    assert "3 restarts within 300 s are a storm" in end.summary
    calm = Story(config).begin()
    for step in (10, 20, 30, 40, 50):
        assert isinstance(calm.die(0, -9)[0], StartWorkers)
        calm.run(step, step)
        calm.tick(150.0)


def test_the_same_death_again_and_again_without_progress_asks_for_other_hosts() -> None:
    story = Story(at_once(identical_failures_max=3)).begin()
    story.die(1, -9)
    story.die(1, -9)
    (end,) = story.die(1, -9)
    assert (end.exit_code, end.rung) == (ExitCode.RETRY_ELSEWHERE, Rung.GIVE_BACK)


def test_the_same_hang_again_and_again_without_progress_is_not_resolved_here() -> None:
    story = Story(at_once(identical_failures_max=2)).begin()
    story.look_into(*HUNG)
    story.stopped()
    story.look_into(*HUNG, silence_s=60.0)
    (end,) = story.stopped()
    assert end.exit_code is ExitCode.HANG_UNRESOLVED


def test_the_first_restart_comes_at_once_and_later_ones_wait_for_their_tick() -> None:
    story = Story(RecoveryConfig(restarts=RestartConfig(backoff_s=(0.0, 5.0)))).begin()
    assert isinstance(story.die(0, -9)[0], StartWorkers)
    assert story.die(1, -9) == []
    assert story.job.wants_ticks
    assert story.tick(4.8) == []
    (start,) = story.tick(0.3)
    assert isinstance(start, StartWorkers)
    assert start.attempt == 3


def test_an_ordered_end_is_recorded_as_planned() -> None:
    story = Story().begin()
    story.die(1, -15)
    record = story.last(RecordVerdict)
    assert record.planned
    assert "planned maintenance" in record.verdict.reason


# --- silences


def test_a_silence_is_looked_into_only_when_every_host_is_silent() -> None:
    story = Story(hosts=2).begin()
    assert story.suspect(0) == []
    asked = story.suspect(1)
    assert [(command.host, command.snapshot) for command in asked] == [("h0", 1), ("h1", 1)]


def test_two_snapshots_are_taken_with_the_agreed_time_between() -> None:
    story = Story(RecoveryConfig(inquiry=InquiryConfig(apart_s=0.5))).begin()
    story.suspect()
    assert story.evidence(0, *HUNG[0], after_s=0.1) == []
    assert story.tick(0.1) == []
    (again,) = story.tick(0.35)
    assert (again.snapshot, again.incident) == (2, story.of(CollectEvidence)[0].incident)
    verdict, stop = story.evidence(0, *HUNG[1])
    assert verdict.verdict.trouble is Trouble.NEVER_ENTERED
    assert verdict.verdict.ranks == (0,)
    assert stop.kill_ranks == (0,)


def test_an_answer_to_another_inquiry_does_not_count() -> None:
    story = Story(hosts=2).begin()
    story.exit(0, -9)
    story.evidence(0)
    assert story.evidence(1, incident="a0001-9") == []
    assert story.evidence(1, snapshot=2) == []
    assert isinstance(story.evidence(1)[0], RecordVerdict)


def test_a_silence_that_ended_between_the_snapshots_is_dismissed_on_all_hosts_with_a_longer_deadline() -> None:
    story = Story(RecoveryConfig(slow_factor=2.0), hosts=2, per_host=1).begin()
    story.suspect(0)
    story.suspect(1)
    story.evidence(0, absent(0))
    story.evidence(1, waiting(1))
    story.tick(0.5)
    story.evidence(0, absent(0, step=41))
    dismissed = story.evidence(1, waiting(1))
    assert [(type(c), c.host, c.deadline_factor) for c in dismissed] == [
        (DismissSuspicion, "h0", 2.0),
        (DismissSuspicion, "h1", 2.0),
    ]
    assert dismissed[0].reason == "Not a hang: rank 0 made progress between two snapshots."
    assert story.suspect(0) == []
    assert story.suspect(1) != []  # a later silence is a new inquiry


def test_an_inquiry_ends_when_a_host_moves_again() -> None:
    story = Story(hosts=2).begin()
    story.suspect(0)
    story.suspect(1)
    dismissed = story.moves_again(1)
    assert [(c.host, c.reason, c.deadline_factor) for c in dismissed] == [
        ("h0", "it moves again", 1.0),
        ("h1", "it moves again", 1.0),
    ]
    assert story.evidence(0, *HUNG[1]) == []
    assert story.tick(60.0) == []


def test_a_host_that_moves_again_clears_its_own_suspicion_and_no_other_hosts() -> None:
    story = Story(hosts=3).begin()
    story.suspect(0)
    story.suspect(1)
    assert story.moves_again(1) == []
    assert story.suspect(2) == []
    asked = story.suspect(1)  # host 0 has been silent all the while and will not say so again
    assert [command.host for command in asked] == ["h0", "h1", "h2"]


def test_a_stack_that_speaks_of_a_checkpoint_gets_more_time_but_not_for_ever() -> None:
    saving = (Frame(file="train.py", line=9, function="save_checkpoint"),)
    first, second = [absent(0, stack=saving), waiting(1)], [absent(0, stack=saving), waiting(1)]
    story = Story(RecoveryConfig(excused_s=300.0)).begin()
    (dismissed,) = story.look_into(first, second, silence_s=20.0)
    assert isinstance(dismissed, DismissSuspicion)
    assert "This is borne for up to 300 s." in dismissed.reason
    verdict, _stop = story.look_into(first, second, silence_s=400.0)
    assert verdict.verdict.ranks == (0,)


def test_a_silence_that_nobody_can_be_blamed_for_is_borne_for_a_while() -> None:
    story = Story(RecoveryConfig(unsure_s=15.0)).begin()
    (dismissed,) = story.look_into(*BLIND, silence_s=3.0)
    assert "no stack and no recorder from ranks 0-1" in dismissed.reason
    verdict, stop = story.look_into(*BLIND, silence_s=30.0)
    assert verdict.verdict.trouble is Trouble.UNKNOWN
    assert stop.kill_ranks == ()


def test_a_hang_at_the_place_of_the_last_one_is_borne_longer_in_case_it_is_a_pause_on_purpose() -> None:
    story = Story(at_once()).begin()
    assert isinstance(story.look_into(*HUNG, silence_s=2.0)[0], RecordVerdict)
    story.stopped()
    story.run(1, 4)
    (dismissed,) = story.look_into(*HUNG, silence_s=5.0)
    assert isinstance(dismissed, DismissSuspicion)
    assert isinstance(story.look_into(*HUNG, silence_s=20.0)[0], RecordVerdict)


def test_a_pause_that_ended_by_itself_is_known_from_then_on() -> None:
    story = Story(at_once()).begin()
    story.look_into(*HUNG)
    story.stopped()
    story.run(1, 4)
    story.look_into(*HUNG, silence_s=8.0)
    story.steps(5, 8)  # it was none
    assert isinstance(story.look_into(*HUNG, silence_s=15.0)[0], DismissSuspicion)


def test_a_defect_of_the_agent_is_told_as_our_own() -> None:
    story = Story().begin()
    (end,) = story.tell(HostLost, host="h0", reason="KeyError: 3", defect=True)
    assert (end.exit_code, end.rung) == (ExitCode.INTERNAL, Rung.ASK_A_PERSON)


def test_ranks_that_are_all_inside_the_same_operation_are_borne_as_long() -> None:
    inside = [waiting(0), waiting(1)]
    story = Story(RecoveryConfig(unsure_s=15.0)).begin()
    assert isinstance(story.look_into(inside, inside, silence_s=3.0)[0], DismissSuspicion)
    verdict, _stop = story.look_into(inside, inside, silence_s=30.0)
    assert verdict.verdict.trouble is Trouble.INSIDE_OP


def test_ticks_are_wanted_while_something_waits_for_time_and_not_else() -> None:
    story = Story().begin()
    assert not story.job.wants_ticks
    story.suspect()
    assert story.job.wants_ticks
    story.moves_again()
    assert not story.job.wants_ticks
    story.exit(0, -9)
    assert story.job.wants_ticks


# --- hosts, stores and starts that fail


def test_the_loss_of_the_only_host_ends_the_job() -> None:
    story = Story().begin()
    (end,) = story.lose(reason="no memory")
    assert end.exit_code is ExitCode.RETRY_ELSEWHERE
    assert end.summary == "host h0 is lost: no memory"


def test_the_loss_of_one_of_two_hosts_stops_the_other_first() -> None:
    story = Story(hosts=2).begin()
    (stop,) = story.lose(0)
    assert (type(stop), stop.host) == (StopWorkers, "h1")
    (end,) = story.stopped(1)
    assert end.exit_code is ExitCode.RETRY_ELSEWHERE


def test_a_host_that_is_lost_after_the_end_ends_nothing_twice() -> None:
    story = Story(hosts=2).begin()
    story.finish_well()
    story.all_stopped()
    assert story.lose(0) == []
    assert story.lose(1) == []
    assert len(story.of(FinishJob)) == 1


def test_a_job_that_ended_well_stays_done_when_a_host_is_lost_on_the_way_out() -> None:
    story = Story(hosts=2).begin()
    story.finish_well()
    story.stopped(0)
    story.lose(1)
    story.stopped(0)
    assert story.last(FinishJob).exit_code is ExitCode.DONE


def test_a_wrong_path_on_one_host_ends_the_job_as_the_users_mistake() -> None:
    story = Story(hosts=2)
    story.join(0)
    story.join(1)
    stops = story.fail_to_start(0, final=True, reason="port 80 cannot be used")
    assert [stop.host for stop in stops] == ["h0", "h1"]
    (end,) = story.all_stopped()
    assert (end.exit_code, end.summary) == (ExitCode.USAGE, "port 80 cannot be used")


def test_a_mistake_that_is_told_after_what_followed_from_it_still_ends_the_job() -> None:
    story = Story(hosts=2)
    story.join(0)
    story.join(1)
    story.fail_to_start(1, final=False, reason="the first host could not start the rendezvous store")
    assert story.fail_to_start(0, final=True, reason="port 80 cannot be used") == []
    (end,) = story.all_stopped()
    assert (end.exit_code, end.summary) == (ExitCode.USAGE, "port 80 cannot be used")


def test_the_same_mistake_told_by_a_second_host_after_the_end_ends_nothing_twice() -> None:
    story = Story(hosts=2)
    story.join(0)
    story.join(1)
    story.fail_to_start(0, final=True)
    story.all_stopped()
    assert story.fail_to_start(1, final=True) == []
    assert story.all_stopped() == []
    assert len(story.of(FinishJob)) == 1


def test_a_start_that_may_work_later_is_tried_again() -> None:
    story = Story(at_once())
    story.join()
    verdict, stop = story.fail_to_start(final=False, reason="shared memory is full")
    assert verdict.verdict.trouble is Trouble.START_FAILED
    assert verdict.verdict.reason == "shared memory is full."
    assert isinstance(stop, StopWorkers)
    assert isinstance(story.stopped()[0], StartWorkers)


def test_the_loss_of_the_store_restarts_the_job() -> None:
    story = Story().begin()
    verdict, _stop = story.lose_store()
    assert verdict.verdict.trouble is Trouble.STORE_LOST
    assert verdict.verdict.hosts == ("h0",)
    assert isinstance(story.stopped()[0], StartWorkers)
    story.exit(0, -9)
    story.evidence()
    assert story.lose_store() == []  # it goes down with everything else


# --- being asked to stop, in every state


def test_asked_to_stop_while_waiting_for_hosts_the_job_ends_at_once() -> None:
    story = Story(hosts=2)
    story.join(0)
    (end,) = story.ask_to_stop("SIGINT")
    assert (end.exit_code, end.summary) == (ExitCode.PREEMPTED, "stopped by SIGINT after step 0")
    assert story.join(1) == []


def test_asked_to_stop_while_running_the_workers_get_the_long_grace() -> None:
    story = Story(RecoveryConfig(stop_grace_s=30.0)).begin()
    (stop,) = story.ask_to_stop()
    assert (stop.grace_s, stop.kill_ranks) == (30.0, ())
    assert story.exit(0, -15) == []
    (end,) = story.stopped()
    assert (end.exit_code, end.rung) == (ExitCode.PREEMPTED, Rung.GIVE_BACK)
    assert end.summary == "stopped by SIGTERM after step 4"


def test_asked_to_stop_while_a_death_is_being_judged_no_new_attempt_follows() -> None:
    story = Story().begin()
    story.exit(1, -9)
    assert isinstance(story.ask_to_stop()[0], StopWorkers)
    assert story.evidence() == []
    assert story.stopped()[0].exit_code is ExitCode.PREEMPTED


def test_asked_to_stop_while_stopping_no_new_attempt_follows() -> None:
    story = Story().begin()
    story.exit(1, -9)
    story.evidence()
    assert story.ask_to_stop() == []
    assert story.stopped()[0].exit_code is ExitCode.PREEMPTED


def test_asked_to_stop_when_all_has_ended_well_the_job_is_done_all_the_same() -> None:
    story = Story().begin()
    story.finish_well()
    assert story.ask_to_stop() == []
    assert story.stopped()[0].exit_code is ExitCode.DONE


def test_asked_to_stop_when_a_bug_ends_the_job_the_bug_is_still_told() -> None:
    story = Story(at_once(restart_count_max=0)).begin()
    story.exit(0, 1, **SCRIPT_ERROR, traceback="Traceback: mine")
    story.evidence()
    story.ask_to_stop()
    (end,) = story.stopped()
    assert (end.exit_code, end.detail) == (ExitCode.SCRIPT_BUG, "Traceback: mine")


def test_asked_to_stop_during_a_backoff_the_job_ends_at_once() -> None:
    story = Story(RecoveryConfig(restarts=RestartConfig(backoff_s=(60.0,)))).begin()
    assert story.die() == []
    (end,) = story.ask_to_stop()
    assert end.exit_code is ExitCode.PREEMPTED
    assert story.tick(100.0) == []


def test_asked_to_stop_after_the_end_nothing_follows() -> None:
    story = Story().begin()
    story.finish_well()
    story.stopped()
    assert story.ask_to_stop() == []


def test_asked_twice_the_workers_are_stopped_once() -> None:
    story = Story().begin()
    story.ask_to_stop()
    assert story.ask_to_stop() == []
    assert len(story.of(StopWorkers)) == 1


# --- a new coordinator over an old ledger


def test_a_run_is_continued_with_the_next_attempt_once_its_hosts_are_back() -> None:
    story = Story(hosts=2).begin()
    assert story.resume(gap_s=7.0) == []
    assert story.join(0) == []
    (start,) = story.join(1)
    assert (start.attempt, start.restart_count) == (2, 1)
    assert start.why == "the run is continued after 7.0 s without a coordinator"


def test_a_run_that_was_stopped_from_outside_can_be_continued() -> None:
    story = Story().begin()
    story.ask_to_stop()
    story.stopped()
    story.resume()
    assert isinstance(story.join()[0], StartWorkers)
    story.finish_well()
    assert story.stopped()[0].exit_code is ExitCode.DONE


def test_a_continued_run_starts_with_a_fresh_budget_but_remembers_how_far_it_was() -> None:
    story = Story(at_once()).begin()
    story.die(0, 1, **SCRIPT_ERROR)
    story.resume()
    story.join()
    story.run(1, 3)
    assert isinstance(story.die(0, 1, **SCRIPT_ERROR)[0], StartWorkers)
    story.run(1, 4)  # no step that the run had not reached before the coordinator died
    assert story.die(0, 1, **SCRIPT_ERROR)[0].exit_code is ExitCode.SCRIPT_BUG


@pytest.mark.parametrize("moment", ["death", "silence"])
def test_an_inquiry_that_died_with_its_coordinator_asks_for_nothing_more(moment: str) -> None:
    story = Story(hosts=2).begin()
    if moment == "death":
        story.exit(1, -9)
    else:
        story.suspect(0)
        story.suspect(1)
        story.all_evidence()
    story.resume()
    assert story.tick(5.0) == []
    assert story.tick(60.0) == []
    assert not story.job.wants_ticks


def test_replaying_the_events_of_a_whole_story_gives_its_commands_again() -> None:
    story = Story(hosts=2, faults=(fault(1, after_s=0.5), fault(2, step=9))).begin()
    story.steps(5, 12)
    story.tick(1.0)
    story.die(1, -9)
    story.resume()
    story.join(0)
    story.join(1)
    story.suspect(0)
    story.suspect(1)
    story.ask_to_stop()
    story.all_stopped()
    again = Story(hosts=2, faults=(fault(1, after_s=0.5), fault(2, step=9)))
    replayed = [command for event in story.told[1:] for command in again.job.handle(event)]
    assert replayed == story.said


# --- the injector


def test_faults_that_wait_for_a_step_go_to_the_agents_until_they_have_happened() -> None:
    plan = (fault(1, step=10), fault(2, step=20), fault(3, after_s=60.0))
    story = Story(faults=plan)
    (start,) = story.join()
    assert start.faults == plan[:2]
    story.tell(FaultInjected, fault=plan[0], step=10)
    (start,) = story.die()
    assert start.faults == (plan[1],)


def test_a_timed_fault_waits_for_its_time_and_its_steps_and_happens_once() -> None:
    story = Story(RecoveryConfig(steps_before_fault=8), hosts=1, per_host=4, faults=(fault(1, rank=3, after_s=5.0),))
    story.begin()
    assert story.job.wants_ticks
    assert story.tick(10.0) == []  # only four steps so far
    story.steps(5, 8)
    (inject,) = story.tick()
    assert (type(inject), inject.host, inject.fault.rank) == (InjectFault, "h0", 3)
    assert story.tick() == []
    story.die(3, -9)
    story.run(9, 30)
    assert story.tick(100.0) == []


def test_a_timed_fault_goes_to_the_host_of_its_rank_and_lower_numbers_go_first() -> None:
    plan = (fault(2, rank=0, after_s=1.0), fault(1, rank=3, after_s=2.0))
    story = Story(hosts=2, faults=plan).begin()
    story.steps(5, 12)
    first, second = story.tick(10.0) + story.tick()
    assert (first.fault.number, first.host) == (1, "h1")
    assert (second.fault.number, second.host) == (2, "h0")


def test_a_timed_fault_for_a_rank_that_a_smaller_world_no_longer_has_does_not_happen() -> None:
    story = Story(per_host=4, faults=(fault(1, rank=3, after_s=1.0),)).begin()
    story.resume()
    story.tell(HostJoined, host="h0", worker_count=2, address="a")
    story.run(1, 20)
    assert story.tick(10.0) == []
