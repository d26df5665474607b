"""Where a plan's inputs come from: presets, TOML files, the user's own records and flags, put over each other.

A flag beats a fit, a fit beats the file, the file beats the preset. It computes nothing.
"""

import argparse
import difflib
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from everstep.adapters.fault_trace import read_fault_trace
from everstep.adapters.ledger_file import ledger_path, read_entries
from everstep.adapters.slurm_accounting import WANTED, SlurmJob, read_sacct
from everstep.domain.codec import Entry
from everstep.domain.errors import ConfigError, EvidenceError
from everstep.domain.events import CheckpointSaved
from everstep.planning.failures import CONFIDENCE, DAY_S, PRIOR, fit_rate
from everstep.planning.inputs import Origin, Plan
from everstep.planning.keys import KEY_BY_NAME, KEYS, RATE_KEYS, SPEED_KEYS
from everstep.planning.presets import PRESETS
from everstep.planning.quantities import quantity
from everstep.planning.traces import summarize
from everstep.policy.accounting import Category
from everstep.policy.incidents import Incident
from everstep.views.report import RunFold, RunReport
from everstep.views.report_text import counted

HOST_FAILED = frozenset({"NODE_FAIL", "BOOT_FAIL"})
"""Slurm's states that say the host failed. FAILED may be the script's own, so it is not counted."""
_DELAYS = {
    "detection_s": ("detect", "diagnose"),
    "restart_s": ("teardown", "wait", "spawn", "import", "init", "build"),
    "restore_s": ("restore", "rehearse", "first_step"),
}
"""Which parts of a recovery in a ledger are which key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """Some keys of a plan from one source, with sentences for the reader."""

    values: Mapping[str, float]
    origins: Mapping[str, Origin]
    name: str | None = None
    confidence: float | None = None
    notes: tuple[str, ...] = field(default=())


def combine(layers: Iterable[Layer]) -> Plan:
    """Put layers over each other, the last one on top.

    Raises:
        ConfigError: a value is not allowed, or the number of GPUs is missing.
    """
    values: dict[str, float] = {}
    origins: dict[str, Origin] = {}
    name, confidence = "plan", CONFIDENCE
    for layer in layers:
        for alternatives in (RATE_KEYS, SPEED_KEYS):
            if any(key in layer.values for key in alternatives):
                for key in alternatives:
                    values.pop(key, None)
        values.update(layer.values)
        origins.update(layer.origins)
        name = layer.name or name
        confidence = layer.confidence or confidence
    if "gpu_count" not in values:
        known = ", ".join(PRESETS)
        raise ConfigError(
            f"gpu_count is missing: say how many GPUs with --gpu-count, in a TOML file, or by a preset ({known})"
        )
    chosen: dict[str, Any] = values
    return Plan(name=name, confidence=confidence, origins=origins, **chosen)


def base_layers(given: str | None) -> list[Layer]:
    """The layers of the positional argument: none, a preset's, or a file's with perhaps a preset below.

    Raises:
        ConfigError: it is neither a preset nor a TOML file of a plan.
    """
    if given is None:
        return []
    if given in PRESETS:
        return [preset_layer(given)]
    path = Path(given)
    if path.suffix == ".toml" or path.exists():
        return file_layers(path)
    near = difflib.get_close_matches(given, PRESETS, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise ConfigError(f"{given} is no preset and no file: {hint}presets are {', '.join(PRESETS)}")


def preset_layer(name: str) -> Layer:
    preset = PRESETS[name]
    return Layer(values=preset.values, origins=preset.origins, name=preset.name)


def file_layers(path: Path) -> list[Layer]:
    """A TOML file with keys of a plan; `preset = "…"` puts it over a preset, `name` is its title.

    Raises:
        ConfigError: it can't be read, is no TOML, or has a key or value that is not allowed.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; give a TOML file with keys such as gpu_count = 16384") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is no TOML: {error}; write lines such as gpu_count = 16384") from error
    layers = []
    preset = table.pop("preset", None)
    if preset is not None:
        if preset not in PRESETS:
            raise ConfigError(f"{path}: preset is {preset!r}: it must be one of {', '.join(PRESETS)}")
        layers.append(preset_layer(preset))
    name, confidence = table.pop("name", path.stem), table.pop("confidence", None)
    if not isinstance(name, str):
        raise ConfigError(f"{path}: name is {name!r}: it must be a text")
    values = {key: _value(key, value, where=str(path)) for key, value in table.items()}
    origin = Origin(source=str(path))
    layer = Layer(
        values=values,
        origins=dict.fromkeys(values, origin),
        name=name,
        confidence=None if confidence is None else quantity("confidence", confidence),
    )
    return [*layers, layer]


