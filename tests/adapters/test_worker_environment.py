"""What a worker is told through its environment comes back whole, and agrees with torchrun's names."""

import ast
import importlib.util
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.adapters.workers.worker_environment import (
    RUN_VARIABLE,
    Place,
    WorkerPaths,
    everstep_defaults,
    torchrun_environment,
    worker_paths,
)
from everstep.domain.errors import ConfigError

TORCH_SOURCE = "distributed/elastic/agent/server/local_elastic_agent.py"
SET_ELSEWHERE = {"TORCHELASTIC_ERROR_FILE"}  # torch.distributed.elastic.multiprocessing.api


def place(**changed: object) -> Place:
    known = {
        "rank": 5,
        "local_rank": 1,
        "world_size": 8,
        "local_world_size": 4,
        "group_rank": 1,
        "group_world_size": 2,
        "master_addr": "127.0.0.1",
        "master_port": 29500,
        "agent_store": True,
        "restart_count": 3,
        "restart_count_max": 10,
        "rdzv_id": "job",
        "error_file": "/tmp/e",
    }
    settable = {field.name for field in fields(Place)}
    return Place(**{name: value for name, value in (known | changed).items() if name in settable})  # type: ignore[arg-type]


@given(
    paths=st.builds(
        WorkerPaths,
        run=st.text(alphabet=st.characters(codec="utf-8", exclude_characters="\0")),
        attempt=st.integers(1, 10**6),
        rank=st.integers(0, 10**6),
        page=st.text(),
        notes=st.text(),
        started_ns=st.integers(0, 2**62),
        clock_zero_ns=st.integers(-(2**62), 2**62),
    )
)
def test_a_workers_paths_come_back_from_its_environment(paths: WorkerPaths) -> None:
    environment = paths.to_environment()
    assert worker_paths(environment) == paths
    assert environment[RUN_VARIABLE] == paths.run
    assert all("\0" not in value for value in environment.values())


def test_a_process_that_everstep_did_not_start_has_none() -> None:
    assert worker_paths({"RANK": "0"}) is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"run": 1}', '{"run": "r", "attempt": "x", "rank": 0}'])
def test_a_malformed_variable_is_refused_with_its_name(text: str) -> None:
    with pytest.raises(ConfigError, match=r"EVERSTEP_WORKER is malformed .* only `everstep run` should set it"):
        worker_paths({"EVERSTEP_WORKER": text})


def test_fields_of_a_newer_everstep_are_ignored() -> None:
    text = WorkerPaths(run="r", attempt=1, rank=0).to_environment()["EVERSTEP_WORKER"]
    assert worker_paths({"EVERSTEP_WORKER": text[:-1] + ',"invented":1}'}) == WorkerPaths(run="r", attempt=1, rank=0)


def test_places_and_counts_have_torchruns_meaning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", raising=False)
    environment = torchrun_environment(place())
    assert {name: environment[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")} == {
        "RANK": "5",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "8",
        "LOCAL_WORLD_SIZE": "4",
    }
    assert (environment["GROUP_RANK"], environment["GROUP_WORLD_SIZE"]) == ("1", "2")
    assert (environment["MASTER_ADDR"], environment["MASTER_PORT"]) == ("127.0.0.1", "29500")
    assert (environment["TORCHELASTIC_RESTART_COUNT"], environment["TORCHELASTIC_MAX_RESTARTS"]) == ("3", "10")
    assert environment["TORCHELASTIC_USE_AGENT_STORE"] == "True"
    assert environment["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "1"


def test_a_users_own_choice_of_nccls_error_handling_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")
    assert torchrun_environment(place())["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "3"


def test_the_names_are_those_that_torchs_own_agent_sets() -> None:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        pytest.skip("torch is not installed")
    tree = ast.parse((Path(spec.origin).parent / TORCH_SOURCE).read_text())
    names: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case (
                ast.Assign(targets=[ast.Name(id="worker_env")], value=ast.Dict(keys=keys))
                | ast.AnnAssign(target=ast.Name(id="worker_env"), value=ast.Dict(keys=keys))
            ):
                names |= {key.value for key in keys if isinstance(key, ast.Constant)}
            case ast.Assign(
                targets=[ast.Subscript(value=ast.Name(id="worker_env"), slice=ast.Constant(value="LOCAL_RANK"))]
            ):
                names.add("LOCAL_RANK")
    assert len(names) > 10, "torch's agent has changed its shape: look at _start_workers"
    assert set(torchrun_environment(place())) == names | SET_ELSEWHERE


@pytest.mark.parametrize(
    ("environment", "libc", "added"),
    [
        ({}, "glibc 2.36", {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}),
        ({}, "glibc 2.34", {"THP_MEM_ALLOC_ENABLE": "1"}),
        ({}, "musl", {"THP_MEM_ALLOC_ENABLE": "1"}),
        ({"GLIBC_TUNABLES": ""}, "glibc 2.41", {"THP_MEM_ALLOC_ENABLE": "1"}),
        ({"THP_MEM_ALLOC_ENABLE": "0"}, "glibc 2.41", {}),
    ],
)
def test_huge_pages_are_asked_for_where_the_user_says_nothing(
    environment: dict[str, str], libc: str, added: dict[str, str]
) -> None:
    assert everstep_defaults(environment, None, libc=libc) == added


def test_compilers_keep_their_work_in_the_run_unless_the_user_has_a_place_for_it() -> None:
    found = everstep_defaults({"TRITON_CACHE_DIR": "/mine"}, Path("/run/compile-cache"))
    assert found["TORCHINDUCTOR_CACHE_DIR"] == "/run/compile-cache/inductor"
    assert "TRITON_CACHE_DIR" not in found
