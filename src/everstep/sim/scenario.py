"""One scenario of the coarse world: a cluster, its failures, its delays and the settings of the policy that runs it.

Every key can be set from a TOML file or swept over; a value that makes no sense is refused with one sentence.
"""

import math
from dataclasses import dataclass, field, fields, replace

from everstep.domain.errors import ConfigError
from everstep.policy.inquiry import InquiryConfig
from everstep.policy.recovery import RecoveryConfig
from everstep.policy.restarts import RestartConfig
from everstep.policy.spares import SpareConfig
from everstep.sim.delays import Delays, delay_names
from everstep.sim.failures import FailureModel, Fault


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Attributes:
    name: the preset's or the file's.
    gpus: in use by the job; `gpus_per_host` of them on a host.
    spares: hosts beside them.
    agents: how many agents speak for all hosts; each stands for the relay of a pod.
    days: how long the run is watched.
    checkpoint_interval_s: useful work between two checkpoints.
    checkpoint_pause_s: how long training stands still for one.
    blocks_per_checkpoint: a simulated step is a block of work, so many between two checkpoints.
    restore_tb, storage_tb_per_s: what all hosts together load at a restart, and the bandwidth that they share: the
        storage is slow because all load at once.
    heat_dip_share: how much slower training is at the hottest hour of the day.
    gpu_watts, idle_share: at work, and the part of it that a stalled GPU draws.
    lemon_failures: see `SpareConfig`; 0 turns the rule off.
    late_news_share: so many attempts are followed by news that come too late, to test the fences.
    faults: a recorded trace; None draws from `failures`.
    """

    name: str
    gpus: int
    gpus_per_host: int = 8
    spares: int
    agents: int
    days: float
    checkpoint_interval_s: float
    checkpoint_pause_s: float
    blocks_per_checkpoint: int = 8
    restore_tb: float = 0.0
    storage_tb_per_s: float = 2.0
    heat_dip_share: float = 0.0
    gpu_watts: float = 700.0
    idle_share: float = 0.4
    lemon_failures: int = 3
    late_news_share: float = 0.0
    failures: FailureModel
    delays: Delays
    faults: tuple[Fault, ...] | None = field(default=None, repr=False)

    @property
    def host_count(self) -> int:
        """In use by the job."""
        return self.gpus // self.gpus_per_host

    @property
    def duration_s(self) -> float:
        return self.days * 86_400

    @property
    def block_s(self) -> float:
        return self.checkpoint_interval_s / self.blocks_per_checkpoint

    @property
    def restore_storage_s(self) -> float:
        """What the shared storage takes when all load at once."""
        return self.restore_tb / self.storage_tb_per_s

    @property
    def restart_mean_s(self) -> float:
        """R of the exact formula: the mean of everything from a fault to the next useful step, but the lost work.

        Weighted by how many faults freeze and how many end a process.
        """
        times = self.delays
        tail_s = sum(
            delay.mean_s for name, delay in times.of() if name not in ("detect_death", "detect_silence", "evidence")
        )
        return (
            tail_s
            + self.restore_storage_s
            + self.silence_share * self._silence_s
            + self._death_s * (1 - self.silence_share)
        )

    @property
    def _death_s(self) -> float:
        return self.delays.detect_death.mean_s + self.delays.evidence.mean_s

    @property
    def _silence_s(self) -> float:
        return self.delays.detect_silence.mean_s + 2 * self.delays.evidence.mean_s

    @property
    def silence_share(self) -> float:
        """Of all interruptions, how many are silences: 79 of Llama 3's 419, and no planned one."""
        unexpected = self.failures.per_1000_host_days / 1000 * self.host_count
        total = unexpected + self.failures.planned_per_day
        return SILENT_OF_LLAMA3 * unexpected / total if total else 0.0

    @property
    def mtbf_s(self) -> float:
        """M of the exact formula: between interruptions of either kind, for a job that always has its hosts."""
        per_day = self.failures.per_1000_host_days / 1000 * self.host_count + self.failures.planned_per_day
        return 86_400 / per_day if per_day else float("inf")

    def recovery(self) -> RecoveryConfig:
        """The policy's settings."""
        return RecoveryConfig(
            grace_s=3.0,
            restarts=RestartConfig(),
            inquiry=InquiryConfig(answer_within_s=600.0),
            spares=SpareConfig(lemon_failures=self.lemon_failures, waits_for_hosts=True),
        )


SILENT_OF_LLAMA3 = 79 / 419
"""Network 35, GPU system processor 17, NIC 7, watchdog 7, thermal 6, SSD 3, IO board 2, CPU 2."""