def _value(key: str, value: object, *, where: str) -> float:
    if key not in KEY_BY_NAME:
        raise ConfigError(f"{where}: {unknown_key(key)}")
    if isinstance(value, dict | list):
        raise ConfigError(f"{where}: {key} is a table or a list: write {key} = and one value")
    try:
        return quantity(key, value)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def unknown_key(key: str) -> str:
    """The sentence for a key that is none, with the nearest one that is."""
    near = nearest(key, [known.name for known in KEYS])
    hint = f"did you mean {near}?" if near else "everstep plan --help lists all keys as flags"
    return f"unknown key {key}: {hint}"


def nearest(word: str, known: Sequence[str]) -> str | None:
    """The known word that was most likely meant: one that only lacks its unit, else one that is spelled alike."""
    unfinished = [name for name in known if name.startswith((f"{word}_", f"{word}-"))]
    near = unfinished or difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return min(near, key=len) if near else None


def flag_layer(args: argparse.Namespace) -> Layer:
    """What the flags say.

    Raises:
        ConfigError: a value is no number, or has the wrong unit.
    """
    given = {key.name: getattr(args, key.name) for key in KEYS if getattr(args, key.name, None) is not None}
    values = {key: quantity(key, value) for key, value in given.items()}
    origins = {key: Origin(source=f"--{key.replace('_', '-')} {value}") for key, value in given.items()}
    return Layer(values=values, origins=origins, name=args.name, confidence=args.confidence)


def fit_layers(args: argparse.Namespace) -> list[Layer]:
    """What the user's own records say; two of them, or one and a rate by flag, would contradict each other.

    Raises:
        ConfigError: more than one says the failure rate; a file can't be read.
        EvidenceError: a file is not what it should be, or holds nothing to fit.
    """
    fits = [name for name in ("fit_ledger", "fit_sacct", "fit_trace") if getattr(args, name)]
    rates = [key for key in RATE_KEYS if getattr(args, key, None) is not None]
    said = [f"--{name.replace('_', '-')}" for name in (*fits, *rates[:1])]
    if len(said) > 1 and fits:
        raise ConfigError(f"{' and '.join(said)} all say the failure rate: give one of them")
    if args.fit_ledger:
        return [fit_ledgers(args.fit_ledger)]
    if args.fit_sacct:
        return [fit_sacct(args.fit_sacct)]
    if args.fit_trace:
        return [fit_trace(args.fit_trace, host_count=args.trace_host_count, days=args.trace_days)]
    return []


def fit_sacct(path: Path) -> Layer:
    """Failures per host-day from Slurm's accounting: jobs that ended because a host failed."""
    accounting = read_sacct(path)
    jobs = [job for job in accounting.jobs if job.host_count > 0 and job.elapsed_s > 0]
    with_gpus = [job for job in jobs if job.gpu_count]
    jobs = with_gpus or jobs
    host_days = sum(job.host_count * job.elapsed_s for job in jobs) / DAY_S
    if host_days <= 0:
        raise EvidenceError(f"{path} holds no job with hosts and time, only steps or pending ones: write `{WANTED}`")
    count = sum(job.state in HOST_FAILED for job in jobs)
    source = f"{count} of {len(jobs):,} jobs in {path} ended by a host failure in {host_days:,.0f} host-days"
    values, origins = _counted(count, host_days, source)
    notes = [_failed_note(jobs)]
    if accounting.broken_count:
        notes.append(f"{path}: {accounting.broken_count:,} broken lines were left out")
    if not values:
        notes.append(_says_nothing(source))
    return Layer(values=values, origins=origins, notes=tuple(filter(None, notes)))


def _failed_note(jobs: Sequence[SlurmJob]) -> str:
    failed = sum(job.state == "FAILED" for job in jobs)
    if not failed:
        return ""
    return (
        f"FAILED is not counted ({failed:,} of {len(jobs):,} jobs), since Slurm does not say whose fault it was: "
        "the true rate may be higher"
    )


