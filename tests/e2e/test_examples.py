"""Each example, killed and resumed, ends with the very weights of one that nothing touched."""

from pathlib import Path

import pytest
import torch
from tests.e2e.jobs import run

from everstep.domain.errors import ExitCode
from everstep.domain.events import CheckpointRestored

pytestmark = pytest.mark.e2e
EXAMPLES = Path(__file__).parents[2] / "examples"
CASES = {
    "ddp.py": (3, "kill:rank=1,step=40"),
    "fsdp2.py": (2, "kill:rank=0,step=40"),
    "plain.py": (1, "kill:rank=0,step=40"),
}
STEPS = "200"


@pytest.mark.parametrize("name", CASES)
def test_an_example_that_is_killed_ends_with_the_weights_of_one_that_is_not(name: str, tmp_path: Path) -> None:
    count, fault = CASES[name]
    outs = []
    for folder, flags in ((tmp_path / "whole", ()), (tmp_path / "killed", ("--inject", fault))):
        outs.append(folder / "model.pt")
        script = (str(EXAMPLES / name), "--steps", STEPS, "--out", str(outs[-1]))
        done = run(folder, "--nproc-per-node", str(count), *flags, *script)
        assert done.code == ExitCode.DONE, done.err
    [restored] = done.bodies(CheckpointRestored)
    assert restored.path == "memory"
    assert restored.step >= 30
    whole, killed = (torch.load(out) for out in outs)
    assert whole.keys() == killed.keys()
    for key in whole:
        assert torch.equal(whole[key], killed[key]), key


def test_every_example_is_tested() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(CASES)
