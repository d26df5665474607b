"""Real NCCL dumps of Megatron jobs with two injected faults each, where they lie beside the checkout."""

import json
import re
from pathlib import Path

import pytest

import everstep

DATA = Path(__file__).resolve().parents[2].parent / "shared/data/flight_recorder"
FOLDERS = sorted(one for one in DATA.iterdir() if one.is_dir()) if DATA.is_dir() else []


@pytest.mark.skipif(not FOLDERS, reason="the real dumps are not beside this checkout")
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_both_fault_ranks_are_named_and_no_other(folder: Path) -> None:
    truth = re.search(r"Fault ranks: (\[.*?\])", (folder / "fault_injection.log").read_text(encoding="utf-8"))
    assert truth is not None
    verdict = everstep.diagnose(folder)
    assert list(verdict.ranks) == json.loads(truth[1])
    assert verdict.rank_count == 16
    assert verdict.trouble.value == ("gpu_side" if "gpu" in folder.name else "never_entered")


@pytest.mark.skipif(not FOLDERS, reason="the real dumps are not beside this checkout")
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
@pytest.mark.parametrize("lost", range(16))
def test_a_lost_dump_never_makes_an_innocent_rank_guilty(folder: Path, lost: int) -> None:
    truth = set(everstep.diagnose(folder).ranks)
    verdict = everstep.diagnose([one for one in folder.glob("_dump_*") if one.name != f"_dump_{lost}"])
    assert set(verdict.ranks) == truth - {lost}
    assert f"no dump of rank {lost}" in verdict.missing
