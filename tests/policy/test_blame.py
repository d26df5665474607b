"""Blame goes to the rank that failed by itself, whatever the order in which the ends are seen."""

from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.policy.making import LOST_PEER, ended

from everstep.domain.events import WorkerExited
from everstep.domain.phases import Phase
from everstep.domain.verdicts import Trouble
from everstep.policy.blame import Blame, blame, is_victim

OWN_ERROR = {"error_type": "ValueError", "error_message": "boom", "error_where": "train.py:3 in main"}
GLOO_ABORT = "terminate called after throwing an instance of 'gloo::EnforceNotMet'\n  what(): Connection closed by peer"


def judged(*exits: WorkerExited, world_size: int = 4) -> Blame:
    found = blame(exits, world_size=world_size)
    assert found is not None
    return found


def test_ends_that_are_well_are_nobodys_fault() -> None:
    assert blame([], world_size=2) is None
    assert blame([ended(0, 0, phase=Phase.ENDING)], world_size=2) is None
    assert blame([ended(rank, 0, phase=Phase.ENDING) for rank in range(2)], world_size=2) is None


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_a_killed_rank_is_blamed_and_not_those_that_lost_it(order: tuple[int, ...]) -> None:
    ends = [ended(0, 1, **LOST_PEER), ended(1, 1, **LOST_PEER), ended(2, -9)]
    found = judged(*(ends[index] for index in order))
    assert found.verdict.ranks == (2,)
    assert found.certain
    assert found.verdict.evidence[0] == "the kernel reports SIGKILL for pid 102"
    assert "ranks 0-1 ended after it" in found.verdict.evidence[1]


def test_an_error_of_its_own_outdoes_earlier_ends_of_those_that_lost_a_peer() -> None:
    victims = [ended(rank, 1, at_s=1.0, **LOST_PEER) for rank in range(3)]
    assert not judged(*victims).certain
    found = judged(*victims, ended(3, 1, at_s=2.0, **OWN_ERROR))
    assert (found.verdict.trouble, found.verdict.ranks) == (Trouble.SCRIPT_ERROR, (3,))
    assert found.verdict.where == "train.py:3 in main"
    assert found.verdict.reason == "rank 3 on h0 raised ValueError: boom after step 40, at train.py:3 in main."


def test_of_several_errors_the_one_that_was_raised_first_is_blamed_not_the_one_that_was_seen_first() -> None:
    late = ended(0, 1, at_s=5.0, error_at_s=4.9, **OWN_ERROR)
    early = ended(1, 1, at_s=9.0, error_at_s=2.0, **OWN_ERROR)
    assert judged(late, early).verdict.ranks == (1,)


def test_an_end_without_a_record_counts_from_when_it_was_seen() -> None:
    assert judged(ended(0, 3, at_s=5.0), ended(1, 1, at_s=9.0, error_at_s=6.0, **OWN_ERROR)).verdict.ranks == (0,)


@pytest.mark.parametrize(
    ("end", "component", "words"),
    [
        (ended(1, -9), "Killed Process", "was killed by SIGKILL after step 40 (pid 101)"),
        (ended(1, -9, oom_killed=True), "System Memory", "was killed by the kernel for want of memory after step 40"),
        (ended(1, -11), "Crash in Native Code", "crashed with SIGSEGV after step 40"),
        (ended(1, -7, step=0), "Crash in Native Code", "crashed with SIGBUS before its first step"),
        (ended(1, -6, last_lines="free(): invalid pointer"), "Crash in Native Code", "crashed with SIGABRT"),
        (ended(1, -15), "Host Maintenance", "was asked to stop (SIGTERM) from outside after step 40"),
    ],
)
def test_a_signal_is_put_into_words(end: WorkerExited, component: str, words: str) -> None:
    found = judged(end)
    assert found.verdict.trouble is Trouble.DEAD
    assert found.verdict.cause.component == component
    assert found.verdict.reason.startswith(f"rank 1 on h0 {words}")
    assert found.planned == (component == "Host Maintenance")


def test_a_rank_that_gloo_aborted_for_a_lost_peer_is_a_victim() -> None:
    aborted = ended(0, -6, at_s=1.0, last_lines=GLOO_ABORT)
    assert is_victim(aborted)
    assert judged(aborted, ended(2, -9, at_s=2.0)).verdict.ranks == (2,)
    assert judged(aborted).verdict.ranks == ()


@pytest.mark.parametrize(
    "message",
    [
        "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:5",
        "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error: Connection reset by peer",
        "NCCL communicator was aborted on rank 3.",
        "NCCL error: remote process exited or there was a network error",
        "[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv",
        "TCPStore: failed to recv, got 0 bytes: Failed to recv",
        "Watchdog caught collective operation timeout: ran for 600000 milliseconds",
    ],
)
def test_words_that_tell_of_a_lost_peer(message: str) -> None:
    assert is_victim(ended(0, 1, error_type="RuntimeError", error_message=message))


@pytest.mark.parametrize("message", ["[Errno 111] Connection refused: data.example:80", "[Errno 32] Broken pipe"])
def test_a_script_that_loses_a_server_of_its_own_is_no_victim(message: str) -> None:
    assert not is_victim(ended(0, 1, error_type="ConnectionError", error_message=message))


