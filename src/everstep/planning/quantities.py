"""Numbers with units, from what people write: a bare number has the unit at the end of its key, a text may name one.

`"5 min"` for a key that ends in `_s` is 300. It knows no plan.
"""

import re

from everstep.domain.errors import ConfigError

_TIMES_S = {
    **dict.fromkeys(("ms",), 1e-3),
    **dict.fromkeys(("s", "sec", "second", "seconds"), 1.0),
    **dict.fromkeys(("m", "min", "minute", "minutes"), 60.0),
    **dict.fromkeys(("h", "hour", "hours"), 3_600.0),
    **dict.fromkeys(("d", "day", "days"), 86_400.0),
    **dict.fromkeys(("w", "week", "weeks"), 604_800.0),
}
_PREFIXES = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_COUNTS = {"k": 1e3, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
_WRITTEN = re.compile(r"([-+]?(?:\d[\d,_]*)?\.?\d+(?:[eE][-+]?\d+)?)\s*(.*)", re.DOTALL)

_UNITS: tuple[tuple[str, dict[str, float], str], ...] = (
    (
        "_bytes_per_s",
        {f"{prefix}B/s": factor for prefix, factor in _PREFIXES.items()},
        "bytes per second as a number, or '200 GB/s', '2 TB/s'",
    ),
    (
        "_w_per_s",
        {f"{prefix}W/s": factor for prefix, factor in _PREFIXES.items()},
        "watts per second as a number, or '1 MW/s'",
    ),
    ("_s", _TIMES_S, "seconds as a number, or '90 s', '5 min', '2 h'"),
    ("_days", {unit: factor / 86_400.0 for unit, factor in _TIMES_S.items()}, "days as a number, or '36 h', '2 weeks'"),
    (
        "_w",
        {f"{prefix}W": factor for prefix, factor in _PREFIXES.items()},
        "watts as a number, or '700 W', '1.2 kW'",
    ),
    ("_share", {"%": 0.01}, "a share from 0 to 1, or '90 %'"),
    (
        "flops",
        {f"{prefix}{unit}": factor for prefix, factor in _PREFIXES.items() for unit in ("FLOP/s", "FLOPS", "FLOPs")},
        "FLOP per second as a number, or '400 TFLOP/s'",
    ),
    ("_count", _COUNTS, "a number, or '16k', '405B', '15.6T'"),
)
_NO_UNITS: tuple[str, dict[str, float], str] = ("", {}, "a number")


def quantity(key: str, value: object) -> float:
    """The value of a key in the unit of its name.

    Args:
        value: a number, or a text with a number and perhaps a unit.

    Raises:
        ConfigError: it is neither, or the unit does not fit the key.
    """
    _, units, wanted = unit_of(key)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    match = _WRITTEN.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        raise ConfigError(f"{key} is {value!r}: give {wanted}")
    number, unit = float(match[1].replace(",", "").replace("_", "")), match[2].strip()
    factor = 1.0 if not unit else units.get(unit)
    if factor is None:
        raise ConfigError(f"{key} is {value!r}, and {unit!r} is no unit of it: give {wanted}")
    result = float(f"{number * factor:.15g}")
    return int(result) if result == int(result) and key.endswith("_count") else result


def unit_of(key: str) -> tuple[str, dict[str, float], str]:
    """The end of the key that tells its unit, the units that a text may name, and what to write."""
    if key == "failures_per_1000_host_days":
        return _NO_UNITS
    name = "_flops" if key.startswith("flops_per") else key
    return next((units for units in _UNITS if name.endswith(units[0])), _NO_UNITS)