def fit_trace(path: Path, *, host_count: int | None, days: float | None = None) -> Layer:
    """Rate, repair time, spread and lemons from a record of host faults.

    Args:
        host_count: all hosts that were watched; the record lists only those that failed.
        days: how long they were watched; None: until the last entry.
    """
    if host_count is None:
        raise ConfigError(
            "--trace-host-count is missing: a trace lists only hosts that failed, so say how many there were"
        )
    faults = read_fault_trace(path)
    duration_s = max(fault.ended_s for fault in faults) if days is None else days * DAY_S
    found = summarize(faults, host_count=host_count, duration_s=duration_s, source=str(path))
    source = f"{found.fault_count:,} faults of {found.host_count:,} hosts in {duration_s / DAY_S:.0f} days ({path})"
    values: dict[str, float] = {
        "failure_count": found.fault_count,
        "observed_host_days": found.host_count * duration_s / DAY_S,
        "count_variance_ratio": found.count_variance_ratio,
        "replacement_s": found.repair_s,
        "replaced_share": 1.0,
        "down_variance_ratio": max(1.0, found.down_variance_ratio),
        "lemon_host_share": found.top_host_share,
        "lemon_failure_share": found.top_failure_share,
    }
    note = (
        f"{path}: {found.down_mean:.1f} of {found.host_count:,} hosts were down on average, {found.down_p99} or fewer "
        f"in 99 % of the time; faults per fortnight have {found.count_variance_ratio:.1f} times Poisson's variance, "
        "and the range of the rate is as much wider as that asks"
    )
    return Layer(values=values, origins=dict.fromkeys(values, Origin(source=source)), notes=(note,))


def fit_ledgers(paths: Sequence[Path]) -> Layer:
    """Failures per host-day and the delays of recoveries from ledgers. Injected failures count for the delays only."""
    runs = [_read_run(path) for path in paths]
    incidents = [incident for run in runs for incident in run.report.incidents]
    host_days = sum(run.report.started.host_count * run.report.account.elapsed_s for run in runs) / DAY_S
    if host_days <= 0:
        raise EvidenceError(f"{paths[0]}: the ledger spans no time, so there is nothing to fit")
    ledgers = counted(len(runs), "ledger")
    count = sum(incident.is_unexpected and incident.injected is None for incident in incidents)
    source = f"{counted(count, 'unexpected interruption')} in {host_days:.3g} host-days of {ledgers}"
    values, origins = _counted(count, host_days, source)
    notes = [] if values else [_says_nothing(source)]
    injected = sum(incident.injected is not None for incident in incidents)
    if injected:
        notes.append(f"{counted(injected, 'injected failure')} left out of the rate, and used for the delays")
    recovered = [incident for incident in incidents if incident.recovered_at_s is not None and not incident.planned]
    if recovered:
        measured = Origin(source=f"mean of {len(recovered)} recoveries in {ledgers}")
        delays = {key: _mean_s(recovered, parts) for key, parts in _DELAYS.items()}
        values, origins = {**values, **delays}, {**origins, **dict.fromkeys(delays, measured)}
    else:
        notes.append("no recovery in these ledgers: detection, restart and restore times stay as they were")
    saved = sum(run.saved_count for run in runs)
    paused_s = sum(run.report.account.spent_s(Category.CHECKPOINT) for run in runs)
    if saved and paused_s > 0:
        values["checkpoint_pause_s"] = paused_s / saved
        origins["checkpoint_pause_s"] = Origin(source=f"mean of {counted(saved, 'checkpoint')} in {ledgers}")
    return Layer(values=values, origins=origins, notes=tuple(notes))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    report: RunReport
    saved_count: int


def _read_run(given: Path) -> _Run:
    fold, saved_count = RunFold(str(given)), 0

    def seen() -> Iterator[Entry]:
        nonlocal saved_count
        for entry in read_entries(ledger_path(given)):
            saved_count += isinstance(entry.body, CheckpointSaved)
            yield entry

    fold.take_all(seen())
    return _Run(report=fold.report(), saved_count=saved_count)


def _mean_s(incidents: Sequence[Incident], parts: tuple[str, ...]) -> float:
    spent = (part.duration_s for incident in incidents for part in incident.parts if part.name in parts)
    return sum(spent) / len(incidents)


def _counted(count: int, host_days: float, source: str) -> tuple[dict[str, float], dict[str, Origin]]:
    """The rate as keys; nothing when no failure was seen in so short a time that it says less than the prior."""
    if count == 0 and fit_rate(failure_count=0, host_days=host_days, source=source).high > PRIOR.high:
        return {}, {}
    values: dict[str, float] = {"failure_count": count, "observed_host_days": host_days}
    return values, dict.fromkeys(values, Origin(source=source))


def _says_nothing(source: str) -> str:
    return f"{source}: too little to say more than the published range, so the failure rate is not taken from it"
