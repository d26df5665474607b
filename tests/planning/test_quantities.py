"""Numbers with units, as people write them in flags and TOML."""

import pytest

from everstep.domain.errors import ConfigError
from everstep.planning.keys import KEYS
from everstep.planning.quantities import quantity, unit_of


@pytest.mark.parametrize(
    ("key", "written", "value"),
    [
        ("restart_s", 5, 5),
        ("restart_s", "5", 5),
        ("restart_s", "5 min", 300),
        ("restart_s", "5min", 300),
        ("restart_s", "1.5 h", 5_400),
        ("restart_s", "250 ms", 0.25),
        ("restart_s", "2 days", 172_800),
        ("run_days", "2 weeks", 14),
        ("run_days", "36 h", 1.5),
        ("gpu_count", "16,384", 16_384),
        ("gpu_count", "16_384", 16_384),
        ("gpu_count", "16k", 16_000),
        ("parameter_count", "405B", 405e9),
        ("token_count", "15.6T", 15.6e12),
        ("target_share", "95 %", 0.95),
        ("target_share", "0.95", 0.95),
        ("storage_bytes_per_s", "2 TB/s", 2e12),
        ("flops_per_gpu", "400 TFLOP/s", 400e12),
        ("gpu_peak_flops", "989.4 TFLOPS", 989.4e12),
        ("gpu_power_w", "0.7 kW", 700),
        ("ramp_limit_w_per_s", "1 MW/s", 1e6),
        ("pue", "1.2", 1.2),
        ("failures_per_1000_host_days", "3.79", 3.79),
        ("restart_s", "-5", -5),
    ],
)
def test_a_number_has_the_unit_of_its_key_and_a_text_may_name_another(key: str, written: object, value: float) -> None:
    assert quantity(key, written) == pytest.approx(value)


@pytest.mark.parametrize(
    ("key", "written", "words"),
    [
        ("restart_s", "5 GB", ("restart_s is '5 GB'", "'GB' is no unit of it", "'5 min'")),
        ("restart_s", "five", ("restart_s is 'five'", "seconds as a number")),
        ("restart_s", "", ("restart_s is ''",)),
        ("restart_s", True, ("restart_s is True",)),
        ("restart_s", None, ("restart_s is None",)),
        ("restart_s", [1], ("restart_s is [1]",)),
        ("pue", "1.2 W", ("pue is '1.2 W'", "a number")),
        ("gpu_power_w", "700 h", ("'h' is no unit of it", "watts")),
        ("storage_bytes_per_s", "2 TB", ("'TB' is no unit of it", "'2 TB/s'")),
        ("target_share", "95 percent", ("'percent' is no unit of it", "'90 %'")),
    ],
)
def test_a_wrong_unit_is_one_sentence_with_what_to_write(key: str, written: object, words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        quantity(key, written)
    for word in words:
        assert word in str(caught.value)


def test_a_whole_count_stays_whole() -> None:
    assert isinstance(quantity("gpu_count", "16k"), int)
    assert isinstance(quantity("spare_host_count", "4"), int)
    assert isinstance(quantity("gpu_count", "1.5"), float)


def test_every_key_with_a_unit_in_its_name_is_known_by_it() -> None:
    plain = {key.name for key in KEYS if not unit_of(key.name)[1]}
    assert plain == {
        "gpus_per_host",
        "failures_per_1000_host_days",
        "gpu_days_per_failure",
        "planned_per_day",
        "count_variance_ratio",
        "down_variance_ratio",
        "burst_hosts",
        "bytes_per_parameter",
        "pue",
    }
