"""An export is read without everstep and holds the very tensors of the step, whoever wrote the checkpoint."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from everstep.cli.main import main
from everstep.domain.errors import ExitCode
from everstep.worker import checkpoint_manifest as manifests
from everstep.worker.export import read_whole
from everstep.worker.saver import Saver

sys.path.insert(0, str(Path(__file__).parent / "scripts"))
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


@pytest.mark.parametrize("writer", ["the ranks", "the saver"])
@pytest.mark.parametrize("kind", SPECS)
def test_an_exported_checkpoint_loads_with_dcp_alone_and_is_the_state_of_its_step(
    kind: str, writer: str, lab: Any, tmp_path: Path
) -> None:
    import train

    spec, out = SPECS[kind], tmp_path / "exported"
    folder = saved(lab, spec, writer, tmp_path)
    assert main(["checkpoints", str(folder), "export", "--out", str(out)]) == ExitCode.DONE
    model, optimizer = read_whole(folder / "step-00000007")
    for rank in range(2):
        digest = lab.steps("first", rank)[6]["parameters"]
        names = [name for name, _ in train.Net(24).named_parameters()]
        assert train.sha(*(shard(model[name], rank, spec) for name in names)) == digest
    code = (
        "import sys, json, torch, torch.distributed.checkpoint as dcp\n"
        "shapes = json.loads(sys.argv[2])\n"
        "state = {'model': {n: torch.zeros(s) for n, s in shapes.items()}, 'optimizer': {'state': {n: {'exp_avg': "
        "torch.zeros(s)} for n, s in shapes.items()}}}\n"
        "dcp.load(state, checkpoint_id=sys.argv[1], no_dist=True)\n"
        "assert 'everstep' not in sys.modules\n"
        "torch.save(state, sys.argv[3])\n"
    )
    shapes = {
        name: list(t.shape) for name, t in model.items() if t.dtype == torch.float32 and name in optimizer["state"]
    }
    assert len(shapes) == 8
    loaded = tmp_path / "loaded.pt"
    subprocess.run([sys.executable, "-c", code, str(out), json.dumps(shapes), str(loaded)], check=True, timeout=60)
    found = torch.load(loaded)
    for name in shapes:
        assert torch.equal(found["model"][name], model[name])
        assert torch.equal(found["optimizer"]["state"][name]["exp_avg"], optimizer["state"][name]["exp_avg"])
    assert optimizer["param_groups"][0]["params"] == list(optimizer["state"])


def test_a_safetensors_file_holds_parameters_and_buffers(lab: Any, tmp_path: Path) -> None:
    folder, out = saved(lab, SPECS["ddp"], "the ranks", tmp_path), tmp_path / "model.safetensors"
    assert main(["checkpoints", str(folder), "export", "--to", "safetensors", "--out", str(out)]) == ExitCode.DONE
    content = out.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    model, _ = read_whole(folder / "step-00000007")
    for name, tensor in model.items():
        begin, end = header[name]["data_offsets"]
        assert content[8 + size + begin : 8 + size + end] == tensor.numpy().tobytes()
    assert len(content) == 8 + size + max(
        entry["data_offsets"][1] for n, entry in header.items() if n != "__metadata__"
    )


def test_list_verify_and_prune_say_what_is_there(lab: Any, capsys: pytest.CaptureFixture[str]) -> None:
    lab.train("first", kind="alone", world=1, until=9, attach={"save_every_steps": 3, "keep": 3})
    folder = str(lab.directory)
    assert main(["checkpoints", folder, "list"]) == ExitCode.DONE
    listed = capsys.readouterr().out
    assert [line.split()[0] for line in listed.splitlines()] == ["step", "9", "6", "3"]
    assert listed.count("complete; resumes exactly") == 3
    path = lab.directory / "step-00000006" / "rank-00000.pt"
    content = bytearray(path.read_bytes())
    content[999] ^= 4
    path.write_bytes(content)
    assert main(["checkpoints", folder, "verify"]) == ExitCode.SCRIPT_BUG
    verified = capsys.readouterr().out
    assert "step 6: rank-00000.pt" in verified
    assert verified.count("every file is as it was written") == 2
    assert main(["checkpoints", folder, "prune", "--keep", "1"]) == ExitCode.DONE
    assert manifests.all_steps(lab.directory) == [9]
    assert main(["checkpoints", folder, "prune", "--keep", "0"]) == ExitCode.USAGE
    assert main(["checkpoints", folder, "export", "--step", "6", "--out", "x"]) == ExitCode.USAGE
    assert "has no checkpoint of step 6; it has 9" in capsys.readouterr().err
