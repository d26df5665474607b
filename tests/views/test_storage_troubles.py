"""The report says from when to when nothing became durable, on disk and in the mirror, and why."""

from everstep.domain.events import CheckpointDelayed, CheckpointFailed, CheckpointMirrored, CheckpointSaved
from everstep.domain.ids import Attempt
from everstep.views.report_text import storage_lines
from everstep.views.storage_troubles import StorageLog

ONE = Attempt(1)


def saved(at_s: float, step: int) -> CheckpointSaved:
    return CheckpointSaved(at_s=at_s, attempt=ONE, step=step, path="checkpoints/x", size_bytes=1, duration_s=0.1)


def delayed(at_s: float, attempt: int, waited_s: float, reason: str) -> CheckpointDelayed:
    return CheckpointDelayed(at_s=at_s, attempt=Attempt(attempt), step=20, waited_s=waited_s, reason=reason)


def test_a_trouble_lasts_from_its_first_word_to_the_next_durable_step_in_the_same_place() -> None:
    log = StorageLog()
    mirrored = CheckpointMirrored(at_s=90.0, attempt=Attempt(0), step=30, url="s3://b", size_bytes=1, duration_s=1.0)
    for body in (
        saved(10.0, 10),
        delayed(30.0, 1, 10.0, "the disk has not answered for 10 s"),
        delayed(40.0, 0, 5.0, "503"),
        CheckpointFailed(at_s=50.0, attempt=ONE, step=25, reason="No space left on device"),
        saved(70.0, 30),
        saved(80.0, 40),
        mirrored,
        CheckpointFailed(at_s=95.0, attempt=ONE, step=50, reason="Input/output error"),
    ):
        log.handle(body)
    assert storage_lines(log.troubles()) == [
        "",
        "Checkpoints that were late",
        "  on disk from 20.0 s for 50.0 s, since step 20: No space left on device",
        "  in the mirror from 35.0 s for 55.0 s, since step 20: 503",
        "  on disk from 1 min 35 s to the end, since step 50: Input/output error",
    ]
    assert storage_lines(()) == []
