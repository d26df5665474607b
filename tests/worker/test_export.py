"""An export is read without everstep and holds the very tensors of the step, whoever wrote the checkpoint."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from everstep.cli.main import main
from everstep.domain.errors import ExitCode
from everstep.worker.format import manifest as manifests
from everstep.worker.saving.saver import Saver

SCRIPTS = Path(__file__).parent / "scripts"
sys.path.insert(0, str(SCRIPTS))
KILLED = -9
SPECS = {"ddp": {"kind": "ddp", "world": 2}, "fsdp": {"kind": "fsdp", "world": 2}}


def saved(lab: Any, spec: dict[str, Any], writer: str, tmp_path: Path) -> Path:
    """A run's folder of checkpoints, with step 7 in it."""
    if writer == "the ranks":
        lab.train("first", **spec, until=7)
    else:
        memory = tmp_path / "memory"
        memory.mkdir()
        lab.train("first", **spec, until=12, memory=str(memory), die_at=8, code=KILLED)
        Saver(memory).flush()
    assert manifests.complete_steps(lab.directory)[0] == 7
    return Path(lab.directory)


def shard(tensor: torch.Tensor, rank: int, spec: dict[str, Any]) -> torch.Tensor:
    if spec["kind"] == "ddp":
        return tensor
    chunks = tensor.chunk(spec["world"])
    return chunks[rank] if rank < len(chunks) else tensor[:0]


READ = """
import sys, torch, torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
sys.path.insert(0, sys.argv[3])
import train
model = train.Net(24)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
parts = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
dcp.load(parts, checkpoint_id=sys.argv[1], no_dist=True)
set_state_dict(model, optimizer, model_state_dict=parts["model"], optim_state_dict=parts["optimizer"])
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, sys.argv[2])
"""


def read_by_dcp(folder: Path, target: Path) -> dict[str, Any]:
    """Model and optimizer as a process reads them that has PyTorch's functions alone to do it."""
    command = [sys.executable, "-W", "ignore", "-c", READ, str(folder), str(target), str(SCRIPTS)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    subprocess.run(command, check=True, timeout=60, env=environment)
    found: dict[str, Any] = torch.load(target)
    return found


@pytest.mark.parametrize("writer", ["the ranks", "the saver"])
@pytest.mark.parametrize("kind", SPECS)
def test_distributed_checkpoint_reads_the_folder_itself_and_finds_the_state_of_the_step(
    kind: str, writer: str, lab: Any, tmp_path: Path
) -> None:
    import train

    spec, folder = SPECS[kind], saved(lab, SPECS[kind], writer, tmp_path) / "step-00000007"
    found = read_by_dcp(folder, tmp_path / "read.pt")
    names = [name for name, _ in train.Net(24).named_parameters()]
    states = found["optimizer"]["state"].values()
    for rank in range(2):
        step = lab.steps("first", rank)[6]
        assert train.sha(*(shard(found["model"][name], rank, spec) for name in names)) == step["parameters"]
        if kind == "ddp":
            held = [value for state in states for value in (sorted(state), *state.values())]
            groups = [{k: v for k, v in g.items() if k != "params"} for g in found["optimizer"]["param_groups"]]
            assert train.sha(*held, groups) == step["optimizer"]
    assert found["optimizer"]["param_groups"][0]["lr"] < 0.01  # the scheduler's, of this very step


def test_an_export_is_the_same_without_what_only_everstep_needs(lab: Any, tmp_path: Path) -> None:
    folder, out = saved(lab, SPECS["fsdp"], "the ranks", tmp_path), tmp_path / "exported"
    assert main(["checkpoints", str(folder), "export", "--out", str(out)]) == ExitCode.DONE
    assert sorted(path.name for path in out.iterdir()) == [".metadata", "__0_0.distcp", "__1_0.distcp"]
    whole = read_by_dcp(folder / "step-00000007", tmp_path / "whole.pt")
    assert str(read_by_dcp(out, tmp_path / "exported.pt")) == str(whole)
    damaged = folder / "step-00000007" / "__1_0.distcp"
    content = bytearray(damaged.read_bytes())
    content[len(content) // 3] ^= 1
    damaged.write_bytes(content)
    assert main(["checkpoints", str(folder), "export", "--out", str(tmp_path / "other")]) != ExitCode.DONE
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("kind", SPECS)
def test_a_safetensors_file_holds_parameters_and_buffers(kind: str, lab: Any, tmp_path: Path) -> None:
    folder, out = saved(lab, SPECS[kind], "the ranks", tmp_path), tmp_path / "model.safetensors"
    assert main(["checkpoints", str(folder), "export", "--to", "safetensors", "--out", str(out)]) == ExitCode.DONE
    content = out.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    model = read_by_dcp(folder / "step-00000007", tmp_path / "read.pt")["model"]
    for name, tensor in model.items():
        begin, end = header[name]["data_offsets"]
        assert content[8 + size + begin : 8 + size + end] == tensor.numpy().tobytes()
    del header["__metadata__"]
    assert header.keys() == {*model, "seen"}  # with the buffer that is not persistent
    assert len(content) == 8 + size + max(entry["data_offsets"][1] for entry in header.values())


def test_list_verify_and_prune_say_what_is_there(lab: Any, capsys: pytest.CaptureFixture[str]) -> None:
    lab.train("first", kind="alone", world=1, until=9, attach={"save_every_steps": 3, "keep": 3})
    folder = str(lab.directory)
    assert main(["checkpoints", folder, "list"]) == ExitCode.DONE
    listed = capsys.readouterr().out
    assert [line.split()[0] for line in listed.splitlines()] == ["step", "9", "6", "3"]
    assert listed.count("complete; resumes exactly") == 3
    path = lab.directory / "step-00000006" / "__0_0.distcp"
    content = bytearray(path.read_bytes())
    content[999] ^= 4
    path.write_bytes(content)
    assert main(["checkpoints", folder, "verify"]) == ExitCode.SCRIPT_BUG
    verified = capsys.readouterr().out
    assert "step 6: __0_0.distcp" in verified
    assert verified.count("every file is as it was written") == 2
    assert main(["checkpoints", folder, "prune", "--keep", "1"]) == ExitCode.DONE
    assert manifests.all_steps(lab.directory) == [9]
    assert main(["checkpoints", folder, "prune", "--keep", "0"]) == ExitCode.USAGE
    assert main(["checkpoints", folder, "export", "--step", "6", "--out", "x"]) == ExitCode.USAGE
    assert "has no checkpoint of step 6; it has 9" in capsys.readouterr().err
