"""What hosts say to each other survives the way, and whatever else comes is refused in words."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.adapters.hosts.host_messages import (
    Hello,
    Ping,
    Pong,
    Posted,
    Ready,
    Refusal,
    Welcome,
    Word,
    frame_of,
    message_of,
)
from everstep.domain.commands import FinishJob, StopWorkers
from everstep.domain.errors import EvidenceError, ExitCode
from everstep.domain.events import HostJoined, StepsFinished
from everstep.domain.ids import Attempt, HostId, Rank

MESSAGES = (
    Hello(host="ü", instance="i", everstep="1", nnodes="2:3", program=("-m", "a"), rdzv_id="", node_rank=0),
    Welcome(run="r"),
    Refusal(reason="no", final=True),
    Ping(),
    Pong(now_s=1.25),
    Ready(),
    Posted(key="store/1", value=bytes(range(256))),
    HostJoined(at_s=1.0, host=HostId("h"), worker_count=8, address="::1", place=3),
    StepsFinished(at_s=1.0, attempt=Attempt(2), host=HostId("h"), first_step=1, ended_at_s=(0.1, 0.2), loss=0.5),
    StopWorkers(at_s=1.0, attempt=Attempt(2), host=HostId("h"), kill_ranks=(Rank(1),), grace_s=3.0),
    FinishJob(at_s=1.0, exit_code=ExitCode.DONE, rung=None, summary="s"),
)
NESTED = b"[" * 100_000 + b"]" * 100_000


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_arrives_as_it_was_sent(message: Word) -> None:
    assert message_of(frame_of(message)) == message


@given(content=st.one_of(st.binary(max_size=200), st.sampled_from(MESSAGES).map(frame_of)), at=st.data())
@settings(max_examples=300, deadline=None)
def test_any_bytes_and_any_damaged_message_are_understood_or_refused_in_one_sentence(
    content: bytes, at: st.DataObject
) -> None:
    damaged = bytearray(content)
    for _ in range(at.draw(st.integers(0, 3)) if damaged else 0):
        damaged[at.draw(st.integers(0, len(damaged) - 1))] = at.draw(st.integers(0, 255))
    told = ""
    try:
        message_of(bytes(damaged))
    except EvidenceError as error:
        told = str(error)
    assert "\n" not in told


@pytest.mark.parametrize(
    "frame",
    [
        b'C{"type":"Ping","x":' + NESTED + b"}",
        b'E{"v":1,"n":0,"at_s":0,"wall":"","type":"StopRequested","body":{"x":' + NESTED + b"}}",
    ],
)
def test_a_message_that_is_nested_too_deeply_is_refused(frame: bytes) -> None:
    with pytest.raises(EvidenceError, match="nested too deeply"):
        message_of(frame)
