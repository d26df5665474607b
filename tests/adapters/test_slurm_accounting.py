"""sacct's output as clusters really give it: line breaks in fields, cut-off lines, bytes that are no UTF-8."""

from pathlib import Path

import pytest

from everstep.adapters.slurm_accounting import SlurmJob, parse_sacct, read_sacct
from everstep.domain.errors import ConfigError, EvidenceError

SHARED = (Path(__file__).resolve().parents[2] / "../shared/data/slurm_output").resolve()
needs_samples = pytest.mark.skipif(not SHARED.exists(), reason="the shared Slurm samples are not beside this checkout")
HEAD = "JobID|State|NNodes|ElapsedRaw|Comment|AllocTRES"


def jobs(*lines: str, head: str = HEAD) -> tuple[SlurmJob, ...]:
    return parse_sacct("\n".join([head, *lines]), name="x").jobs


def test_jobs_are_told_and_their_steps_are_not() -> None:
    found = jobs("7|NODE_FAIL|4|60||gres/gpu=32", "7.batch|FAILED|1|60||", "8_3|CANCELLED by 12|2|5||node=2")
    assert found == (
        SlurmJob(job_id="7", state="NODE_FAIL", host_count=4, elapsed_s=60.0, gpu_count=32),
        SlurmJob(job_id="8_3", state="CANCELLED", host_count=2, elapsed_s=5.0, gpu_count=0),
    )


@pytest.mark.parametrize("delimiter", ["|", "|#", "\t"])
def test_any_usual_delimiter_is_taken(delimiter: str) -> None:
    lines = (line.replace("|", delimiter) for line in ("1|FAILED|2|3|a|", ""))
    assert jobs(*lines, head=HEAD.replace("|", delimiter))[0].state == "FAILED"


def test_a_field_with_line_breaks_is_put_together() -> None:
    found = parse_sacct(f"{HEAD}\n1|FAILED|2|3|a\n\nb|\n2|COMPLETED|2|3||\n", name="x")
    assert [job.job_id for job in found.jobs] == ["1", "2"]
    assert (found.joined_count, found.broken_count) == (1, 0)


def test_a_cut_off_line_costs_itself_and_no_other() -> None:
    found = parse_sacct(f"{HEAD}\n1|FAILED|2\n2|COMPLETED|2|3||\n3|RUN", name="x")
    assert [job.job_id for job in found.jobs] == ["2"]
    assert found.broken_count == 2


def test_a_line_with_too_much_or_with_nonsense_is_counted() -> None:
    lines = "1|FAILED|2|3||||\nabc|FAILED|1|2||\n4|???|1|2||\n5|FAILED|many|2||\n6|FAILED|1|soon||\n7|FAILED|1|2||\n"
    found = parse_sacct(f"{HEAD}\n{lines}", name="x")
    assert [job.job_id for job in found.jobs] == ["7"]
    assert found.broken_count == 5


@pytest.mark.parametrize(
    ("written", "seconds"), [("2-03:41:40", 186_100), ("00:01:39", 99), ("01:39", 99), ("00:01.500", 1), ("", 0)]
)
def test_elapsed_time_is_read_in_every_form(written: str, seconds: float) -> None:
    (job,) = jobs(f"1|FAILED|2|{written}", head="JobID|State|AllocNodes|Elapsed")
    assert job.elapsed_s == seconds
    assert job.gpu_count is None


def test_gpus_are_read_with_and_without_their_type() -> None:
    found = jobs("1|FAILED|1|2||cpu=1,gres/gpu:h100=8", "2|FAILED|1|2||gres/gpu=4,gres/gpu:h100=4")
    assert [job.gpu_count for job in found] == [8, 4]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ("is not sacct's output with a header",)),
        ("hello\n", ("is not sacct's output with a header",)),
        ("a|b\n1|2\n", ("is not sacct's output with a header",)),
        ("JobID|NNodes|Elapsed\n", ("no column State",)),
        ("JobID|State|Elapsed\n", ("no column AllocNodes or NNodes", "sacct -P")),
        ("JobID|State|NNodes\n", ("no column ElapsedRaw or Elapsed",)),
    ],
)
def test_what_is_no_such_output_is_one_sentence(text: str, words: tuple[str, ...]) -> None:
    with pytest.raises(EvidenceError) as caught:
        parse_sacct(text, name="file.txt")
    assert str(caught.value).startswith("file.txt")
    for word in words:
        assert word in str(caught.value)


def test_a_missing_file_is_the_users(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_sacct(tmp_path / "none.txt")


def test_bytes_that_are_no_utf8_do_not_matter(tmp_path: Path) -> None:
    path = tmp_path / "sacct.txt"
    path.write_bytes(f"{HEAD}\n1|FAILED|2|3|".encode() + b"\xff\xfe|\n")
    assert len(read_sacct(path).jobs) == 1


@needs_samples
@pytest.mark.parametrize("name", ["one-multiline", "multiple-multiline", "fake-line-break"])
def test_a_shared_sample_with_line_breaks_gives_the_jobs_of_its_expected_file(name: str) -> None:
    broken = read_sacct(SHARED / f"sample-sacct-{name}.txt")
    expected = read_sacct(SHARED / f"sample-sacct-{name}-expected.txt")
    assert broken.jobs == expected.jobs
    assert broken.jobs
    assert broken.joined_count >= 1
    assert broken.broken_count == expected.broken_count == 0


@needs_samples
def test_every_shared_sample_is_read_or_refused_in_one_sentence() -> None:
    paths = sorted(SHARED.glob("sample-sacct-*.txt"))
    bare = [path for path in paths if "midnight" in path.name]
    for path in bare:
        with pytest.raises(EvidenceError, match="no column AllocNodes or NNodes"):
            read_sacct(path)
    read = [read_sacct(path) for path in paths if path not in bare]
    assert sum(bool(found.jobs) for found in read) >= 7


@needs_samples
def test_a_shared_sample_with_bad_utf8_and_one_with_a_cut_line_are_told() -> None:
    assert read_sacct(SHARED / "sample-sacct-output-invalid-utf8.txt").jobs[0].state == "FAILED"
    cut = read_sacct(SHARED / "sample-sacct-output-with-invalid-lines.txt")
    assert (cut.jobs, cut.broken_count) == ((), 1)
