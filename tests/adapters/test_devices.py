"""How many workers a machine has room for, without torch."""

import os

import pytest

from everstep.adapters.workers import devices


def test_cpus_are_those_that_this_process_may_use() -> None:
    allowed = os.sched_getaffinity(0)
    assert devices.cpu_count() == len(allowed)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert devices.cpu_count() == 1
    finally:
        os.sched_setaffinity(0, allowed)


def test_gpus_are_never_more_than_the_environment_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    present = devices.gpu_count()
    for visible, most in (("", 0), ("-1", 0), ("0", 1), ("0,1", 2), (" 0 , 1 ", 2)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert devices.gpu_count() == min(present, most)


def test_a_machine_without_the_driver_has_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    if os.path.exists("/proc/driver/nvidia/gpus"):  # noqa: PTH110
        pytest.skip("this machine has the driver")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    assert devices.gpu_count() == 0
