"""A simulation as plain text and as JSON: one table, one plot, the causes, and where each delay comes from."""

from collections.abc import Sequence
from dataclasses import asdict

from everstep.policy.accounting import Category
from everstep.sim.montecarlo import CauseRow, Estimate, Summary, cause_table

_BAR_CELLS = 40
_LABEL_CHARACTERS_MAX = 44
HEAD = ("scenario", "effective", "exact formula", "has its hosts", "unexpected", "planned", "lost each", "replaced")
NOTE = "Everything here is simulated. Effective: productive ÷ elapsed, as `everstep report` accounts for it."


def simulation_lines(rows: Sequence[Summary]) -> list[str]:
    """The whole output."""
    first = rows[0]
    seeds = "1 seed" if first.seed_count == 1 else f"{first.seed_count} seeds, ± is the 95 % interval of the mean"
    one = first.scenario
    shape = f"{one.gpus:,} GPUs on {one.host_count:,} hosts and {one.spares:,} spares"
    lines = [
        f"Simulated: {shape} for {one.days:.4g} days ({seeds})",
        "",
        *table_lines([HEAD, *(table_row(row) for row in rows)]),
        "",
        *_plot(rows),
        "",
        *_cause_lines(cause_table(first.outcomes), first),
        "",
        *_power_lines(first),
        "",
        "Where the delays come from (R of the exact formula is their sum, with silences in their share):",
    ]
    for row in _different_delays(rows):
        lines += [f"  {row.label}: R = {row.scenario.restart_mean_s:.0f} s", *_delay_lines(row)]
    ended = [row for row in rows if row.ended_early_count]
    for row in ended:
        lines.append(
            f"{row.label}: in {row.ended_early_count} of {row.seed_count} runs the policy gave the job up early: "
            f"{next(o.summary for o in row.outcomes if o.ended_early)}"
        )
    lines += ["", NOTE]
    return lines


def table_row(row: Summary) -> tuple[str, ...]:
    return (
        row.label[:_LABEL_CHARACTERS_MAX],
        _percent(row.effective_share),
        f"{100 * row.exact_share:.2f} %",
        _percent(row.available_share),
        _count(row.unexpected),
        _count(row.planned),
        f"{row.lost_per_interruption_s.mean / 60:.1f} min",
        _count(row.replaced),
    )


def _percent(value: Estimate) -> str:
    spread = f" ± {100 * value.half_width:.2f}" if value.half_width else ""
    return f"{100 * value.mean:.2f}{spread} %"


def _count(value: Estimate) -> str:
    spread = f" ± {value.half_width:.1f}" if value.half_width else ""
    return f"{value.mean:,.0f}{spread}"


