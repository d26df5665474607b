"""From flags and files to the scenarios that are played; every mistake is one sentence that names the flag or key."""

import json
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from everstep.cli.simulate_batch import Variant
from everstep.domain.errors import ConfigError, EvidenceError, WorldError
from everstep.sim import presets
from everstep.sim.delays import EVERSTEP, with_measured
from everstep.sim.scenario import Scenario, changed, check
from everstep.sim.trace import FaultTrace, parse_trace

_VARIANTS_MAX = 200
_FILE_ONLY = ("preset",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the command line asks for, as it was typed."""

    scenario: str
    settings: tuple[str, ...] = ()
    sweeps: tuple[str, ...] = ()
    compare: tuple[str, ...] = ()
    delays: str = ""
    trace: Path | None = None


def variants(request: Request) -> tuple[Variant, ...]:
    """The rows of the table: the scenario itself or its sweep, then what it is compared with.

    Raises:
        ConfigError: a flag, key or value is wrong.
        EvidenceError: the trace or the bench result is malformed.
        WorldError: a file can't be read.
    """
    base = _with_delays(_base(request), request.delays)
    base = changed(base, dict(_pair("--set", text) for text in request.settings))
    swept = _swept(base, request.sweeps)
    rows = list(swept)
    for name in request.compare:
        for variant in swept:
            rows += _compared(variant, name)
    if len(rows) > _VARIANTS_MAX:
        raise ConfigError(f"--sweep: {len(rows)} combinations; at most {_VARIANTS_MAX} are played at once")
    return tuple(rows)


def _base(request: Request) -> Scenario:
    trace = None if request.trace is None else parse_trace(_json("--trace", request.trace))
    name = request.scenario
    if name in presets.PRESETS:
        return _preset(name, trace)
    path = Path(name)
    if path.suffix != ".toml":
        raise ConfigError(f"{name}: no such scenario; give {', '.join(presets.PRESETS)}, or a file ending with .toml")
    values = _toml(path)
    preset = values.pop("preset", "llama3")
    if preset not in presets.PRESETS:
        raise ConfigError(f"{name}: preset = {preset!r}; allowed are {', '.join(presets.PRESETS)}")
    for key, value in values.items():
        if isinstance(value, dict):
            raise ConfigError(f"{name}: [{key}] is a table; keys stand at the top level, as in {key}_… = 1")
    try:
        return replace(changed(_preset(str(preset), trace), values), name=path.stem)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None


def _preset(name: str, trace: FaultTrace | None) -> Scenario:
    if name == "stepfun":
        if trace is None:
            raise ConfigError("stepfun replays a recorded trace, which is not shipped: add --trace fault_trace.json")
        return presets.stepfun(trace)
    scenario = presets.LLAMA3 if name == "llama3" else presets.HUNDRED_K
    if trace is None:
        return scenario
    made = replace(scenario, faults=trace.faults, days=min(scenario.days, trace.duration_s / 86_400))
    check(made)
    return made


def _with_delays(scenario: Scenario, which: str) -> Scenario:
    if which in ("", "published"):
        return scenario
    if which == "everstep":
        return presets.with_everstep(scenario)
    document = _json("--delays", Path(which))
    parts = document.get("rows") if isinstance(document, dict) else None
    rows = parts.get("recovery_kill") if isinstance(parts, dict) else None
    return presets.with_everstep(scenario, with_measured(EVERSTEP, rows))


def _compared(variant: Variant, name: str) -> list[Variant]:
    suffix = "" if variant.label == variant.scenario.name else f", {variant.label}"
    if name == "everstep":
        other = presets.with_everstep(variant.scenario)
        return [Variant(label=f"with everstep{suffix}", scenario=other)]
    return [
        Variant(
            label=f"torchrun, {timeout_s:.0f} s{suffix}", scenario=presets.with_torchrun(variant.scenario, timeout_s)
        )
        for timeout_s in presets.TIMEOUTS_S
    ]


def _swept(base: Scenario, sweeps: Sequence[str]) -> tuple[Variant, ...]:
    if not sweeps:
        return (Variant(label=base.name, scenario=base),)
    axes = []
    for text in sweeps:
        key, _, listed = text.partition("=")
        axes.append([_pair("--sweep", f"{key}={value}") for value in listed.split(",")])
    return tuple(
        Variant(
            label=", ".join(f"{key}={value:g}" for key, value in point),
            scenario=changed(base, dict(point)),
        )
        for point in product(*axes)
    )


def _pair(flag: str, text: str) -> tuple[str, float]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ConfigError(f"{flag} {text}: expected KEY=VALUE, such as checkpoint_interval_s=120")
    try:
        return key.strip(), float(value)
    except ValueError:
        raise ConfigError(f"{flag} {text}: {value!r} is no number; write it without a unit, as in {key}=120") from None


def _read(flag: str, path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise WorldError(f"{flag} {path}: can't be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise EvidenceError(f"{flag} {path}: not a text file in UTF-8 ({error.reason})") from error


def _json(flag: str, path: Path) -> object:
    try:
        return json.loads(_read(flag, path))
    except json.JSONDecodeError as error:
        raise EvidenceError(f"{flag} {path}: no JSON (line {error.lineno}: {error.msg})") from error


def _toml(path: Path) -> dict[str, object]:
    try:
        return tomllib.loads(_read("scenario", path))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: no valid TOML: {error}") from error
