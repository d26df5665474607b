"""The benchmark's event log: which lives count as recovered, and parts that sum to the whole."""

import json

from bench.event_log import EventLog, parts_of_recovery, recovery_s


def line(t: float, event: str, pid: int, rank: int, **fields: object) -> str:
    return json.dumps({"t": t, "event": event, "pid": pid, "rank": rank, **fields})


def life(pid: int, rank: int, began_s: float, first_step_s: float | None) -> list[str]:
    lines = [
        line(began_s + seconds, event, pid, rank)
        for seconds, event in ((0.0, "proc_start"), (0.1, "imported"), (0.2, "pg_ready"), (0.3, "restored"))
    ]
    return lines if first_step_s is None else [*lines, line(first_step_s, "step", pid, rank, step=41)]


def test_a_recovery_needs_a_new_step_of_every_rank() -> None:
    log = EventLog()
    log.take([*life(1, 0, 0.0, 1.0), *life(2, 1, 0.0, 1.0), *life(3, 0, 5.0, 6.0), *life(4, 1, 5.0, None)])
    assert log.recovered(2, since_s=4.0) is None
    log.take([line(6.5, "step", 4, 1, step=41)])
    lives = log.recovered(2, since_s=4.0)
    assert lives is not None
    assert {rank: found.pid for rank, found in lives.items()} == {0: 3, 1: 4}
    assert recovery_s(lives, 4.0) == 2.5


def test_an_attempt_that_never_stepped_is_passed_over() -> None:
    log = EventLog()
    log.take([*life(3, 0, 5.0, None), *life(4, 0, 7.0, 8.0)])
    lives = log.recovered(1, since_s=4.0)
    assert lives is not None
    assert lives[0].pid == 4


def test_the_parts_of_a_recovery_sum_to_it_even_when_one_is_unseen() -> None:
    log = EventLog()
    log.take([*life(3, 0, 5.0, 6.0), *life(4, 1, 5.2, 6.0)])
    lives = log.recovered(2, since_s=4.0)
    assert lives is not None
    for detected_s in (4.1, None):
        parts = parts_of_recovery(lives, 4.0, detected_s=detected_s, gone_s=4.4)
        assert round(sum(value for value in parts.values() if value is not None), 3) == 2.0
    assert parts["detect"] is None
    assert parts["spawn"] == 0.8


def test_steps_are_counted_on_the_newest_life_of_each_rank() -> None:
    log = EventLog()
    log.take([*life(1, 0, 0.0, 1.0), *life(2, 0, 5.0, None)])
    assert not log.have_stepped(1, 1)
    assert not log.have_stepped(2, 0)
    log.take([line(6.0, "step", 2, 0, step=1)])
    assert log.have_stepped(1, 1)
