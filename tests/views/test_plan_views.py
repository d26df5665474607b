"""How a plan's figures are told: amounts with few digits, ranges with one unit, round ticks, lines in their plot."""

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.planning import Plan, evaluate, preset_plan
from everstep.planning.plan import Figure
from everstep.views.plan_html import plan_html
from everstep.views.plan_text import amount, compare_lines, headlines, plan_lines, range_of, title
from everstep.views.svg_plot import Axis, Line, Mark, plot, ticks


@pytest.mark.parametrize(
    ("value", "unit", "told"),
    [
        (11_135.0, "s", "3.09 h"),
        (1_001.2, "s", "16.7 min"),
        (600.0, "s", "10 min"),
        (60.0, "s", "60 s"),
        (0.0, "s", "0 s"),
        (0.25, "s", "250 ms"),
        (400_000.0, "s", "4.63 days"),
        (math.inf, "s", "never"),
        (math.inf, "per day", "∞"),
        (0.9029, "share", "90.3 %"),
        (0.99999, "share", "99.999 %"),
        (0.9997, "share", "99.97 %"),
        (3.79e25, "FLOP", "3.79e25 FLOP"),
        (4e14, "FLOP/s", "400 TFLOP/s"),
        (11_468_800.0, "W", "11.5 MW"),
        (1.537e14, "J", "42.7 GWh"),
        (5.67e12, "bytes", "5.67 TB"),
        (2e12, "bytes/s", "2 TB/s"),
        (405e9, "parameters", "405B"),
        (16_384, "count", "16,384"),
        (27, "hosts", "27 hosts"),
        (2_061_375.0, "GPU-hours", "2.06M GPU-hours"),
        (1.2, "", "1.2"),
    ],
)
def test_an_amount_has_about_three_digits_and_its_unit(value: float, unit: str, told: str) -> None:
    assert amount(value, unit) == told


def test_a_range_has_its_unit_once() -> None:
    report = evaluate(preset_plan("llama3-405b"))
    assert range_of(report.figure("mtbf_s")) == "(2.81 to 3.41 h)"
    assert range_of(report.figure("effective_share")) == "(89.6 to 90.9 %)"
    assert range_of(report.figure("failures_per_1000_host_days")) == "(3.43 to 4.17)"
    assert range_of(report.figure("host_count")) == ""
    figure = report.figure("mtbf_s")
    mixed = Figure(entry=figure.entry, value=5_000, low=60.0, high=math.inf, assumed=frozenset())
    assert range_of(mixed) == "(60 s to never)"


def test_the_headline_says_what_would_buy_most_and_when_nothing_would() -> None:
    assert "Half the failures would buy most: +3.6 points" in headlines(evaluate(preset_plan("llama3-405b")))[1]
    late = evaluate(Plan(gpu_count=16_384, checkpoint_pause_s=10.0, checkpoint_interval_s=40_000.0))
    assert "The best interval would buy most" in headlines(late)[1]
    hopeless = evaluate(Plan(gpu_count=1, mtbf_s=0.001))
    assert "No single one of these would buy much" in headlines(hopeless)[1]
    assert title(hopeless) == "plan: 1 GPU on 1 host, 30 days"


def test_every_mark_beside_a_figure_is_explained_below() -> None:
    lines = plan_lines(evaluate(Plan(gpu_count=1_024, parameter_count=7e9, token_count=1e12)))
    inputs = lines[lines.index("Inputs (a letter: assumed, since nobody said it)") :]
    explained = {match[1] for line in inputs if (match := re.match(r"  (\w)  \w+ ", line))}
    used = {mark for line in lines for mark in "".join(re.findall(r"(?<=  )([a-zA-Z]{1,20})(?=  )", line))}
    assert len(explained) > 15
    assert used <= explained


def test_two_equal_plans_differ_in_nothing() -> None:
    report = evaluate(preset_plan("xai-100k"))
    assert compare_lines(report, report) == [title(report), title(report)]


def test_what_a_plan_is_called_cannot_break_its_page() -> None:
    page = plan_html(evaluate(Plan(gpu_count=8, name="<script>alert(1)</script>")))
    assert "<script>" not in page
    assert "&lt;script&gt;" in page


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6))
def test_ticks_are_round_few_and_inside(low: float, span: float) -> None:
    axis = Axis(name="x", low=low, high=low + span, text=str)
    found = ticks(axis)
    assert len(found) <= 8
    assert all(axis.low - span * 1e-6 <= tick <= axis.high + span * 1e-6 for tick in found)


def test_a_logarithmic_axis_has_decades_or_the_ticks_that_it_is_given() -> None:
    axis = Axis(name="x", low=1.0, high=1_000.0, text=str, is_logarithmic=True)
    assert ticks(axis) == [1, 10, 100, 1_000]
    assert axis.place(31.6227766) == pytest.approx(0.5)
    chosen = Axis(name="x", low=1.0, high=50.0, text=str, is_logarithmic=True, ticks=(2.0, 40.0, 100.0))
    assert ticks(chosen) == [2.0, 40.0]


def test_a_line_stays_inside_its_plot_and_what_is_not_finite_is_left_out() -> None:
    axis = Axis(name="x", low=0.0, high=1.0, text=str)
    line = Line(name="a & b", points=[(0.0, -5.0), (0.5, math.nan), (1.0, 9.0)])
    drawn = plot("title", x=axis, y=axis, lines=[line], marks=[Mark(name="here", x=0.9), Mark(name="away", x=2.0)])
    points = re.search(r'<polyline class="line line-0" points="([^"]+)"', drawn)
    assert points is not None
    assert points[1] == "64.0,308.0 690.0,16.0"
    assert "a &amp; b" in drawn
    assert "here" in drawn
    assert "away" not in drawn
