"""The benchmark's figures: a bar is met or says by how much it was missed, and no failure is dropped."""

from bench.figures import Bar, bar_json, left_behind_notes, median, spread, table


def test_a_bar_says_by_how_much_it_was_missed() -> None:
    assert Bar(name="a", value=2.0, unit="s", limit=2.0).verdict == "met"
    assert Bar(name="a", value=2.5, unit="s", limit=2.0).verdict == "MISSED by 0.5 s"
    assert Bar(name="a", value=5.0, unit="×", limit=6.0, at_least=True).verdict == "MISSED by 1 ×"


def test_a_bar_without_a_value_is_missed() -> None:
    bar = Bar(name="a", value=None, unit="s", limit=2.0)
    assert not bar.is_met
    assert bar_json(bar)["verdict"] == "MISSED: nothing measured"


def test_a_spread_shows_the_failures_too() -> None:
    assert spread([1.0, 3.0, 2.0], failed=2) == "median 2 [1–3] n=3, 2 failed"
    assert spread([], failed=1) == "n=0, 1 failed"
    assert median([]) is None


def test_the_table_has_a_line_for_each_bar() -> None:
    bars = [Bar(name="a", value=1.0, unit="s", limit=2.0), Bar(name="long_name", value=None, unit="s", limit=2.0)]
    header, first, second = table(bars).splitlines()
    assert header.index("target") == first.index("≤") == second.index("≤")


def test_processes_left_behind_are_told_and_none_are_not() -> None:
    assert left_behind_notes("x", [{"left_behind": 0}, {}]) == []
    assert "2 processes" in left_behind_notes("x", [{"left_behind": 2}])[0]