def test_a_crash_in_the_teardown_after_an_exception_is_the_exceptions_fault() -> None:
    found = blame([ended(1, -11, error_type="ValueError", error_message="wrong label")], world_size=4)
    assert found is not None
    assert found.verdict.trouble is Trouble.SCRIPT_ERROR


@pytest.mark.parametrize("message", ["shape mismatch", "CUDA out of memory", "loss is nan", ""])
def test_words_that_do_not(message: str) -> None:
    assert not is_victim(ended(0, 1, error_type="RuntimeError", error_message=message))


@pytest.mark.parametrize("message", ["[Errno 28] No space left on device: '/x'", "[Errno 122] Disk quota exceeded"])
def test_a_full_disk_is_said_to_be_one_and_what_to_do(message: str) -> None:
    found = judged(ended(0, 1, error_type="OSError", error_message=message, error_where="train.py:9 in save"))
    assert found.verdict.trouble is Trouble.DISK_FULL
    assert found.verdict.cause.component == "Disk Full"
    assert found.verdict.reason.endswith(
        "The disk is full: free some space, or write to another with --log-dir and --run-dir."
    )


def test_a_script_that_ends_with_a_code_of_its_own_is_in_error() -> None:
    found = judged(ended(1, 3))
    assert found.verdict.trouble is Trouble.SCRIPT_ERROR
    assert found.verdict.reason == "rank 1 on h0 ended with exit code 3 after step 40."


def test_a_rank_that_left_silently_is_suspected_until_the_others_show_what_they_do() -> None:
    found = judged(ended(0, 0))
    assert (found.verdict.trouble, found.verdict.ranks, found.certain) == (Trouble.DEAD, (0,), False)
    assert "left silently with exit code 0 after step 40" in found.verdict.reason
    assert judged(ended(0, 0), ended(1, 1, **LOST_PEER)).certain
    assert blame([ended(rank, 0) for rank in range(4)], world_size=4) is None


def test_a_rank_that_left_after_its_script_had_returned_is_not_blamed_for_those_that_lost_it() -> None:
    found = judged(ended(0, 0, phase=Phase.ENDING), ended(1, 1, **LOST_PEER), world_size=2)
    assert found.verdict.ranks == ()
    assert found.verdict.trouble is Trouble.LOST_CONNECTION
    assert "the ranks disagree on how long to train" in found.verdict.reason
    assert "; rank 0 had ended with exit code 0 by then" in found.verdict.reason
    assert found.certain


def test_when_only_victims_have_ended_nobody_is_blamed_and_the_first_speaks_for_all() -> None:
    found = judged(ended(1, 1, at_s=3.0, **LOST_PEER), ended(0, 1, at_s=2.0, **LOST_PEER), world_size=3)
    assert (found.verdict.ranks, found.verdict.hosts, found.certain) == ((), (), False)
    assert found.culprit.rank == 0
    assert "no rank shows a failure of its own" in found.verdict.reason
    assert judged(*(ended(rank, 1, **LOST_PEER) for rank in range(3)), world_size=3).certain


def test_the_same_failure_has_the_same_signature_whatever_the_step_pid_and_time() -> None:
    for first, second in (
        (ended(1, -9), ended(1, -9, step=900, pid=7, at_s=99.0)),
        (ended(1, 1, **OWN_ERROR), ended(0, 1, step=900, **OWN_ERROR)),
        (ended(1, 0), ended(1, 0, step=3)),
    ):
        assert judged(first).verdict.signature == judged(second).verdict.signature
    different = {judged(ended(rank, code)).verdict.signature for rank in (0, 1) for code in (-9, -11, 0)}
    assert len(different) == 6


def test_a_message_of_many_lines_gives_its_first_one_to_the_sentence() -> None:
    found = judged(ended(0, 1, error_type="ValueError", error_message="first\nsecond" + "x" * 5000))
    assert "raised ValueError: first after step 40" in found.verdict.reason
    assert "second" not in found.verdict.reason


ENDS = st.builds(
    ended,
    st.integers(0, 5),
    st.sampled_from([0, 0, 1, 3, -6, -9, -11, -15]),
    at_s=st.integers(0, 9).map(float),
    phase=st.sampled_from(Phase),
    error_type=st.sampled_from(["", "", "ValueError"]),
    error_message=st.sampled_from(["", "Connection closed by peer", "boom"]),
    error_at_s=st.none() | st.integers(0, 9).map(float),
    last_lines=st.sampled_from(["", GLOO_ABORT]),
)


@given(exits=st.lists(ENDS, max_size=6, unique_by=lambda end: end.rank))
def test_a_victim_is_never_blamed_and_the_order_of_seeing_does_not_matter(exits: list[WorkerExited]) -> None:
    found = blame(exits, world_size=6)
    assert (found is None) == all(
        end.exit_code == 0 and (end.phase is Phase.ENDING or len(exits) == 6) for end in exits
    )
    if found is None:
        return
    assert not {end.rank for end in exits if end.exit_code != 0 and is_victim(end)} & set(found.verdict.ranks)
    times = [end.at_s if end.error_at_s is None else end.error_at_s for end in exits]
    if len(set(times)) == len(times):
        backwards = blame(exits[::-1], world_size=6)
        assert backwards is not None
        assert backwards.verdict.ranks == found.verdict.ranks