_LIMITS = {"gpus": 2_000_000, "spares": 100_000, "agents": 1000, "days": 3660}
_BLOCKS_MAX = 10_000_000
_POSITIVE = {"gpus", "gpus_per_host", "agents", "days", "checkpoint_interval_s", "blocks_per_checkpoint"}
_POSITIVE |= {"storage_tb_per_s", "gpu_watts", "burst_size", "repeat_days", "slow_minutes", "rack_hosts"}
_AT_LEAST_1 = {"lemon_factor", "slow_factor"}
_SHARES = {"heat_dip_share", "idle_share", "late_news_share", "down_share", "lemon_share", "burst_share", "rack_share"}
_BELOW_1 = {"repeat_share", "heat_dip_share"}
_OWN = {f.name: f for f in fields(Scenario) if f.name not in ("name", "failures", "delays", "faults")}
_FAILURE = {f.name: f for f in fields(FailureModel)}
_DELAYS = {f"{name}_s": name for name in delay_names()}


def keys() -> tuple[str, ...]:
    """Everything that `changed` takes."""
    return (*_OWN, *_FAILURE, *_DELAYS)


def changed(scenario: Scenario, values: dict[str, object]) -> Scenario:
    """The scenario with other values, checked.

    Raises:
        ConfigError: an unknown key or an impossible value; says which key and what is allowed.
    """
    own: dict[str, object] = {}
    failure: dict[str, object] = {}
    delays = scenario.delays
    for key, value in values.items():
        number = _number(key, value)
        if key in _OWN:
            own[key] = number
        elif key in _FAILURE:
            failure[key] = number
        else:
            delays = delays.replaced(_DELAYS[key], number)
    failures = replace(scenario.failures, **failure)  # type: ignore[arg-type]
    made = replace(scenario, failures=failures, delays=delays, **own)  # type: ignore[arg-type]
    check(made)
    return made


def _number(key: str, value: object) -> float:
    if key not in keys():
        near = [known for known in keys() if known.startswith(key) or key.startswith(known.rsplit("_", 1)[0])]
        hint = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(f"{key}: there is no such key; {hint}known keys are {', '.join(sorted(keys()))}")
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigError(f"{key} = {value!r}: a number is expected, without a unit; the unit is in the key's name")
    whole = (key in _OWN and _OWN[key].type is int) or key == "rack_hosts"
    if whole and value != int(value):
        raise ConfigError(f"{key} = {value:g}: a whole number is expected")
    if value < 0:
        raise ConfigError(f"{key} = {value:g}: it can't be negative")
    if key in _POSITIVE and value == 0:
        raise ConfigError(f"{key} = {value:g}: it must be more than 0")
    if key in _AT_LEAST_1 and value < 1:
        raise ConfigError(f"{key} = {value:g}: a factor of at least 1 is expected")
    if key in _BELOW_1 and value >= 1:
        raise ConfigError(f"{key} = {value:g}: a share below 1 is expected, such as 0.02")
    if key in _SHARES and value > 1:
        raise ConfigError(f"{key} = {value:g}: a share from 0 to 1 is expected, such as 0.02 for 2 %")
    return int(value) if whole else float(value)


def check(scenario: Scenario) -> None:
    """Refuse what does not go together.

    Raises:
        ConfigError: which keys, and what is allowed.
    """
    one = scenario
    for key, limit in _LIMITS.items():
        if getattr(one, key) > limit:
            raise ConfigError(f"{key} = {getattr(one, key):g}: at most {limit:,} are simulated")
    if one.duration_s / one.block_s > _BLOCKS_MAX:
        raise ConfigError(
            f"checkpoint_interval_s = {one.checkpoint_interval_s:g}: {one.days:g} days make more than {_BLOCKS_MAX:,} "
            "blocks of work; take a longer interval, fewer days or fewer blocks_per_checkpoint"
        )
    if one.gpus % one.gpus_per_host:
        raise ConfigError(f"gpus = {one.gpus}: a multiple of gpus_per_host = {one.gpus_per_host} is expected")
    if one.spares > one.host_count:
        raise ConfigError(f"spares = {one.spares}: more than the {one.host_count} hosts of the job; allowed are fewer")
    if one.agents > one.host_count:
        raise ConfigError(f"agents = {one.agents}: at most one for each of the {one.host_count} hosts")
    if one.checkpoint_interval_s >= one.duration_s:
        raise ConfigError(
            f"checkpoint_interval_s = {one.checkpoint_interval_s:g}: longer than the run of {one.days:g} days; "
            f"allowed is less than {one.duration_s:g} s"
        )
    per_day = one.host_count * one.failures.per_1000_host_days / 1000 + one.failures.planned_per_day
    if per_day > 24 * 60:
        raise ConfigError(
            f"per_1000_host_days = {one.failures.per_1000_host_days:g}: {per_day:.0f} interruptions a day are more "
            "than one a minute; is it per 1000 days of one host?"
        )
