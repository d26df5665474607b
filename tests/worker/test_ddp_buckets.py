"""DDP that was given recorded buckets sums from its first iteration on as the other did; else nothing has changed."""

import json
from typing import Any

import pytest

WAYS = (
    "plain", "several buckets", "gradients in buckets", "static graph", "a hook of the script", "a hook that compresses"
)  # fmt: skip


@pytest.fixture(scope="module")
def told(launcher: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("buckets")
    launcher.ask({"start": {"module": "buckets", "world": 3, "out": str(folder / "told")}})
    codes = launcher.ask({"wait": True})
    errors = "".join(path.read_text() for path in folder.glob("told.err.*"))
    assert codes == [0, 0, 0], errors
    return {**json.loads((folder / "told").read_text()), "errors": errors}


@pytest.mark.parametrize("way", WAYS)
def test_the_first_gradients_are_bit_for_bit_those_of_every_later_iteration_with(way: str, told: Any) -> None:
    assert told[way] == {
        "untold": "",
        "settled": True,
        "first is as later": True,
        "later is as later": True,
        "without it is not": True,
        "told": True,
    }


def test_a_record_that_does_not_fit_on_every_rank_is_given_to_none(told: Any) -> None:
    assert not any(told["refusals"].values()), told["refusals"]


def test_a_record_that_ddp_itself_refuses_is_told_and_leaves_it_as_it_was(told: Any) -> None:
    assert told["errors"].count("DDP does not take the buckets of the checkpoint") == 3
    assert not told["refusals"]["lost its own afterwards"]


def test_a_model_has_a_record_only_where_no_other_may_be_wrapped_as_well(told: Any) -> None:
    assert told["records"] == [True, False, False]
