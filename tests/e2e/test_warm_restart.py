"""A restart by its parts, and what makes it short: nothing built in vain, nothing compiled again, as measured."""

import stat
import subprocess
import sys
from pathlib import Path

import pytest
from tests.e2e.jobs import SCRIPTS, environment, run

from everstep.adapters.ledger_file import LEDGER_NAME, read_entries
from everstep.domain.errors import ExitCode
from everstep.policy.incidents import Incident
from everstep.views.report import RunFold

pytestmark = pytest.mark.e2e
PROMISED = str(SCRIPTS / "train_promised.py")


def incidents(run_dir: Path) -> tuple[Incident, ...]:
    fold = RunFold("run")
    fold.take_all(read_entries(run_dir / LEDGER_NAME))
    return fold.report().incidents


def test_a_restart_is_told_by_its_parts_and_a_model_of_no_numbers_resumes_exactly(tmp_path: Path) -> None:
    untouched, broken = tmp_path / "untouched", tmp_path / "broken"
    assert run(untouched, "--nproc-per-node", "3", PROMISED, "24", str(tmp_path / "a")).code == ExitCode.DONE
    kill = ("--inject", "kill:rank=1,step=12")
    done = run(broken, "--nproc-per-node", "3", *kill, PROMISED, "24", str(tmp_path / "b"))
    assert done.code == ExitCode.DONE, done.err
    assert (done.out.count("fresh"), done.out.count("resuming")) == (3, 3)
    assert (tmp_path / "a").read_text() == (tmp_path / "b").read_text()
    (incident,) = incidents(broken)
    names = [part.name for part in incident.parts]
    assert names == [
        "detect", "diagnose", "teardown", "wait", "spawn", "import", "init", "build", "restore", "first_step"
    ]  # fmt: skip
    assert incident.recovered_at_s is not None
    whole_s = incident.recovered_at_s - incident.since_s
    assert sum(part.duration_s for part in incident.parts) == pytest.approx(whole_s)


ALONE = """
import shutil, sys
import torch
from everstep.worker import attach, resuming
print("resuming" if resuming() else "fresh", flush=True)
if "--lose" in sys.argv:
    shutil.rmtree("everstep-checkpoints")
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run = attach(model=model, optimizer=optimizer)
print("from step", run.step)
for batch in run.steps([torch.randn(2, 8) for _ in range(4)], until=run.step + 3):
    model(batch).sum().backward()
    optimizer.step()
"""


def test_who_was_promised_a_checkpoint_and_gets_none_does_not_train(tmp_path: Path) -> None:
    (tmp_path / "alone.py").write_text(ALONE)

    def alone(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(tmp_path / "alone.py"), *arguments]
        return subprocess.run(
            command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=120, check=False
        )

    assert "fresh\nfrom step 0" in alone().stdout
    broken = alone("--lose")
    assert "resuming\n" in broken.stdout
    assert "from step" not in broken.stdout
    assert "resuming() was True and then no checkpoint could be restored" in broken.stderr
    assert "fresh\nfrom step 0" in alone().stdout


COMPILED = """
import os, signal, time
began_s = time.monotonic()
import torch
from torch._dynamo.utils import counters
import everstep.worker
model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.GELU()) for _ in range(6)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
compiled = torch.compile(model)
for step in range(3):
    began_s = time.monotonic()
    compiled(torch.randn(4, 32)).sum().backward()
    optimizer.step()
    if step == 0:
        hits = counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"]
        took = f"{time.monotonic() - began_s:.2f} s"
        print("attempt", os.environ["TORCHELASTIC_RESTART_COUNT"], "found it:", hits > 0, took, flush=True)
    if step == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_second_attempt_finds_what_the_first_has_compiled(tmp_path: Path) -> None:
    (tmp_path / "compiled.py").write_text(COMPILED)
    done = run(tmp_path / "run", "--nproc-per-node", "1", str(tmp_path / "compiled.py"))
    assert done.code == ExitCode.DONE, done.err
    first, second = (line for line in done.out.splitlines() if line.startswith("attempt"))
    assert first.startswith("attempt 0 found it: False")
    assert second.startswith("attempt 1 found it: True")
    assert float(second.split()[-2]) < float(first.split()[-2])
    cache = tmp_path / "run" / "compile-cache"
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    assert any((cache / "inductor").iterdir())
