"""A dead rank among lost dumps: named when nothing else can hold it, else the short list of those that may be it."""

import random

import pytest

from bench.diagnose import SHAPES, Traces
from bench.synthetic_jobs import Job, hang, run_to_hang
from everstep.domain.diagnosis import HangVerdict
from everstep.domain.ids import Rank
from everstep.domain.verdicts import Trouble
from everstep.policy.diagnosis import diagnose

SIZE = 64


def dead(seed: int, number: int, *, lost: float = 0.01) -> tuple[Job, HangVerdict]:
    """One of the bench's jobs, by its seed and number; with another share of lost dumps if wanted."""
    rng = random.Random(f"{seed} {SIZE} {number}")
    job = hang(SHAPES[SIZE], "dead", rng)
    if lost != 0.01:
        job.missing = frozenset((*job.truth.ranks, *(r for r in range(SIZE) if rng.random() < lost)))
    traces, memberships = Traces(job).all()
    return job, diagnose(traces, memberships, expected_ranks=[Rank(rank) for rank in range(SIZE)])


def could_be(job: Job) -> set[int]:
    """Every rank without a dump whose death, at some place, leaves exactly these records with the others."""
    done, entered = list(job.done), list(job.entered)
    seen = [rank for rank in range(SIZE) if rank not in job.missing]
    found = set()
    for rank in job.missing:
        for place in range(len(job.program(rank))):
            run_to_hang(job, {rank: place}, None)
            if all((job.done[one], job.entered[one]) == (done[one], entered[one]) for one in seen):
                found.add(rank)
                break
    job.done, job.entered = done, entered
    return found


@pytest.mark.parametrize("number", [1, 116, 331, 382])
def test_a_lost_rank_that_waits_for_the_dead_one_is_not_named_beside_it(number: int) -> None:
    """In 116 it waits for a message that is held up two stages on, in 331 for half of a batch."""
    job, verdict = dead(2, number)
    assert (verdict.trouble, set(verdict.ranks)) == (Trouble.DEAD, set(job.truth.ranks))


@pytest.mark.parametrize(("seed", "number"), [(1, 29), (1, 289), (2, 17), (2, 21)])
def test_what_the_records_cannot_tell_is_a_list_of_those_that_it_may_be(seed: int, number: int) -> None:
    job, verdict = dead(seed, number)
    assert (verdict.trouble, verdict.ranks) == (Trouble.UNKNOWN, ())
    assert set(verdict.suspects) == could_be(job) > job.truth.ranks
    assert "their records do not tell which" in verdict.reason


@pytest.mark.parametrize("lost", [0.01, 0.05, 0.15])
def test_no_innocent_is_named_and_the_dead_one_is_among_those_told(lost: float) -> None:
    for number in range(40):
        job, verdict = dead(7, number, lost=lost)
        assert set(verdict.ranks) <= job.truth.ranks, number
        assert job.truth.ranks <= {*verdict.ranks, *verdict.suspects}, number


def test_all_ranks_of_a_dead_host_are_named() -> None:
    job = hang(SHAPES[SIZE], "never", random.Random("host"))
    host = range(16, 24)
    run_to_hang(job, dict.fromkeys(host, 5), None)
    job.missing = frozenset(host)
    traces, memberships = Traces(job).all()
    verdict = diagnose(traces, memberships, expected_ranks=[Rank(rank) for rank in range(SIZE)])
    assert (verdict.trouble, set(verdict.ranks)) == (Trouble.DEAD, set(host))