def table_lines(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns as wide as they need to be; the first one to the left, the others to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [cell.ljust(widths[i]) if i == 0 else cell.rjust(widths[i]) for i, cell in enumerate(row)]
        lines.append("  ".join(cells).rstrip())
    return lines


def shares_of(row: Summary) -> dict[Category, float]:
    """The mean share of each category over the seeds."""
    count = len(row.outcomes)
    return {
        category: sum(outcome.spent_s(category) / outcome.elapsed_s for outcome in row.outcomes) / count
        for category in Category
    }


def _plot(rows: Sequence[Summary]) -> list[str]:
    """Where the rest of the time went, as bars of the lost share alone: 90 % and 99 % would look alike."""
    lost = [1 - row.effective_share.mean for row in rows]
    scale = max(*lost, 1e-9)
    labels = [row.label[:_LABEL_CHARACTERS_MAX] for row in rows]
    width = max(len(label) for label in labels)
    lines = ["Lost time, of all time (d detection, r replayed, s start, c checkpoint, w waiting for hosts, · other)"]
    for label, row, share in zip(labels, rows, lost, strict=True):
        lines.append(f"{label.ljust(width)}  {_bar(row, scale)} {100 * share:.1f} %")
    return lines


_LETTERS = {
    Category.DETECTION: "d",
    Category.DIAGNOSIS: "d",
    Category.REPLAYED: "r",
    Category.TEARDOWN: "s",
    Category.STARTING: "s",
    Category.RESTORING: "s",
    Category.WARMING_UP: "s",
    Category.CHECKPOINT: "c",
    Category.WAITING: "w",
}


def _bar(row: Summary, scale: float) -> str:
    shares = {"d": 0.0, "r": 0.0, "s": 0.0, "c": 0.0, "w": 0.0, "·": 0.0}
    for category, share in shares_of(row).items():
        if category is not Category.PRODUCTIVE:
            shares[_LETTERS.get(category, "·")] += share
    drawn, reached = "", 0.0
    for letter, share in shares.items():
        reached += share
        drawn += letter * (round(_BAR_CELLS * reached / scale) - len(drawn))
    return drawn


def _cause_lines(causes: Sequence[CauseRow], row: Summary) -> list[str]:
    if not causes:
        return ["No unexpected interruption."]
    has_llama3 = any(cause.llama3_count is not None for cause in causes)
    lines: list[tuple[str, ...]] = [("cause", "per run", "share") + (("Llama 3",) if has_llama3 else ())]
    for cause in causes:
        known = "-" if cause.llama3_count is None else str(cause.llama3_count)
        cells = (cause.component, f"{cause.mean_count:.1f}", f"{100 * cause.share:.1f} %")
        lines.append(cells + ((known,) if has_llama3 else ()))
    named = sum(outcome.named_count for outcome in row.outcomes)
    total = sum(outcome.unexpected_count for outcome in row.outcomes)
    return [*table_lines(lines), f"{named:,} of {total:,} verdicts named the rank at fault."]


def _power_lines(row: Summary) -> list[str]:
    first, dip_share = row.outcomes[0], row.scenario.heat_dip_share
    power = first.power
    drawn = f"{power.working_mw:.1f} MW at work, {power.swing_mw:.1f} MW less when all stall"
    heat = f", and up to {100 * dip_share:.1f} % slower at midday" if dip_share else ""
    spent = f"{power.swing_count:,} swings, {power.energy_gwh:.1f} GWh"
    return [f"GPU power (seed {first.seed}): {drawn}, {spent}{heat}."]


def _different_delays(rows: Sequence[Summary]) -> list[Summary]:
    seen: list[Summary] = []
    for row in rows:
        if all(row.scenario.delays != other.scenario.delays for other in seen):
            seen.append(row)
    return seen


def _delay_lines(row: Summary) -> list[str]:
    one = row.scenario
    rows = [
        (f"    {name}", f"{delay.mean_s:.4g} s", delay.origin.value, delay.source) for name, delay in one.delays.of()
    ]
    if one.restore_tb:
        source = f"{one.restore_tb:g} TB by all at once at {one.storage_tb_per_s:g} TB/s"
        rows.append(("    storage", f"{one.restore_storage_s:.3g} s", "computed", source))
    widths = [max(len(line[i]) for line in rows) for i in range(3)]
    return [f"{a.ljust(widths[0])}  {b.rjust(widths[1])}  {c.ljust(widths[2])}  {d}".rstrip() for a, b, c, d in rows]


def simulation_json(rows: Sequence[Summary]) -> dict[str, object]:
    """Everything, with units in the names."""
    return {
        "simulated": True,
        "rows": [
            {
                "label": row.label,
                "seed_count": row.seed_count,
                "gpus": row.scenario.gpus,
                "days": row.scenario.days,
                "spares": row.scenario.spares,
                "checkpoint_interval_s": row.scenario.checkpoint_interval_s,
                "exact_share": row.exact_share,
                "restart_mean_s": row.scenario.restart_mean_s,
                "mtbf_s": row.scenario.mtbf_s,
                **{
                    name: asdict(getattr(row, name))
                    for name in (
                        "effective_share",
                        "available_share",
                        "unexpected",
                        "planned",
                        "replaced",
                        "lost_per_interruption_s",
                    )
                },
                "ended_early_count": row.ended_early_count,
                "parts_share": {category.value: share for category, share in shares_of(row).items()},
                "causes": [asdict(cause) for cause in cause_table(row.outcomes)],
                "delays": {
                    name: {"mean_s": d.mean_s, "sigma": d.sigma, "origin": d.origin.value, "source": d.source}
                    for name, d in row.scenario.delays.of()
                },
                "runs": [_run_json(outcome) for outcome in row.outcomes],
            }
            for row in rows
        ],
    }


def _run_json(outcome: object) -> dict[str, object]:
    made = asdict(outcome)  # type: ignore[call-overload]
    made["parts_s"] = {part["category"].value: part["duration_ns"] / 1e9 for part in made.pop("parts")}
    made["causes"] = dict(made["causes"])
    return dict(made)
