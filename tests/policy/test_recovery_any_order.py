"""Whatever happens to a job, in whatever order, its machine answers, never runs two attempts at once and ends once."""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.policy.making import SEEN_FROM_OUTSIDE, Story, fault

from everstep.domain.commands import Command, FinishJob, RecordVerdict, StartWorkers, StopWorkers
from everstep.domain.events import Event, RunResumed, Ticked, WorkersStopped
from everstep.domain.phases import Phase
from everstep.policy.recovery import RecoveryConfig
from everstep.policy.restarts import RestartConfig

HOSTS, PER_HOST = 2, 2
PATIENT = RestartConfig(backoff_s=(0.0, 3.0), identical_script_errors_max=50, identical_failures_max=50)
CONFIGS = (
    RecoveryConfig(),
    RecoveryConfig(restarts=PATIENT),
    RecoveryConfig(restarts=RestartConfig(restart_count_max=1)),
    RecoveryConfig(unsure_s=0.0, excused_s=0.0, restarts=PATIENT),
)
HOST, RANK = st.integers(0, HOSTS - 1), st.integers(0, HOSTS * PER_HOST - 1)
HOW = st.sampled_from(
    [
        {"exit_code": 0, "phase": Phase.ENDING},
        {"exit_code": 0},
        {"exit_code": -9},
        {"exit_code": -15},
        {"exit_code": 1, "error_type": "ValueError", "error_message": "boom"},
        {"exit_code": 1, "error_type": "RuntimeError", "error_message": "Connection closed by peer"},
    ]
)
SUMMARIES = st.lists(SEEN_FROM_OUTSIDE, max_size=4)
HAPPENINGS = st.one_of(
    st.tuples(st.just("join"), HOST),
    st.tuples(st.just("run"), st.integers(1, 30), st.integers(0, 12)),
    st.tuples(st.just("exit"), RANK, HOW),
    st.tuples(st.just("evidence"), HOST, SUMMARIES),
    st.tuples(st.just("evidence"), HOST, SUMMARIES),
    st.tuples(st.just("stopped"), HOST),
    st.tuples(st.just("stopped"), HOST),
    st.tuples(st.just("suspect"), HOST, st.sampled_from([1.0, 20.0, 900.0])),
    st.tuples(st.just("moves_again"), HOST),
    st.tuples(st.just("tick"), st.sampled_from([0.0, 0.3, 2.0, 11.0, 400.0])),
    st.tuples(st.just("tick"), st.sampled_from([0.3, 11.0])),
    st.tuples(st.just("fail_to_start"), HOST, st.booleans()),
    st.tuples(st.just("lose_store")),
    st.tuples(st.just("lose"), HOST),
    st.tuples(st.just("ask_to_stop")),
    st.tuples(st.just("resume")),
)
LATE = st.sampled_from([False, False, False, True])


def happen(story: Story, what: tuple[Any, ...], *, late: bool) -> list[Command]:
    """Tell the story one thing; `late` news is about the attempt before."""
    old = {"attempt": story.job.attempt - 1} if late and story.job.attempt else {}
    match what:
        case "run", first, count:
            story.run(first, first + count)
            return []
        case "exit", rank, how:
            return story.exit(rank, how["exit_code"], **{k: v for k, v in how.items() if k != "exit_code"}, **old)
        case "evidence", host, summaries:
            return story.evidence(host, *summaries, **old) if story.asked else []
        case "suspect", host, silence_s:
            return story.suspect(host, silence_s=silence_s, **old)
        case "fail_to_start", host, final:
            return story.fail_to_start(host, final=final)
        case ("stopped" | "moves_again") as name, host:
            return getattr(story, name)(host, **old)  # type: ignore[no-any-return]
        case name, *arguments:
            return getattr(story, name)(*arguments)  # type: ignore[no-any-return]
    raise AssertionError(what)


class Referee:
    """Watches events and commands, and knows which hosts may have living workers."""

    def __init__(self) -> None:
        self.may_live: set[str] = set()
        self.attempt = 0
        self.ends_since_resume = 0

    def sees(self, event: Event, commands: list[Command]) -> None:
        if isinstance(event, RunResumed):
            self.may_live.clear()
            self.ends_since_resume = 0
        if isinstance(event, WorkersStopped) and event.attempt == self.attempt:
            self.may_live.discard(event.host)
        for command in commands:
            match command:
                case StartWorkers():
                    assert not self.may_live, f"attempt {command.attempt} starts while {self.may_live} may still run"
                    assert command.attempt == self.attempt + 1
                    self.attempt = command.attempt
                    self.may_live = {share.host for share in command.shares}
                case FinishJob():
                    self.ends_since_resume += 1
                    assert self.ends_since_resume == 1
                case StopWorkers() | RecordVerdict():
                    assert command.attempt == self.attempt
            assert command.at_s == event.at_s


@given(
    config=st.sampled_from(CONFIGS),
    happenings=st.lists(st.tuples(HAPPENINGS, LATE), min_size=1, max_size=60),
    has_begun=st.booleans(),
    faults=st.sampled_from([(), (fault(1, after_s=0.5), fault(2, step=4))]),
)
@settings(max_examples=350, deadline=None)
def test_whatever_happens_it_answers_and_never_runs_two_attempts_at_once_and_ends_once(
    config: RecoveryConfig, happenings: list[Any], has_begun: bool, faults: tuple[Any, ...]
) -> None:
    story, referee = Story(config, hosts=HOSTS, per_host=PER_HOST, faults=faults), Referee()
    if has_begun:
        story.begin()
    for what, late in happenings:
        happen(story, what, late=late)
    for event, commands in story.answers:
        referee.sees(event, commands)
    if referee.ends_since_resume:
        assert story.job.over


@given(happenings=st.lists(st.tuples(HAPPENINGS, LATE), max_size=40))
@settings(max_examples=80, deadline=None)
def test_whatever_happened_a_new_machine_gives_the_same_commands_from_the_recorded_events(
    happenings: list[Any],
) -> None:
    story = Story(CONFIGS[1], hosts=HOSTS, per_host=PER_HOST).begin()
    for what, late in happenings:
        happen(story, what, late=late)
    recorded = [event for event, commands in story.answers if commands or not isinstance(event, Ticked)]
    again = Story(CONFIGS[1], hosts=HOSTS, per_host=PER_HOST)
    assert [command for event in recorded[1:] for command in again.job.handle(event)] == story.said
