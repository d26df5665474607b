"""The small tables that everything else leans on: phases, the published causes, exit codes, whose fault an error is."""

import pytest

from everstep.domain.causes import LLAMA3, LLAMA3_UNEXPECTED_COUNT, FaultKind
from everstep.domain.commands import Rung
from everstep.domain.errors import ConfigError, EverstepError, EvidenceError, ExitCode, WorldError
from everstep.domain.evidence import Frame
from everstep.domain.phases import Phase, phase_of_group


@pytest.mark.parametrize("phase", Phase)
def test_a_group_of_one_is_in_the_phase_of_its_rank(phase: Phase) -> None:
    assert phase_of_group([phase]) is phase
    assert phase_of_group([phase] * 5) is phase


@pytest.mark.parametrize("phase", Phase)
def test_a_rank_that_saves_explains_why_the_others_wait(phase: Phase) -> None:
    assert phase_of_group([phase, Phase.SAVING, phase]) is Phase.SAVING


@pytest.mark.parametrize(
    ("phases", "spoken"),
    [
        ([], Phase.UNOBSERVED),
        ([Phase.TRAINING, Phase.EVALUATING], Phase.EVALUATING),
        ([Phase.TRAINING, Phase.RESTORING, Phase.STARTING], Phase.RESTORING),
        ([Phase.TRAINING, Phase.STARTING], Phase.STARTING),
        ([Phase.TRAINING, Phase.WARMING_UP], Phase.WARMING_UP),
        ([Phase.ENDING, Phase.TRAINING], Phase.TRAINING),
        ([Phase.UNOBSERVED, Phase.ENDING], Phase.ENDING),
    ],
)
def test_the_phase_that_explains_a_wait_speaks_first(phases: list[Phase], spoken: Phase) -> None:
    assert phase_of_group(phases) is spoken
    assert phase_of_group(phases[::-1]) is spoken


def test_the_numbers_of_phases_are_the_format_of_a_page_and_stay() -> None:
    assert {phase.name: int(phase) for phase in Phase} == {
        "UNOBSERVED": 0,
        "STARTING": 1,
        "RESTORING": 2,
        "WARMING_UP": 3,
        "TRAINING": 4,
        "SAVING": 5,
        "EVALUATING": 6,
        "ENDING": 7,
    }


def test_the_published_counts_sum_to_419_and_their_shares_to_one() -> None:
    assert LLAMA3_UNEXPECTED_COUNT == 419
    assert sum(row.share for row in LLAMA3) == pytest.approx(1.0)


def test_shares_come_from_counts_where_the_paper_prints_another_percentage() -> None:
    share = {row.cause.component: row.share for row in LLAMA3}
    assert share["Faulty GPU"] == pytest.approx(0.353, abs=5e-4)
    assert share["GPU HBM3 Memory"] == pytest.approx(0.172, abs=5e-4)
    assert share["Software Bug"] == pytest.approx(0.129, abs=5e-4)
    assert share["Network Switch/Cable"] == pytest.approx(0.084, abs=5e-4)


def test_every_published_cause_stands_once_and_largest_first() -> None:
    causes = [row.cause for row in LLAMA3]
    counts = [row.count for row in LLAMA3]
    assert len(set(causes)) == len(causes) == 18
    assert counts == sorted(counts, reverse=True)


def test_the_published_table_uses_every_kind_of_fault() -> None:
    assert {row.fault for row in LLAMA3} == set(FaultKind)


def test_exit_codes_are_distinct_and_clear_of_the_shells_own() -> None:
    codes = [int(code) for code in ExitCode]
    assert len(ExitCode.__members__) == len(set(codes))  # an alias would be a member without a code of its own
    assert not {1, 2, 255, *range(126, 166)} & set(codes)
    assert all(0 <= code < 256 for code in codes)


def test_errors_say_whose_fault_they_are_by_exit_code() -> None:
    assert ConfigError("x").exit_code is ExitCode.USAGE
    assert EvidenceError("x").exit_code is ExitCode.USAGE
    assert WorldError("x").exit_code is ExitCode.IO_ERROR
    assert all(issubclass(kind, EverstepError) for kind in (ConfigError, EvidenceError, WorldError))
    assert not WorldError("x").retryable
    assert WorldError("the disk", retryable=True).retryable
    assert str(WorldError("the disk", retryable=True)) == "the disk"


def test_the_ladder_climbs_from_the_gentlest_rung() -> None:
    assert min(Rung) is Rung.REPLACE_WORKER
    assert max(Rung) is Rung.ASK_A_PERSON


def test_a_frame_reads_as_file_line_and_function() -> None:
    assert str(Frame(file="train.py", line=7, function="main")) == "train.py:7 in main"
